"""The bubblewrap level: what of the host a command sees, as a bwrap command line.

Programs come from the system folders only; background processes end with the command that started them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")


@functools.cache
def available() -> bool:
    """True when bwrap is installed and this kernel lets it make its namespaces."""
    if shutil.which("bwrap") is None:
        return False
    probe = wrap(["true"], writable=(), cwd=Path("/"))
    return subprocess.run(probe, capture_output=True, timeout=10, check=False).returncode == 0


def wrap(argv: Sequence[str], writable: Sequence[Path], cwd: Path) -> list[str]:
    """The bwrap command line for `argv`: system folders read-only, `writable` folders at their own paths, nothing else.

    No network, own process ids, private /tmp; other leases, graders and home folders are not visible.
    """
    line = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--dev", "/dev", "--proc", "/proc"]
    line += ["--tmpfs", "/tmp"]
    for folder in _SYSTEM:
        line += ["--ro-bind-try", folder, folder]
    for path in writable:
        line += ["--bind", str(path), str(path)]
    return [*line, "--chdir", str(cwd), "--", *argv]
