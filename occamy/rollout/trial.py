"""A rollout on its own: any harness on the tasks of a release, sampled by an engine or by the scripted oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from occamy.contracts.episode import EpisodeRecord
from occamy.contracts.record import digest
from occamy.contracts.task import TaskContract
from occamy.harness.assignment import Harness
from occamy.rollout.config import RolloutConfig
from occamy.rollout.jobs import make_jobs
from occamy.rollout.oracle import OracleTeacher
from occamy.rollout.session import RolloutSession


@dataclass(frozen=True)
class Sampler:
    """Who samples."""

    checkpoint: Path
    """Folder of the model's tokenizer and chat template."""
    name: str
    """For the records."""
    engine_url: str | None = None
    """SGLang wire contract; None for the scripted oracle."""


def play(
    tasks: Sequence[TaskContract],
    harness: Harness,
    sampler: Sampler,
    folder: Path,
    config: RolloutConfig,
    *,
    trials: int,
    seed: int,
    on_record: Callable[[EpisodeRecord], None],
) -> list[EpisodeRecord]:
    """Run `trials` attempts at each task in the session `folder` and seal them there. Resumable, like any session.

    Raises what a session raises, and EngineError when the engine is not there.
    """
    teaching = sampler.engine_url is None
    jobs = list(
        make_jobs(
            tasks,
            trials=trials,
            seed=seed,
            sampled_by="teacher" if teaching else "policy",
            temperature=0.0 if teaching else config.temperature,
            model=sampler.name,
        )
    )
    oracle = OracleTeacher(0.0)
    for job in jobs:
        oracle.enrol(job)
    asked = digest([job.digest() for job in jobs])
    session = RolloutSession(
        folder,
        checkpoint=sampler.checkpoint,
        engine_url=sampler.engine_url,
        harness=harness,
        config=config,
        teacher=oracle if teaching else None,
        asked=asked,
    )
    with session:
        session.check_engine()
        for result in session.stream(jobs, config.concurrency):
            on_record(result.record)
        session.seal(kind="episodes", parents={}, facts={"asked": asked})
        return session.records()
