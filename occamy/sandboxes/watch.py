"""Limits of a whole tree, which rlimits cannot set: its processes, its memory, the disk that its lease fills.

Each has a hint that is one cheap read of a machine-wide figure, and an exact count that is made only when the hint
says that the limit may be passed, and then in a twentieth of the time at most. Standard library only; runs in the
keeper."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from occamy.sandboxes.tree import descendants

BLOCK = 4096
"""Bytes that a file or folder counts for at least: names and inodes fill a disk too."""
DEPTH = 128
"""Deepest folder that is measured or exported; deeper ones count as over every limit. Our choice."""
_DUTY = 20


@dataclass
class _Check:
    name: str
    limit: int
    hint: Callable[[], int]
    exact: Callable[[], int]
    due: float = 0.0

    def passed(self, now: float) -> bool:
        if now < self.due or self.hint() <= self.limit:
            return False
        over = self.exact() > self.limit
        self.due = now + _DUTY * (time.monotonic() - now)
        return over


class Watch:
    """The limits of one command's tree. Machine-wide figures count from now on, those of the disk from `free`."""

    def __init__(self, processes: int, memory: int, disk: int, folder: str, free: int) -> None:
        tasks, available = _tasks(), _available_memory()
        self._checks = (
            _Check("processes", processes, lambda: _tasks() - tasks, lambda: sum(descendants().values())),
            _Check("memory", memory, lambda: available - _available_memory(), _tree_memory),
            _Check("disk", disk, lambda: free - room(folder), lambda: disk_usage(folder, disk)),
        )

    def passed(self) -> str:
        """Name of the first limit that the tree has passed, or nothing."""
        now = time.monotonic()
        return next((check.name for check in self._checks if check.passed(now)), "")


def room(folder: str) -> int:
    """Bytes free to this user on the file system of `folder`, with each free inode counted as one block."""
    at = os.statvfs(folder)
    return at.f_bavail * at.f_frsize + at.f_favail * BLOCK


def disk_usage(folder: str, enough: int) -> int:
    """Bytes on disk below `folder`, counted until they pass `enough`. A folder below DEPTH counts as more than that."""
    total = 0
    waiting = [(folder, 0)]
    while waiting and total <= enough:
        path, depth = waiting.pop()
        if depth > DEPTH:
            return enough + 1
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                total += max(entry.stat(follow_symlinks=False).st_blocks * 512, BLOCK)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, depth + 1))
    return total


def _tasks() -> int:
    with open("/proc/loadavg", "rb") as f:
        return int(f.read().split()[3].partition(b"/")[2])


def _available_memory() -> int:
    with open("/proc/meminfo", "rb") as f:
        for line in f:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def _tree_memory() -> int:
    """Proportional set sizes: a page that processes share counts once."""
    total = 0
    for pid in descendants():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as f:
            total += sum(int(line.split()[1]) << 10 for line in f if line.startswith((b"Pss:", b"SwapPss:")))
    return total
