"""Demonstrations: the scripted oracle plays admitted tasks through the real harness and proxy; what succeeds and
replays is sealed."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from occamy.contracts.lineage import tokenizer_digest
from occamy.contracts.manifest import Counts, Manifest, SealError, seal, verify
from occamy.contracts.record import digest
from occamy.contracts.release import load_release
from occamy.harness.loading import load
from occamy.rollout.admit import Receipt, check_episode, receipt, write_receipts
from occamy.rollout.archive import Recorded
from occamy.rollout.config import DemonstrationConfig
from occamy.rollout.jobs import EpisodeJob, make_jobs
from occamy.rollout.oracle import OracleTeacher
from occamy.rollout.session import RolloutSession

KIND = "demonstrations"
MODEL = "oracle"
Progress = Callable[[int, int, str], None]
"""``progress(done, total, figure)``."""


def demonstrate(
    release: Path,
    checkpoint: Path,
    out: Path,
    config: DemonstrationConfig,
    seed: int,
    *,
    work: Path | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Demonstrate the release's training tasks and seal the successful episodes in `out`.

    Idempotent: a sealed `out` of the same release, configuration and seed is returned as it is. Resumable: `work`
    (beside `out` by default) keeps finished episodes over a kill and is removed at the end. Raises SealError when
    `out` holds something else, and ValueError when not one demonstration succeeds.
    """
    tasks = load_release(release)
    chosen = tasks.select(pool=config.pool, split="train")[: config.limit]
    parents = {"task_release": tasks.manifest.digest()}
    harness = load(config.rollout.harness)
    tokenizer = tokenizer_digest(checkpoint)
    made_by = digest({"config": config.digest(), "seed": seed, "harness": harness.digest, "tokenizer": tokenizer})
    if out.exists():
        return _finished(out, parents, made_by)
    work = work if work is not None else out.with_name(f".{out.name}.work")
    teacher = OracleTeacher(config.wasteful)
    jobs = list(make_jobs(chosen, trials=config.trials, seed=seed, sampled_by="teacher", temperature=0.0, model=MODEL))
    session = RolloutSession(
        work / "session",
        checkpoint=checkpoint,
        engine_url=None,
        harness=harness,
        config=config.rollout,
        teacher=teacher,
        asked=digest([made_by, parents]),
    )
    sealed = work / "sealed"
    shutil.rmtree(sealed, ignore_errors=True)
    with session:
        succeeded, refused = _play(session, _enrolled(jobs, teacher), len(jobs), config, progress)
        kept, receipts = _admitted(session, succeeded)
        refused += Counter(r.reason.value for r in receipts if r.reason is not None)
        if progress is not None:
            progress(len(jobs), len(jobs), f"{len(kept)}/{len(jobs)} admitted")
        if not kept:
            raise ValueError(
                f"{release}: none of {len(jobs)} demonstrations succeeded ({dict(refused)}); check the tasks"
            )
        facts = {"made_by": made_by, "seed": seed, "quarantine": dict(sorted(refused.items()))}
        write_receipts(sealed, receipts)
        facts = session.seal_into(sealed, kept, kind=KIND, parents=parents, facts=facts).facts
    counts = Counts(raw=len(jobs), validated=len(jobs), admitted=len(kept), quarantined=len(jobs) - len(kept))
    manifest = seal(sealed, KIND, counts={KIND: counts}, parents=parents, facts=facts)
    out.parent.mkdir(parents=True, exist_ok=True)
    os.replace(sealed, out)
    shutil.rmtree(work, ignore_errors=True)
    return manifest


def _finished(out: Path, parents: dict[str, str], made_by: str) -> Manifest:
    manifest = verify(out, KIND)
    if manifest.parents != parents or manifest.facts["made_by"] != made_by:
        raise SealError(f"{out}: holds demonstrations of another release, configuration or seed; choose another folder")
    return manifest


def _enrolled(jobs: list[EpisodeJob], teacher: OracleTeacher) -> Iterator[EpisodeJob]:
    for job in jobs:
        teacher.enrol(job)
        yield job


def _play(
    session: RolloutSession,
    jobs: Iterator[EpisodeJob],
    total: int,
    config: DemonstrationConfig,
    progress: Progress | None,
) -> tuple[list[str], Counter[str]]:
    """Run all jobs. Returns the ids of those that succeeded, and counts of why others did not."""
    succeeded: list[str] = []
    refused: Counter[str] = Counter()
    for done, result in enumerate(session.stream(jobs, config.rollout.concurrency), 1):
        record = result.record
        if record.success and record.quarantine is None:
            succeeded.append(record.episode_id)
        else:
            refused[record.quarantine.value if record.quarantine else f"not_successful:{record.outcome.value}"] += 1
        if progress is not None:
            progress(done, total, f"{len(succeeded)}/{done} succeeded")
    return succeeded, refused


def _admitted(session: RolloutSession, episode_ids: list[str]) -> tuple[list[Recorded], list[Receipt]]:
    """Replay the tool calls of episodes. Returns those that come out as recorded, and a receipt of each."""
    kept: list[Recorded] = []
    receipts: list[Receipt] = []
    for episode in map(session.recorded, episode_ids):
        receipts.append(receipt(episode.record, check_episode(episode), ("capture", "state")))
        if receipts[-1].admitted:
            kept.append(episode)
    return kept, receipts
