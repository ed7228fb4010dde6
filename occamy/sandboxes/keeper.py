"""Runs one command and owns every process that comes of it. Started as a script: standard library only.

It is the subreaper of the command's tree: daemons and double forks come back to it as children. When the other end
of its control socket goes away (freeze, deadline, or death of the rollout process) it kills them all and exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36


def main(control: socket.socket) -> None:
    """Read the spec (one JSON line), run the command, answer its exit status, stay until the tree is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    spec = json.loads(_line(control))
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = os.fork()
    if child == 0:
        _become(spec, control)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    watched: list[socket.socket | int] = [control, wake_read]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            if not _reap(child, control):
                return
        if control in ready and not control.recv(64):
            _kill_tree()
            return


def _line(control: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        chunk = control.recv(1 << 16)
        if not chunk:
            sys.exit(0)
        data += chunk
    return data


def _become(spec: dict[str, Any], control: socket.socket) -> None:
    """In the forked child: new session, limits, then the command itself. Never returns."""
    try:
        os.setsid()
        control.close()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        limits = dict(spec["limits"])
        limits[str(resource.RLIMIT_NPROC)] += _tasks_of_user()
        for which, value in limits.items():
            _, hard = resource.getrlimit(int(which))
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(int(which), (value, value))
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as e:
        os.write(2, f"{spec['argv'][0]}: {e.strerror}\n".encode())
        os._exit(126 if isinstance(e, PermissionError) else 127)
    finally:
        os._exit(127)


def _reap(child: int, control: socket.socket) -> bool:
    """Collect the dead, report the command's exit. Returns False when no process is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):
                control.sendall(f"{code if code >= 0 else 128 - code}\n".encode())


def _kill_tree() -> None:
    """Stop all descendants until no new one appears (a stopped process cannot fork), then kill and reap them."""
    while True:
        stopped: set[int] = set()
        while new := _descendants() - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(stopped, signal.SIGKILL)
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants() -> set[int]:
    parents = {int(name): _parent(name) for name in os.listdir("/proc") if name.isdigit()}
    found = {os.getpid()}
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return found - {os.getpid()}


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return int(f.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _tasks_of_user() -> int:
    """Processes and threads that this user runs now: what RLIMIT_NPROC counts."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
