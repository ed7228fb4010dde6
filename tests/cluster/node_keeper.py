"""Keeps one test node: runs it in process and mount namespaces of its own, and leaves nothing when it ends or dies.

Run as a program by `tests.cluster.node`: `node_keeper.py FOLDER CGROUP PATH [KUBELET OPTION]…`. What containerd and
kubelet would change on the machine, they change in the namespaces alone, and the kernel ends every process and every
mount with those. What is left, control groups, is removed here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# What kubelet and the network plugin want to find. A file is laid over each, so that they do not write the real one.
SETTINGS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
    "net/ipv4/ip_forward": 1,
}
HIDDEN = ("run", "var/lib", "var/log")
"""Folders in which they leave sockets, volumes, logs and caches at fixed places."""
CGROUPS = Path("/sys/fs/cgroup")


def prepare(folder: Path) -> str:
    """Make the folders and files that the namespace lays over the machine's; returns the shell lines that do it."""
    lines = []
    for name in HIDDEN:
        (folder / "over" / name).mkdir(parents=True)
        lines.append(f"mount --bind {folder}/over/{name} /{name}")
    for name, value in SETTINGS.items():
        if not Path("/proc/sys", name).exists():
            continue
        over = folder / "over/settings" / name
        over.parent.mkdir(parents=True, exist_ok=True)
        over.write_text(f"{value}\n")
        lines.append(f"mount --bind {over} /proc/sys/{name}")
    return "\n".join(lines)


def run(folder: Path, programs: str, options: list[str], held_by_node: int) -> subprocess.Popen[bytes]:
    """Start containerd and kubelet under the first process of new namespaces; when one of them ends, all end."""
    script = f"""set -eu
cd {folder}
{prepare(folder)}
containerd --config containerd.toml >containerd.log 2>&1 &
kubelet "$@" >kubelet.log 2>&1 &
wait -n
"""
    alone = ["unshare", "--mount", "--pid", "--kill-child", "--mount-proc", "bash", "-c", script, "node", *options]
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "--", *alone], env={"PATH": programs}, pass_fds=(held_by_node,)
    )


def make_cgroups(name: str) -> None:
    """Make the control group of this name in every hierarchy; kubelet keeps all pods below it."""
    tops = [CGROUPS] if (CGROUPS / "cgroup.controllers").exists() else list(CGROUPS.iterdir())
    for top in tops:
        if not top.is_symlink():
            (top / name).mkdir()


def remove_cgroups(name: str, seconds: float = 20) -> None:
    """Remove the control groups of this name from every hierarchy, as soon as the last process in them has ended.

    Raises:
        OSError: one is still in use after that time.
    """
    deadline = time.monotonic() + seconds
    for top in [*CGROUPS.glob(name), *CGROUPS.glob(f"*/{name}")]:
        for folder in sorted((path for path in [top, *top.rglob("*")] if path.is_dir()), reverse=True):
            while True:
                try:
                    folder.rmdir()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)


def main() -> int:
    """Run until SIGTERM, or until the node ends by itself (then 1), and clean up."""
    folder, cgroup, programs, *options = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    make_cgroups(cgroup)
    open_while_it_lives, held = os.pipe()
    node = run(Path(folder), programs, options, held)
    os.close(held)
    try:
        node.wait()
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        node.kill()
        node.wait()
        os.read(open_while_it_lives, 1)  # returns when the last process of the node is gone
        remove_cgroups(cgroup)


if __name__ == "__main__":
    sys.exit(main())
