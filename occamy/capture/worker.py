"""`python -m occamy.capture.worker FD`: one proxy of several, on a listening socket that it inherits.

Settings come as one line of JSON on standard input; when that ends, because the parent closed it or died, so does the
worker. The parent keeps the socket open, so that clients of a dead worker wait in its queue for the next one.
"""

from __future__ import annotations

import fcntl
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field

from occamy.capture.server import ProxyServer
from occamy.contracts.record import Record


class ProxySettings(Record):
    """How a stand-alone proxy runs. Defaults are our choice."""

    folder: Path
    """Where its captures lie."""
    tokenizer: Path
    """The policy's checkpoint folder, or its tokenizer alone."""
    engine: str
    """Base URL of the engine."""
    context_limit: int = Field(ge=2)
    """Tokens of prompt and answer."""
    hold_seconds: float = Field(default=120.0, gt=0)
    """How long a call waits for an engine that is down or being updated."""
    answer_seconds: float = Field(default=600.0, gt=0)
    """How long the engine may work on one answer."""
    admin_key: str = Field(min_length=16)
    """Opens the admin API."""

    @contextmanager
    def serving(self, listener: socket.socket) -> Iterator[ProxyServer]:
        """Serve on `listener` inside the block. Raises RuntimeError when another proxy serves the folder."""
        with (
            taken(self.folder),
            ProxyServer(
                self.folder,
                self.tokenizer,
                engine_url=self.engine,
                context_limit=self.context_limit,
                hold_seconds=self.hold_seconds,
                answer_seconds=self.answer_seconds,
                admin_key=self.admin_key,
                listener=listener,
            ) as server,
        ):
            yield server


@contextmanager
def taken(folder: Path, seconds: float = 10.0) -> Iterator[None]:
    """Hold a folder for this process alone; a killed process lets go of it.

    Raises RuntimeError when another one holds it longer than `seconds`: time to end after it lost its parent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    with (folder / "proxy.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{folder} is served by another proxy; stop it or give another folder") from None
                time.sleep(0.05)
        yield


def main() -> None:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    settings = ProxySettings.model_validate_json(sys.stdin.buffer.readline())
    with settings.serving(socket.socket(fileno=int(sys.argv[1]))):
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
