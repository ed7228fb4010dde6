"""The few addresses that a command without network may reach: listeners inside its network namespace, accepted and
carried to the same addresses of the host by the keeper, outside of it. Nothing of this runs inside the sandbox.
Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import threading
import time

Address = tuple[str, int]

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_CONNECTIONS = 128  # at once, of one command; more wait. Our choice
_CHUNK = 1 << 16
_PAUSE_S = 0.005
_FLUSH_S = 1.0


def enter_network(addresses: list[Address]) -> list[socket.socket]:
    """Move this process into a network of its own and listen there. Raises OSError where the kernel forbids it.

    The user namespace around it is what lets an ordinary user make a network; ids stay as they are.
    """
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as f:
            f.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    return [socket.create_server(address, backlog=_CONNECTIONS) for address in addresses]


class Relay:
    """Carries the connections of every listener to its target, in threads that end with this process."""

    def __init__(self, listeners: list[socket.socket], targets: list[Address]) -> None:
        self._listeners = listeners
        self._slots = threading.BoundedSemaphore(_CONNECTIONS)
        self._lock = threading.Lock()
        self._sending = 0
        for listener, target in zip(listeners, targets):
            threading.Thread(target=self._accept, args=(listener, target), daemon=True).start()

    def flush(self) -> None:
        """After the end of the tree: wait, not for long, until what it has sent has gone out."""
        end = time.monotonic() + _FLUSH_S
        while self._pending() and time.monotonic() < end:
            time.sleep(_PAUSE_S)

    def _pending(self) -> bool:
        with self._lock:
            return bool(self._sending or select.select(self._listeners, [], [], 0)[0])

    def _accept(self, listener: socket.socket, target: Address) -> None:
        while True:
            self._slots.acquire()
            select.select([listener], [], [])
            with self._lock:
                try:
                    inside, _ = listener.accept()
                except OSError:  # gone before it was accepted, or no descriptor left for it
                    self._slots.release()
                    time.sleep(_PAUSE_S)
                    continue
                self._sending += 1
            threading.Thread(target=self._join, args=(inside, target), daemon=True).start()

    def _join(self, inside: socket.socket, target: Address) -> None:
        try:
            with inside, socket.create_connection(target) as outside:
                for end in (inside, outside):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(target=_pump, args=(outside, inside), daemon=True)
                back.start()
                _pump(inside, outside)
                self._sent()
                back.join()
        except OSError:  # nobody listens out there: the command sees its connection closed
            self._sent()
        finally:
            self._slots.release()

    def _sent(self) -> None:
        with self._lock:
            self._sending -= 1


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Carry bytes one way to their end, and pass the end on."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
