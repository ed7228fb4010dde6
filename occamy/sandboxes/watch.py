"""Limits of a whole tree, which rlimits cannot set: its processes, its memory, the disk that its lease fills.

Nothing tells when they are passed, so they are counted now and then, at a bounded cost. Standard library only; runs
in the keeper."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

BLOCK = 4096
"""Bytes that a file or folder counts for at least: names and inodes fill a disk too."""
DEPTH = 128
"""Deepest folder that is measured or exported; deeper ones count as over every limit. Our choice."""
_REST = 20  # a count that took t seconds is not repeated for _REST * t
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Check:
    def __init__(self, name: str, over: Callable[[], bool]) -> None:
        self.name = name
        self._over = over
        self._due = 0.0

    def passed(self) -> bool:
        now = time.monotonic()
        if now < self._due:
            return False
        over = self._over()
        self._due = now + _REST * (time.monotonic() - now)
        return over


class Watch:
    """The limits of one command's tree: processes and threads, bytes of memory, bytes of disk below `folder`."""

    def __init__(self, processes: int, memory: int, disk: int, folder: str) -> None:
        self._checks = (
            _Check("processes", lambda: sum(threads for _, threads in _tree()) > processes),
            _Check("memory", lambda: _sum(_resident) > memory and _sum(_proportional) > memory),
            _Check("disk", lambda: disk_usage(folder, disk) > disk),
        )

    def passed(self) -> str:
        """Name of the first limit that the tree is seen to pass, or nothing."""
        return next((check.name for check in self._checks if check.passed()), "")


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


def _tree() -> Iterator[tuple[int, int]]:
    """Every descendant with its number of threads, by the kernel's lists of children: cost grows with the tree only.

    A process that moves meanwhile may be missed, which does for a count (not for a kill).
    """
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            threads = os.listdir(f"/proc/{pid}/task")
            for thread in threads:
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as f:
                    waiting += map(int, f.read().split())
            if pid != os.getpid():
                yield pid, len(threads)


def _sum(measure: Callable[[int], int]) -> int:
    total = 0
    for pid, _ in _tree():
        with contextlib.suppress(OSError):
            total += measure(pid)
    return total


def _resident(pid: int) -> int:
    """Cheap, and too much: what processes share is counted in each."""
    with open(f"/proc/{pid}/statm", "rb") as f:
        return int(f.read().split()[1]) * _PAGE


def _proportional(pid: int) -> int:
    """Dear, and right: what n processes share is counted a n-th in each."""
    with open(f"/proc/{pid}/smaps_rollup", "rb") as f:
        return sum(int(line.split()[1]) << 10 for line in f if line.startswith((b"Pss:", b"SwapPss:")))
