"""Starts trainer processes and waits for them. Imports neither torch nor megatron: the caller stays light.

One process is started directly in the environment that torchrun would give it (saving torchrun's own start); more than
one go through torchrun.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TAIL_LINES = 30
"""Lines of the trainer's log that an error shows."""
POLL_SECONDS = 0.1
"""Time between looks at a running trainer."""

Progress = Callable[[dict[str, Any]], None]


class TrainingFailed(RuntimeError):
    """A trainer process ended with an error: names the log and shows its tail."""


def run_trainer(
    spec: Path,
    *,
    log: Path,
    processes: int = 1,
    threads: int = 1,
    metrics: Path | None = None,
    on_progress: Progress | None = None,
) -> None:
    """Run `occamy.training.worker SPEC` to its end.

    `metrics` is the JSON-lines file that the trainer appends to; `on_progress` is called in this thread with each of
    its lines, once per step and in order, those of an earlier attempt first. Trainers die with this process, and are
    ended when this call is interrupted.
    Raises TrainingFailed with the end of `log` when the trainer fails.
    """
    reporter = _Reporter(metrics, on_progress) if metrics is not None and on_progress is not None else None
    with started_trainer(spec, log=log, processes=processes, threads=threads) as trainer:
        while True:
            ended = trainer.poll() is not None
            if reporter is not None:
                reporter.look()
            if ended:
                break
            time.sleep(POLL_SECONDS)
    check_ended(trainer, log)


@contextmanager
def started_trainer(
    spec: Path, *, log: Path, processes: int = 1, threads: int = 1
) -> Iterator[subprocess.Popen[bytes]]:
    """Start trainers on `spec` in the background; on leaving, end those still running. Output is appended to `log`.

    Linux ends them with the thread that started them, so enter it from a thread that lives as long.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    worker = ["-m", "occamy.training.worker", str(spec)]
    if processes == 1:
        command = [sys.executable, *worker]
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={processes}"]
        command = [*torchrun, "--master-addr=127.0.0.1", f"--master-port={port}", *worker]
    with log.open("ab") as out:
        trainer = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=_environment(port, processes, threads),
            preexec_fn=_die_with_parent(),
        )
    try:
        yield trainer
    finally:
        _end(trainer)


def check_ended(trainer: subprocess.Popen[bytes], log: Path) -> None:
    """Raise TrainingFailed with the end of `log` when an ended trainer failed."""
    if trainer.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        how = f"signal {-trainer.returncode}" if trainer.returncode < 0 else f"exit status {trainer.returncode}"
        raise TrainingFailed(f"trainer ended with {how}; end of {log}:\n{tail}")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file, leaving out a last line that is still being written. An absent file reads as empty."""
    if not path.is_file():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


class _Reporter:
    """Hands on every step's line once, although a resumed trainer rewrites the end of the file."""

    def __init__(self, metrics: Path, on_progress: Progress) -> None:
        self._metrics, self._on_progress = metrics, on_progress
        self._last_step = -1
        self._seen: tuple[int, int] | None = None

    def look(self) -> None:
        if not self._metrics.is_file():
            return
        status = self._metrics.stat()
        if (now := (status.st_mtime_ns, status.st_size)) == self._seen:
            return
        self._seen = now
        for row in read_metrics(self._metrics):
            if row["step"] > self._last_step:
                self._last_step = row["step"]
                self._on_progress(row)


def _environment(port: int, processes: int, threads: int) -> dict[str, str]:
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
    }
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if processes == 1:
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return env


def free_port() -> int:
    """Return a TCP port on loopback that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _die_with_parent() -> Callable[[], None]:
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def in_child() -> None:
        ask_to_die_with_parent(libc)
        if os.getppid() != parent:  # it died before the request was in place
            os._exit(1)

    return in_child


def ask_to_die_with_parent(libc: ctypes.CDLL | None = None) -> None:
    """Have the kernel end this process (SIGTERM) when its parent dies. Linux only; elsewhere it does nothing."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        (libc or ctypes.CDLL(None)).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)


def _end(trainer: subprocess.Popen[bytes]) -> None:
    if trainer.poll() is None:
        trainer.terminate()
        try:
            trainer.wait(timeout=10)
        except subprocess.TimeoutExpired:
            trainer.kill()
    trainer.wait()
