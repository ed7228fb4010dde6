"""Progress of stages as lines of a file: stage processes append, the command line follows. One JSON object a line."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["started", "running", "finished", "reused", "failed"]
NAME = "progress.jsonl"
_INTERVAL_S = 0.2


@dataclass(frozen=True)
class ProgressEvent:
    """One line of the progress file."""

    time: float
    """Seconds since the epoch."""
    stage: str
    state: State
    done: int = 0
    total: int = 0
    """Units of work; 0 when the stage cannot tell."""
    figure: str = ""
    """The figure that matters at this stage, ready to show: ``reward 0.41``, ``212/400 admitted``."""


class Progress:
    """Writer of one stage. Call it as often as you like; lines are thinned to five a second."""

    def __init__(self, run_dir: Path, stage: str) -> None:
        self._path = run_dir / NAME
        self._stage = stage
        self._last = 0.0

    def __call__(self, done: int, total: int, figure: str = "") -> None:
        """Say that `done` of `total` units are done, with the figure that matters."""
        now = time.monotonic()
        if done < total and now - self._last < _INTERVAL_S:
            return
        self._last = now
        self._append("running", done, total, figure)

    def state(self, state: State, figure: str = "") -> None:
        """Say that the stage started, finished, was reused or failed (with the reason as `figure`)."""
        self._append(state, 0, 0, figure)

    def _append(self, state: State, done: int, total: int, figure: str) -> None:
        event = ProgressEvent(round(time.time(), 3), self._stage, state, done, total, figure)
        line = json.dumps(event.__dict__, ensure_ascii=False).encode() + b"\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line)  # one write below the pipe size: lines of several processes do not mix
        finally:
            os.close(handle)


class ProgressReader:
    """Reads the events that were appended since the last call. A half-written last line waits for its rest."""

    def __init__(self, run_dir: Path, *, from_end: bool = False) -> None:
        self._path = run_dir / NAME
        self._offset = self._path.stat().st_size if from_end and self._path.exists() else 0

    def poll(self) -> list[ProgressEvent]:
        """Return new events in order; none when nothing was written."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as f:
            f.seek(self._offset)
            data = f.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [event for line in data[:end].splitlines() if (event := _parse(line)) is not None]


def _parse(line: bytes) -> ProgressEvent | None:
    """A line torn by a killed writer is skipped: progress is for people, not for resuming."""
    try:
        value: dict[str, Any] = json.loads(line)
        return ProgressEvent(**value)
    except (ValueError, TypeError):
        return None
