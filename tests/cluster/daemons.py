"""Long-running programs beside the tests: started with a log, stopped by process id, gone when the tests are killed."""

from __future__ import annotations

import random
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The kernel kills a child when the *thread* that started it ends, so one thread, which lasts as long as the process,
# starts them all.
_STARTER = ThreadPoolExecutor(1, "starts-daemons")


PATIENCE_S = 180.0
"""How long a program may take to become ready: twenty times what it takes on an idle machine."""


class DaemonError(Exception):
    """A program ended by itself or does not answer. The message holds the end of its log."""


class Daemon:
    """One running program."""

    def __init__(self, command: Sequence[str | Path], log: Path, on_death: str = "KILL") -> None:
        """Start it. The kernel sends it the signal `on_death` when this process dies, in whatever way."""
        self.name = Path(command[0]).name
        self.log = log
        self.started = time.monotonic()
        leashed = ["setpriv", "--pdeathsig", on_death, "--", *map(str, command)]
        with log.open("ab") as output:
            self.process = _STARTER.submit(
                subprocess.Popen,
                leashed,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            ).result()

    def wait_until(self, ready: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        """Ask again and again.

        Raises:
            DaemonError: the program ended, or did not become ready in that time.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if (code := self.process.poll()) is not None:
                raise DaemonError(f"{self.name} ended with {code}; the end of {self.log}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise DaemonError(f"{self.name} is not ready after {seconds} s; the end of {self.log}:\n{self.tail()}")
            time.sleep(0.05)

    def tail(self, lines: int = 25) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()

    def stop(self, seconds: float = 3) -> int:
        """Ask it to end, and make it end after that time; its exit code, negative for a signal."""
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        return self.process.returncode


def free_port() -> int:
    """A loopback port that nothing listens on, from below the range that the kernel hands out by itself."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
