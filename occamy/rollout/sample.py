"""Sampling with a checkpoint: starts the local engine, runs k trials of given tasks, seals the episodes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from occamy.contracts.lineage import weights_digest
from occamy.contracts.manifest import Manifest, SealError, verify
from occamy.contracts.record import digest
from occamy.contracts.task import TaskContract
from occamy.engines.local.launch import launch_engine
from occamy.harness.loading import load
from occamy.rollout.config import RolloutConfig
from occamy.rollout.jobs import make_jobs
from occamy.rollout.session import RolloutSession


def sample_episodes(
    tasks: Sequence[TaskContract],
    checkpoint: Path,
    out: Path,
    config: RolloutConfig,
    *,
    trials: int,
    seed: int,
    model: str,
    kind: str = "episodes",
    parents: dict[str, str] | None = None,
    facts: dict[str, Any] | None = None,
    work: Path | None = None,
    log: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Manifest:
    """Run `trials` attempts at each task with `checkpoint` and seal all of them, quarantined ones too, in `out`.

    Idempotent and resumable like `demonstrate`. `log` takes the engine's output. Raises SealError when `out` holds
    something else, RolloutStopped when the engine keeps failing.
    """
    jobs = list(
        make_jobs(tasks, trials=trials, seed=seed, sampled_by="policy", temperature=config.temperature, model=model)
    )
    asked = digest(
        {"jobs": [j.digest() for j in jobs], "config": config.digest(), "weights": weights_digest(checkpoint)}
    )
    if out.exists():
        manifest = verify(out, kind)
        if manifest.facts.get("asked") != asked:
            raise SealError(f"{out}: holds episodes of other tasks, weights, seed or settings; choose another folder")
        return manifest
    work = work if work is not None else out.with_name(f".{out.name}.work")
    session_folder = work / "session"
    rewarded = 0.0
    with (
        launch_engine(checkpoint, max_running=config.concurrency, threads=config.engine_threads, log=log) as engine,
        RolloutSession(
            session_folder,
            checkpoint=checkpoint,
            engine_url=engine.url,
            harness=load(config.harness),
            config=config,
            asked=asked,
        ) as session,
    ):
        for done, result in enumerate(session.stream(jobs, config.concurrency), 1):
            rewarded += result.record.reward
            if progress is not None:
                progress(done, len(jobs), f"reward {rewarded / done:.3f}")
        manifest = session.seal(kind=kind, parents=parents or {}, facts={**(facts or {}), "asked": asked})
    out.parent.mkdir(parents=True, exist_ok=True)
    os.replace(session_folder / "sealed", out)
    shutil.rmtree(work, ignore_errors=True)
    return manifest
