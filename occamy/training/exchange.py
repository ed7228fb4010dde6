"""The durable file exchange between a driver, which samples batches, and a worker, which trains on them.

    batches/00012/   sealed episodes of step 12        weights/00012/   checkpoint after step 12
    metrics.jsonl    one line per trained step         stop             written by the driver to end the worker early

Folders appear whole (written beside their place, then renamed); version 0 is the checkpoint that the stage began with.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from occamy.contracts.manifest import write_atomic
from occamy.contracts.record import canonical_json

Role = Literal["driver", "worker"]
WRITES = {"driver": "batches", "worker": "weights"}
"""What the holder of each role publishes."""


class ExchangeBusy(RuntimeError):
    """Another live process holds this exchange in the same role."""


class Exchange:
    """Batches, weights and metrics of one RL stage under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics = folder / "metrics.jsonl"
        self._stop = folder / "stop"
        for name in ("batches", "weights"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def batch(self, step: int) -> Path | None:
        """Folder of the complete batch of `step` (from 1), or None while there is none."""
        return self._complete("batches", step)

    def weights(self, version: int) -> Path | None:
        """Checkpoint folder after `version` trained steps, or None while there is none (or it was pruned)."""
        return self._complete("weights", version)

    def newest_weights(self) -> int:
        """Largest published version, 0 when none was published yet."""
        return max((int(p.name) for p in self._folders("weights")), default=0)

    def publish_batch(self, step: int, write: Callable[[Path], object]) -> Path:
        """Publish a batch: `write` fills an empty folder, which then appears as the batch. Keeps an existing batch."""
        return self._publish("batches", step, write)

    def publish_weights(self, version: int, write: Callable[[Path], object]) -> Path:
        """Publish a checkpoint: `write` fills an empty folder. Keeps weights that already exist."""
        return self._publish("weights", version, write)

    def prune_weights(self, keep: int) -> None:
        """Remove all published weights but the newest `keep` versions."""
        for folder in self._folders("weights")[:-keep]:
            doomed = folder.with_name(f".{folder.name}.{os.getpid()}.old")
            folder.rename(doomed)
            shutil.rmtree(doomed)

    def append_metrics(self, step: int, row: dict[str, Any]) -> None:
        """Append the metrics line of `step`, unless it is there already (a resumed worker repeats steps)."""
        rows = self.metrics()
        if any(r["step"] == step for r in rows):
            return
        line = canonical_json({"step": step} | row) + b"\n"
        with self._metrics.open("ab") as f:
            f.truncate(sum(len(canonical_json(r)) + 1 for r in rows))
            f.write(line)
            f.flush()
            os.fsync(f.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """All complete metrics lines in order; a torn last line (killed while appending) is ignored."""
        if not self._metrics.is_file():
            return []
        complete, _, _ = self._metrics.read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in complete.splitlines()]

    def metrics_size(self) -> int:
        """Bytes of metrics so far: a cheap look at whether there are new lines."""
        return self._metrics.stat().st_size if self._metrics.is_file() else 0

    def request_stop(self, reason: str) -> None:
        """Ask the worker to end after the step in hand."""
        write_atomic(self._stop, reason.encode())

    def clear_stop(self) -> None:
        """Withdraw a request to stop, before a worker starts."""
        self._stop.unlink(missing_ok=True)

    def stop_requested(self) -> bool:
        """Whether the driver asked the worker to end."""
        return self._stop.exists()

    @contextmanager
    def held(self, role: Role, wait_s: float = 1.0) -> Iterator[str]:
        """Hold the exchange as its one `driver` (writes batches) or `worker` (writes weights).

        Yields a token that names this holder. The lock dies with the process, so no kill leaves it behind; partial
        folders of an earlier holder are removed. Raises ExchangeBusy when a live process keeps it for `wait_s` seconds.
        """
        with (self.folder / f"{role}.lock").open("a+") as f:
            _lock(f, wait_s)
            token = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
            f.truncate(0)
            f.write(token)
            f.flush()
            for partial in (self.folder / WRITES[role]).glob(".*"):
                shutil.rmtree(partial)
            yield token

    def holder_alive(self, role: Role, token: str) -> bool:
        """Whether the process that `held` the role under this token still lives and still has it."""
        path = self.folder / f"{role}.lock"
        if not path.is_file():
            return False
        with path.open("r+") as f:
            if f.read() != token:
                return False
            try:
                fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def _complete(self, kind: str, number: int) -> Path | None:
        path = self.folder / kind / f"{number:05d}"
        return path if path.is_dir() else None

    def _folders(self, kind: str) -> list[Path]:
        return sorted(p for p in (self.folder / kind).iterdir() if p.name.isdigit())

    def _publish(self, kind: str, number: int, write: Callable[[Path], object]) -> Path:
        final = self.folder / kind / f"{number:05d}"
        if final.is_dir():
            return final
        partial = final.with_name(f".{final.name}.{os.getpid()}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            write(partial)
            for path in partial.rglob("*"):
                if path.is_file():
                    _sync(path)
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(final.parent)
        return final


def _lock(f: IO[str], wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as e:
            if time.monotonic() > deadline:
                f.seek(0)
                raise ExchangeBusy(f"{f.name}: held by process {f.read()}; end it or wait for it") from e
            time.sleep(0.01)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
