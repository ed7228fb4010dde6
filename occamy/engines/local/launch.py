"""Starts a local engine as a child process and always ends it. Does not import torch."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

from occamy.engines.client import EngineError

_STOP_S = 5.0
_TAIL_LINES = 20
_DYING_S = 0.5


@dataclass(frozen=True)
class EngineProcess:
    """A running engine."""

    url: str
    """Base URL on the loopback interface."""
    pid: int


@contextmanager
def launch_engine(
    model: Path,
    *,
    max_running: int = 128,
    threads: int = 1,
    log: Path | None = None,
    version: int = 0,
    port: int = 0,
    context_length: int | None = None,
    deterministic: bool = False,
    start_s: float = 120.0,
) -> Iterator[EngineProcess]:
    """Serve `model` (a checkpoint folder) in a child process for the length of the ``with`` block.

    `deterministic` makes each answer independent, to the last bit, of what runs beside it (see `EngineConfig`).
    The child's output goes to `log` (a temporary file by default). Port 0 takes a free one. The child is ended by its
    pid on the way out, and ends by itself when this process dies.

    Raises EngineError of kind "start", saying what the engine said last, when the port is taken, the checkpoint cannot
    be served, or nothing is ready within `start_s` seconds; of kind "failed", with the end of its log, in place of
    whatever the block raised when the engine died meanwhile.
    """
    command = [sys.executable, "-m", "occamy.engines.local", "--model", str(model), "--port", str(port)]
    command += ["--max-running", str(max_running), "--threads", str(threads), "--weight-version", str(version)]
    if context_length is not None:
        command += ["--context-length", str(context_length)]
    if deterministic:
        command += ["--deterministic"]
    with tempfile.TemporaryDirectory(prefix="occamy-engine-") as scratch:
        path = log or Path(scratch) / "engine.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        start = path.stat().st_size if path.exists() else 0
        read_fd, write_fd = os.pipe()
        with path.open("ab") as output, os.fdopen(read_fd, "rb", buffering=0) as ready:
            try:
                child = subprocess.Popen(
                    [*command, "--launcher-fd", str(write_fd)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(write_fd,),
                    env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
                )
            finally:
                os.close(write_fd)
            try:
                url = _wait_ready(ready, child, path, start, model, start_s)
                try:
                    yield EngineProcess(url, child.pid)
                except Exception as e:
                    try:  # a process being killed drops its connections a moment before it can be waited for
                        code = child.wait(_DYING_S)
                    except subprocess.TimeoutExpired:
                        raise e from None
                    said = _tail(path, start)
                    raise EngineError("failed", f"engine {url} ended with code {code}{said}") from e
            finally:
                _end(child)


def _wait_ready(
    ready: RawIOBase, child: subprocess.Popen[bytes], log: Path, start: int, model: Path, start_s: float
) -> str:
    """The URL from the child's ready line. The pipe closes when the child dies, so this never waits for a dead one."""
    deadline, line = time.monotonic() + start_s, b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([ready], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise EngineError("start", f"engine for {model} was not ready within {start_s:g} s{_tail(log, start)}")
        data = ready.read(4096)
        if not data:
            raise EngineError(
                "start",
                f"engine for {model} ended with code {child.wait(_STOP_S)} before it was ready{_tail(log, start)}",
            )
        line += data
    said: dict[str, str] = json.loads(line)
    if "error" in said:
        raise EngineError("start", f"engine for {model} cannot start: {said['error']}")
    return said["url"]


def _tail(log: Path, start: int) -> str:
    """The last lines that this run wrote, past the first `start` bytes."""
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()[-_TAIL_LINES:]
    return f"; end of {log}:\n" + "\n".join(lines) if lines else f"; {log} is empty"


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.stdin:
        child.stdin.close()
