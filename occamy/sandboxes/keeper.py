"""Runs one command and owns every process that comes of it, as a process of its own. Standard library only.

It is the subreaper of the command's tree: daemons and double forks come back to it as children. When the other end
of its control socket goes away (freeze, deadline, or death of the rollout process), when the lease ends or a limit
is passed, it kills them all and exits. It reports JSON lines: the command's exit, or why it never ran.
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
import time
from typing import TYPE_CHECKING, Any

from occamy.sandboxes.tree import kill_tree
from occamy.sandboxes.watch import Watch

if TYPE_CHECKING:
    from occamy.sandboxes.relay import Relay

_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_TICK_S = 0.2
_KILLED = 128 + signal.SIGKILL


def main(control_fd: int) -> None:
    """Read the spec (one JSON line), run the command, report, stay until the tree is gone."""
    control = socket.socket(fileno=control_fd)
    _prctl(_PR_SET_CHILD_SUBREAPER)
    spec = json.loads(_line(control))
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    watch = Watch(**spec["watch"])
    end = time.monotonic() + spec["seconds"]
    ours, theirs = socket.socketpair()
    status, status_write = os.pipe()
    os.set_blocking(status, False)
    child = os.fork()
    if child == 0:
        _become(spec, control, theirs, status_write)
    theirs.close()
    os.close(status_write)
    with contextlib.suppress(OSError):  # granted to root, whose forks no rlimit stops: do not be starved by them
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    try:
        relay = _carry(ours, spec["reach"])
    except OSError as e:
        _report(control, fault=f"no network of its own: {e}")
        kill_tree(child)
        return
    if _keep(child, control, wake_read, watch, end, status if spec["status_fd"] else None) and relay is not None:
        relay.flush()


def _keep(child: int, control: socket.socket, wake: int, watch: Watch, end: float, status: int | None) -> bool:
    """Wait for the end of the tree (True), or bring it about. `child` is the command itself, or bwrap around it."""
    watched: list[socket.socket | int] = [control, wake]
    while True:
        ready, _, _ = select.select(watched, [], [], _TICK_S)
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            code, left = _reap(child)
            if code is not None:
                child = 0
                if status is None or _ran(status):
                    _report(control, exit=code)
                else:
                    _report(control, fault=f"bwrap ended with {code} and did not run it")
            if not left:
                return True
        if control in ready and not control.recv(64):
            kill_tree(child)
            return False
        limit = "deadline" if time.monotonic() > end else watch.passed()
        if limit:
            kill_tree(child)
            if child:
                _report(control, exit=_KILLED, limit=limit)
            return False


def _ran(status: int) -> bool:
    """Whether bwrap, which has ended, told the exit of a command."""
    with contextlib.suppress(BlockingIOError):
        return b"exit-code" in os.read(status, 4096)
    return False


def _carry(channel: socket.socket, reach: list[list[Any]]) -> Relay | None:
    """Receive the listeners that the child has opened in its network, and serve them. Raises OSError without them."""
    with channel:
        if not reach:
            return None
        from occamy.sandboxes.relay import Relay  # threads and all: only commands that reach something pay for it

        said, fds, _, _ = socket.recv_fds(channel, 4096, len(reach))
    if len(fds) != len(reach):
        raise OSError(said.decode())
    return Relay([socket.socket(fileno=fd) for fd in fds], [(host, port) for host, port in reach])


def _listen(channel: socket.socket, reach: list[list[Any]]) -> None:
    """In the child: move into a network of its own and hand the listeners to the keeper."""
    from occamy.sandboxes.relay import enter_network

    try:
        listeners = enter_network([(host, port) for host, port in reach])
    except OSError as e:
        channel.sendall(str(e).encode())
        os._exit(127)
    socket.send_fds(channel, [b" "], [listener.fileno() for listener in listeners])


def _become(spec: dict[str, Any], control: socket.socket, channel: socket.socket, status: int) -> None:
    """In the forked child: new session, own network, limits, then the command itself. Never returns."""
    try:
        os.setsid()
        control.close()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(spec["cwd"])
        if spec["reach"]:
            _listen(channel, spec["reach"])
        limits = dict(spec["limits"])
        tasks = str(resource.RLIMIT_NPROC)
        if os.getuid() and tasks in limits:  # the kernel counts the user's tasks, and does not hold root to a number
            limits[tasks] += _tasks_of_user()
        for which, value in limits.items():
            _, hard = resource.getrlimit(int(which))
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(int(which), (value, value))
        if spec["status_fd"]:
            os.dup2(status, spec["status_fd"])
            os.set_inheritable(spec["status_fd"], True)
        _prctl(_PR_SET_NO_NEW_PRIVS)  # a program with a setuid bit could not be killed by us
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as e:
        os.write(2, f"{spec['argv'][0]}: {e.strerror}\n".encode())
        os._exit(126 if isinstance(e, PermissionError) else 127)
    finally:
        os._exit(127)


def _reap(child: int) -> tuple[int | None, bool]:
    """Collect the dead. Returns the command's exit if it is among them, and whether any process is left."""
    code: int | None = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return code, True
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                code = code if code >= 0 else 128 - code
    return code, False


def _report(control: socket.socket, **fields: object) -> None:
    with contextlib.suppress(OSError):
        control.sendall(json.dumps(fields).encode() + b"\n")


def _line(control: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        chunk = control.recv(1 << 16)
        if not chunk:
            sys.exit(0)
        data += chunk
    return data


def _prctl(option: int) -> None:
    ctypes.CDLL(None).prctl(option, 1, 0, 0, 0)


def _tasks_of_user() -> int:
    """Processes and threads that this user runs now: what RLIMIT_NPROC counts."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count
