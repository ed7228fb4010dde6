from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from occamy.contracts.episode import EpisodeRecord, Outcome, QuarantineReason, Segment
from occamy.training.rl_batch import AdmittedBatch, admit_batch, batch_metrics


@pytest.fixture
def episode(
    make_record: Callable[..., EpisodeRecord], make_segment: Callable[..., Segment]
) -> Callable[..., tuple[EpisodeRecord, list[Segment]]]:
    """An episode of the policy with one segment per mask, sampled by weight version `version`."""

    def make(name: str, *masks: list[int], version: int = 4, **overrides: Any) -> tuple[EpisodeRecord, list[Segment]]:
        values = {"sampled_by": "policy", "model": "p", "version_min": version, "version_max": version} | overrides
        segments = []
        for index, mask in enumerate(masks):
            plain = make_segment(name, list(range(len(mask))), mask, index=index)
            versions = np.where(plain.mask, version, -1).astype(np.int32)
            segments.append(replace(plain, sampled_by=values["sampled_by"], versions=versions))
        return make_record(name, segments=len(masks), **values), segments

    return make


def admit(*episodes: tuple[EpisodeRecord, list[Segment]], version: int = 5, **limits: int) -> AdmittedBatch:
    return admit_batch(
        [record for record, _ in episodes],
        [s for _, segments in episodes for s in segments],
        version=version,
        **{"max_staleness": 2, "max_length": 64} | limits,
    )


def test_every_reason_to_leave_an_episode_out_is_counted(episode: Callable[..., Any]) -> None:
    good = [0, 1, 1]
    batch = admit(
        episode("kept", good),
        episode("quarantined", good, quarantine=QuarantineReason.state_drift),
        episode("infra", good, outcome=Outcome.infra_failed),
        episode("teacher", good, sampled_by="teacher"),
        episode("silent", [0, 0, 0]),
        episode("stale", good, version=2),
        episode("future", good, version=6),
        episode("unsampled", good, version=-1),
        episode("long", [0] * 64 + [1]),
    )
    assert [e.record.episode_id for e in batch.experiences] == ["kept"]
    assert batch.refused == {
        "foreign_version": 2,
        "infra_failed": 1,
        "no_policy_tokens": 1,
        "stale": 1,
        "state_drift": 1,
        "teacher_sampled": 1,
        "too_long": 1,
    }


def test_age_counts_from_the_oldest_token(episode: Callable[..., Any]) -> None:
    record, (segment,) = episode("e", [0, 1, 1, 1])
    for oldest, kept in ((3, True), (2, False)):
        mixed = replace(segment, versions=np.array([-1, oldest, 4, 5], np.int32))
        assert bool(admit((record, [mixed])).experiences) is kept


def test_one_segment_of_a_teacher_or_one_foreign_token_refuses_the_episode(episode: Callable[..., Any]) -> None:
    record, segments = episode("e", [0, 1], [0, 1])
    foreign = replace(segments[1], versions=np.array([-1, 9], np.int32))
    assert admit((record, [segments[0], foreign])).refused == {"foreign_version": 1}


def test_segments_without_policy_tokens_condition_nothing_and_are_left_out(episode: Callable[..., Any]) -> None:
    batch = admit(episode("e", [0, 1, 1], [0, 0], [0, 1]))
    assert [s.segment for s in batch.experiences[0].sequences] == [0, 2]
    assert batch.policy_tokens == 3


def test_subagent_runs_never_train(episode: Callable[..., Any]) -> None:
    record, (segment,) = episode("e", [0, 1])
    batch = admit((record, [segment, replace(segment, run="sub-1")]))
    assert batch.policy_tokens == 1


def test_order_does_not_depend_on_who_finished_first(episode: Callable[..., Any]) -> None:
    a, b = episode("a", [0, 1]), episode("b", [0, 1])
    assert [e.record.episode_id for e in admit(b, a).experiences] == ["a", "b"]


def test_an_episode_counted_twice_or_a_segment_of_nobody_is_an_error(episode: Callable[..., Any]) -> None:
    a, (_, stray) = episode("a", [0, 1]), episode("b", [0, 1])
    with pytest.raises(ValueError, match="'a' occurs twice"):
        admit(a, a)
    with pytest.raises(ValueError, match="'b' has no record"):
        admit((a[0], [*a[1], *stray]))


def test_means_count_an_episode_once_however_many_segments_it_has(episode: Callable[..., Any]) -> None:
    """R4 and R5: masked and failed episodes move no mean; three segments weigh as much as one."""
    episodes = [
        episode("a", [0, 1], [0, 1], [0, 1, 1], reward=1.0, steps=6),
        episode("b", [0, 1], reward=0.0, success=False, steps=2),
        episode("c", [0, 0], reward=0.0, success=False),
        episode("d", [0, 1], reward=0.0, success=False, outcome=Outcome.infra_failed),
    ]
    metrics = batch_metrics([record for record, _ in episodes], admit(*episodes), version=5)
    expected = {
        "episodes": 4, "admitted": 2, "infra_failed_rate": 0.25, "reward": 0.5, "success": 0.5, "steps": 4,
        "segments": 2, "tokens": 5, "tokens_per_episode": 2.5, "staleness": 1,
        "refused_infra_failed": 1, "refused_no_policy_tokens": 1,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected
