"""The bubblewrap level: what of the host a command sees, as a bwrap command line.

Programs come from the system folders and from what the lease names as readable; background processes end with the
command that started them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_SCRATCH_BYTES = 256 << 20
"""Size of the private /tmp and of /dev/shm of one command. Our choice."""


@dataclass(frozen=True)
class View:
    """What of the host's files a lease shows to its commands, each at its own path."""

    writable: tuple[Path, ...]
    readable: tuple[Path, ...] = ()
    etc: Path | None = None
    """Folder with the files of /etc that programs ask for, made by `write_etc`."""


def write_etc(folder: Path) -> None:
    """Write a user, a group and a host name, so that no file of the host's /etc has to be shown."""
    folder.mkdir()
    user, group = os.getuid(), os.getgid()
    (folder / "passwd").write_text(f"agent:x:{user}:{group}:agent:/tmp:/bin/sh\n")
    (folder / "group").write_text(f"agent:x:{group}:\n")
    (folder / "hosts").write_text("127.0.0.1 localhost\n")


@functools.cache
def available() -> bool:
    """True when bwrap is installed, has the options used here (0.8), and the kernel lets it make its namespaces."""
    if shutil.which("bwrap") is None:
        return False
    probe = wrap(["true"], View(writable=()), cwd=Path("/"))
    return subprocess.run(probe, capture_output=True, timeout=10, check=False).returncode == 0


def wrap(
    argv: Sequence[str], view: View, cwd: Path, *, own_network: bool = True, status_fd: int | None = None
) -> list[str]:
    """The bwrap command line for `argv`: system folders read-only, what `view` names, nothing else.

    Own process ids, private /tmp, no capability, no way to new namespaces; other leases, graders and home folders are
    not visible. `own_network` is False when the caller has entered an own network namespace already. On `status_fd`
    bwrap tells the command's exit, and does not when it could not run it.
    """
    line = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    line += [] if own_network else ["--share-net"]
    line += [] if status_fd is None else ["--json-status-fd", str(status_fd)]
    line += ["--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev"]
    for folder in ("/tmp", "/dev/shm"):
        line += ["--size", str(_SCRATCH_BYTES), "--tmpfs", folder]
    for system in _SYSTEM:
        line += ["--ro-bind-try", system, system]
    if view.etc is not None:
        for name in ("passwd", "group", "hosts"):
            line += ["--ro-bind", str(view.etc / name), f"/etc/{name}"]
    for path in view.readable:
        line += ["--ro-bind", str(path), str(path)]
    for path in view.writable:
        line += ["--bind", str(path), str(path)]
    for mounted in ("/proc", "/dev", "/"):  # /proc holds kernel settings, which root may otherwise write
        line += ["--remount-ro", mounted]
    line += ["--chdir", str(cwd), "--"]
    return [*line, "sh", "-c", 'exec "$@"', "sh", *argv]  # a missing program is exit 127, not a failure of bwrap
