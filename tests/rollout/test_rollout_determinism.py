"""Same seed, same weights, deterministic engine: the same episode byte for byte, however many run beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from occamy.capture.sealed import SEGMENTS
from occamy.contracts.episode import EpisodeRecord
from occamy.contracts.release import load_release
from occamy.engines.local.launch import launch_engine
from occamy.harness.loading import load
from occamy.nano.base import base_checkpoint
from occamy.rollout.config import RolloutConfig
from occamy.rollout.evidence import Evidence
from occamy.rollout.jobs import EpisodeJob, make_jobs
from occamy.rollout.session import RolloutSession

TIMES = {"wall_seconds", "ms"}
"""What may differ between two runs of an episode."""


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with launch_engine(base_checkpoint(), max_running=16, deterministic=True) as process:
        yield process.url


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list | tuple) else value


def told(record: EpisodeRecord, evidence: Evidence) -> dict[str, Any]:
    """Everything that is kept of an episode beside its tokens, without times."""
    whole = {"record": record.model_dump(mode="json"), "evidence": vars(evidence)}
    return without_times(json.loads(json.dumps(whole, default=vars)))


def outcome_of(
    folder: Path, jobs: list[EpisodeJob], concurrency: int, **session: Any
) -> tuple[dict[str, dict[str, Any]], bytes]:
    """Run jobs. Returns what is kept of each, and the sealed segments as bytes."""
    with RolloutSession(folder, **session) as one:
        records = [r.record for r in one.stream(jobs, concurrency)]
        kept = {r.episode_id: told(r, one.evidence(r.episode_id)) for r in records}
        one.seal(kind="episodes", parents={}, facts={})
    return kept, (folder / "sealed" / SEGMENTS).read_bytes()


@pytest.mark.parametrize("composition", ["react", "plan_act"])
def test_an_episode_does_not_depend_on_what_runs_beside_it(
    composition: str, release: Path, engine: str, tmp_path: Path
) -> None:
    tasks = load_release(release).select(pool="long")[:4] + load_release(release).select(pool="short")[:4]
    jobs = list(make_jobs(tasks, trials=2, seed=3, sampled_by="policy", temperature=1.0, model="base"))
    settings: dict[str, Any] = {"checkpoint": base_checkpoint(), "engine_url": engine, "harness": load(composition)}
    settings["config"] = RolloutConfig()
    alone, alone_bytes = outcome_of(tmp_path / "alone", jobs, 1, **settings)
    beside, beside_bytes = outcome_of(tmp_path / "beside", jobs[::-1], 16, **settings)
    assert alone == beside
    assert alone_bytes == beside_bytes
    calls = [kept["record"]["tool_calls"] for kept in alone.values()]
    assert len(calls) == 16 and sum(calls) > 16  # these were episodes, not refusals
