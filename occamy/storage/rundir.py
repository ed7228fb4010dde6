"""The run directory: who made it (run.json), one writer at a time (run.lock), one folder per stage.

run.json  recipe.json  base.json  run.lock  progress.jsonl  mlflow.db  report.html  logs/  work/<stage>/
stages/<stage>.json (record of a finished stage)  stages/<stage>/ (what it made)
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from occamy import __version__
from occamy.contracts.manifest import write_atomic
from occamy.contracts.record import Record, canonical_json

SCHEMA_VERSION = 1


class RunDirectoryError(RuntimeError):
    """A run directory cannot be used: names the folder, what is wrong and the fix."""


class RunInfo(Record):
    """What made a run directory; another version, recipe or seed may not continue it."""

    version: str
    schema_version: int
    recipe: str
    """Name of the recipe."""
    recipe_digest: str
    seed: int

    @property
    def run_id(self) -> str:
        """Name of the run in tracking."""
        return f"{self.recipe}-{self.seed}-{self.recipe_digest.removeprefix('sha256:')[:8]}"


class StageRecord(Record):
    """Written last, beside a finished stage's folder: finished work with equal inputs is never done twice."""

    stage: str
    inputs: str
    """Digest of everything the stage depends on: its configuration, its parents, the seed."""
    output: str
    """Digest of what it made."""
    facts: dict[str, float | int | str]
    """Figures worth showing."""


class RunDirectory:
    """Paths and rules of one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def tracking_uri(self) -> str:
        """Where MLflow keeps this run: an sqlite file."""
        return f"sqlite:///{self.path / 'mlflow.db'}"

    def stage(self, name: str) -> Path:
        """Folder of a stage's output: missing, unfinished, or finished when its record lies beside it."""
        return self.path / "stages" / name

    def work(self, name: str) -> Path:
        """Folder for what a stage needs only while it works."""
        return self.path / "work" / name

    def log(self, name: str) -> Path:
        """Log file of a stage or service."""
        folder = self.path / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"

    @property
    def run_id(self) -> str:
        """Name of the run in tracking. Raises RunDirectoryError where there is no run."""
        info = self.info()
        if info is None:
            raise RunDirectoryError(f"{self.path}: no run.json; start with `occamy run`")
        return info.run_id

    def info(self) -> RunInfo | None:
        """What made this directory, or None where there is no run.json.

        Raises RunDirectoryError when run.json is not of this version.
        """
        path = self.path / "run.json"
        if not path.is_file():
            return None
        try:
            info = RunInfo.model_validate_json(path.read_bytes())
        except ValidationError as e:
            raise RunDirectoryError(f"{path}: not readable by occamy {__version__}; start in a new directory") from e
        if (info.version, info.schema_version) != (__version__, SCHEMA_VERSION):
            raise RunDirectoryError(
                f"{self.path}: made by occamy {info.version} (schema {info.schema_version}), this is occamy "
                f"{__version__} (schema {SCHEMA_VERSION}); install that version to go on, or start in a new directory"
            )
        return info

    def open(self, recipe: Record, name: str, recipe_digest: str, seed: int) -> None:
        """Make the directory, or check that it belongs to the same version, recipe and seed.

        Raises RunDirectoryError naming what differs.
        """
        want = RunInfo(
            version=__version__, schema_version=SCHEMA_VERSION, recipe=name, recipe_digest=recipe_digest, seed=seed
        )
        have = self.info()
        if have is None:
            if self.path.exists() and (not self.path.is_dir() or any(self.path.glob("stages/*"))):
                raise RunDirectoryError(f"{self.path}: exists and is no run directory; choose another --out")
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / "recipe.json", canonical_json(recipe))
            write_atomic(self.path / "run.json", canonical_json(want))
        elif have != want:
            what = "seed" if have.recipe_digest == want.recipe_digest else "recipe"
            raise RunDirectoryError(
                f"{self.path}: holds recipe {have.recipe!r} ({have.recipe_digest[:15]}) with seed {have.seed}, "
                f"asked for {name!r} ({recipe_digest[:15]}) with seed {seed}; another {what} needs a new directory, "
                f"or go on with `occamy run --resume {self.path}`"
            )

    def check_base(self, weights: str) -> None:
        """Raise RunDirectoryError when this run began from base weights of another digest."""
        path = self.path / "base.json"
        began = json.loads(path.read_bytes())["weights_digest"] if path.is_file() else weights
        if began != weights:
            raise RunDirectoryError(
                f"{self.path}: began from base weights {began[:15]}, the recipe's base is now {weights[:15]}; "
                "put the old base back, or start in a new directory"
            )

    def pin_base(self, weights: str) -> None:
        """Note the digest of the base weights that this run begins from. Raises as `check_base`."""
        self.check_base(weights)
        write_atomic(self.path / "base.json", canonical_json({"weights_digest": weights}))

    @contextmanager
    def lock(self) -> Iterator[int]:
        """Hold the directory for this process and those that inherit the yielded file descriptor.

        Raises RunDirectoryError when another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(handle, 32, 0).decode().strip() or "unknown"
                raise RunDirectoryError(
                    f"{self.path}: another occamy (process {owner}) works in this directory; "
                    "wait until it ends, or choose another --out"
                ) from None
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            yield handle
        finally:
            os.close(handle)

    def finished(self, name: str, inputs: str) -> StageRecord | None:
        """The record of a finished stage with equal inputs, else None.

        Raises RunDirectoryError when the stage finished with other inputs.
        """
        if not self.has_finished(name):
            return None
        record = self.record(name)
        if record.inputs != inputs:
            raise RunDirectoryError(
                f"{self.stage(name)}: was made from other inputs ({record.inputs[:15]}, now {inputs[:15]}); "
                f"use a new run directory, or remove {self._record(name)} to make the stage again"
            )
        return record

    def record(self, name: str) -> StageRecord:
        """The record of a finished stage. Raises RunDirectoryError when there is none, or none that can be read."""
        path = self._record(name)
        try:
            return StageRecord.model_validate_json(path.read_bytes())
        except FileNotFoundError as e:
            raise RunDirectoryError(f"{self.stage(name)}: not finished; run the stage first") from e
        except ValidationError as e:
            raise RunDirectoryError(f"{path}: unreadable; remove it and run again") from e

    def has_finished(self, name: str) -> bool:
        """Whether a stage has its record."""
        return self._record(name).is_file()

    def finish(self, record: StageRecord) -> None:
        """Write the record of a finished stage."""
        write_atomic(self._record(record.stage), canonical_json(record))

    def _record(self, name: str) -> Path:
        return self.path / "stages" / f"{name}.json"
