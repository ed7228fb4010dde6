"""The process tree of a keeper: what it is made of, and its end. Standard library only; runs in the keeper."""

from __future__ import annotations

import contextlib
import os
import signal
import time

_PAUSE_S = 0.001


def descendants() -> dict[int, int]:
    """Living processes below this one, with the number of threads of each."""
    table = {int(name): _parent_and_threads(name) for name in os.listdir("/proc") if name.isdigit()}
    found = {os.getpid()}
    grew = True
    while grew:
        more = {pid for pid, (parent, _) in table.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return {pid: table[pid][1] for pid in found - {os.getpid()}}


def kill_tree(root: int) -> None:
    """Kill and reap every descendant. `root` is the child to kill first, 0 when it is reaped already.

    A pid namespace falls with its root at once. Anything else is stopped until no new process appears (a stopped one
    cannot fork), then killed; and all of it again for what was born between a stop's sending and its arrival.
    """
    if root:
        _signal({root}, signal.SIGKILL)
    while _reap():
        stopped: set[int] = set()
        while new := descendants().keys() - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(stopped, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _reap() -> bool:
    """Collect dead children. Returns False when there is no child left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _parent_and_threads(pid: str) -> tuple[int, int]:
    """Fields 4 and 20 of proc_pid_stat(5); (0, 0) for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
        return int(fields[1]), int(fields[17])
    except OSError:
        return 0, 0
