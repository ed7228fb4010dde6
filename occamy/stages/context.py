"""What every stage shares: recipe and run directory, the finished-or-run rule, and an eye on the process that asked."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from occamy.contracts.record import digest
from occamy.recipe import Recipe, recipe_from_json
from occamy.storage.progress import Progress
from occamy.storage.rundir import RunDirectory, RunDirectoryError, StageRecord
from occamy.tracking.experiment import join_experiment
from occamy.tracking.mlflow_runs import log_stage

OWNER = "OCCAMY_OWNER_PID"
"""Environment variable naming the process whose end ends the stages that it started."""

Facts = dict[str, float | int | str]


@dataclass(frozen=True)
class Context:
    """Where a stage works and by which recipe."""

    recipe: Recipe
    run: RunDirectory


@dataclass(frozen=True)
class StageResult:
    """What a stage made."""

    path: Path
    digest: str
    facts: Facts
    reused: bool = False

    @property
    def uri(self) -> str:
        """Location for a typed artifact: weights and data travel by name, not by copy."""
        return str(self.path)

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata for a typed artifact: the digest and the figures worth showing."""
        return {"digest": self.digest, **self.facts}


@dataclass(frozen=True)
class Made:
    """What the body of a stage hands back."""

    digest: str
    facts: Facts
    curves: Sequence[Mapping[str, Any]] = ()
    """Learning curves for tracking: one mapping of numbers per step."""


Body = Callable[[Path, Progress], Made]
"""``body(out, progress)``: makes or goes on making `out`, which survives a kill."""


def context(recipe: str, run_dir: str) -> Context:
    """Context from what travels through a pipeline: the resolved recipe as JSON and the run directory."""
    end_with_owner()
    return Context(recipe_from_json(recipe), RunDirectory(Path(run_dir)))


def run_stage(ctx: Context, name: str, inputs: Callable[[], Mapping[str, Any]], body: Body) -> StageResult:
    """Return the finished stage when its inputs are equal, else run `body`, track it and record what it made.

    `inputs` reads, and verifies, everything that the result depends on. Raises RunDirectoryError when the stage is at
    work in another process or was made from other inputs, and whatever `inputs` and `body` raise.
    """
    progress = Progress(ctx.run.path, name)
    out = ctx.run.stage(name)
    try:
        with _only_one(ctx.run, name):
            inputs_digest = digest({"stage": name, "seed": ctx.recipe.seed, **inputs()})
            record = ctx.run.finished(name, inputs_digest)
            if record is not None:
                progress.state("reused", headline(record.facts))
                return StageResult(out, record.output, record.facts, reused=True)
            progress.state("started")
            started = time.monotonic()
            made = body(out, progress)
            facts: Facts = {**made.facts, "seconds": round(time.monotonic() - started, 1)}
            _track(ctx, name, facts, made.curves)
            ctx.run.finish(StageRecord(stage=name, inputs=inputs_digest, output=made.digest, facts=facts))
            progress.state("finished", headline(facts))
            return StageResult(out, made.digest, facts)
    except BaseException as e:
        progress.state("failed", str(e) if isinstance(e, ValueError | RuntimeError) else f"{type(e).__name__}: {e}")
        raise


def _track(ctx: Context, name: str, facts: Facts, curves: Sequence[Mapping[str, Any]]) -> None:
    """Log the stage to MLflow. A problem is reported in the stage's log and never fails the stage."""
    experiment, problem = join_experiment(ctx.run.tracking_uri, ctx.recipe.family)
    numbers = {k: float(v) for k, v in facts.items() if isinstance(v, int | float)}
    words = {k: v for k, v in facts.items() if isinstance(v, str)}
    logged = log_stage(experiment, ctx.run.run_id, name, params=words, metrics=numbers, curves=curves)
    if problem or logged.problem:
        print(f"tracking of stage {name} failed: {problem or logged.problem}", file=sys.stderr)


def headline(facts: Mapping[str, float | int | str]) -> str:
    """Facts as one short line, sentences left out: ``admitted 380, quarantined 20``."""
    parts = []
    for name, value in sorted(facts.items()):
        if name != "seconds" and len(str(value)) < 30:
            parts.append(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(parts)


@contextmanager
def _only_one(run: RunDirectory, name: str) -> Iterator[None]:
    folder = run.path / "work"
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + 20  # a killed run's stage needs a moment to notice and end
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunDirectoryError(
                        f"{run.path}: stage {name} is at work in another process; wait for it"
                    ) from None
                time.sleep(0.2)
        yield
    finally:
        os.close(handle)


def end_with_owner() -> None:
    """End this process and what it started soon after the process that asked for it is gone, however that went."""
    owner = int(os.environ.get(OWNER, "0"))
    if owner:
        threading.Thread(target=_watch, args=(owner,), daemon=True, name="owner-watch").start()


def _watch(owner: int) -> None:
    while True:
        try:
            os.kill(owner, 0)
        except ProcessLookupError:
            _kill_children(os.getpid())
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)


def _kill_children(pid: int) -> None:
    """Kill all descendants of `pid`, deepest last (Linux: read from /proc)."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(stat.rsplit(")", 1)[1].split()[1]), []).append(int(entry.name))
    queue = parents.get(pid, [])
    while queue:
        child = queue.pop()
        queue += parents.get(child, [])
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
