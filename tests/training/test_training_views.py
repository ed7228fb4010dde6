"""What of an episode may train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from occamy.contracts.episode import EpisodeRecord, QuarantineReason, Segment
from occamy.training.views import training_view

Record = Callable[..., EpisodeRecord]
MakeSegment = Callable[..., Segment]


def test_segments_carry_the_facts_of_their_run(make_record: Record, make_segment: MakeSegment) -> None:
    record = make_record("a", reward=0.5, success=False, steps=7)
    chain = [make_segment("a", [1, 2, 3], [0, 1, 1]), make_segment("a", [1, 4, 5], [0, 0, 1], index=1)]
    first, second = training_view([record], list(reversed(chain))).sequences
    assert (first.segment, first.n_segments, first.policy_tokens) == (0, 2, 2)
    assert (first.policy_tokens_run, first.policy_tokens_later) == (3, 1)
    assert (second.policy_tokens_run, second.policy_tokens_later) == (3, 0)
    assert (second.reward, second.success, second.steps, second.task_id) == (0.5, False, 7, "t-a")
    assert second.tokens.tolist() == [1, 4, 5]


def test_quarantined_other_pool_unsuccessful_and_subagents_are_left_out_and_counted(
    make_record: Record, make_segment: MakeSegment
) -> None:
    records = [
        make_record("a"),
        make_record("b", quarantine=QuarantineReason.token_mismatch),
        make_record("c", pool="short"),
        make_record("d", success=False),
    ]
    segments = [make_segment(e, [1, 2], [0, 1]) for e in "abcd"]
    segments.append(make_segment("a", [1, 2], [0, 0], run="child-1"))
    view = training_view(records, segments, pool="long", successful_only=True)
    assert [s.episode_id for s in view.sequences] == ["a"]
    assert view.rejected == {"other_pool": 1, "quarantined": 1, "subagent": 1, "unsuccessful": 1}


def test_a_summary_that_the_policy_wrote_trains_as_a_run_of_its_own(
    make_record: Record, make_segment: MakeSegment
) -> None:
    segments = [
        make_segment("a", [1, 2, 3], [0, 1, 1], run="aux-compression-0"),
        make_segment("a", [1, 2], [0, 1]),
        make_segment("a", [1, 4], [0, 1], index=1),
    ]
    sequences = training_view([make_record("a", reward=0.5)], segments).sequences
    assert [s.key for s in sequences] == [("a", "root", 0), ("a", "root", 1), ("a", "aux-compression-0", 0)]
    assert [(s.policy_tokens_run, s.policy_tokens_later, s.reward) for s in sequences] == [
        (2, 1, 0.5),
        (2, 0, 0.5),
        (2, 0, 0.5),
    ]


def _first_is_target(segment: Segment) -> dict[str, Any]:
    return {"mask": np.array([True, True])}


def _short_logprobs(segment: Segment) -> dict[str, Any]:
    return {"logprobs": segment.logprobs[:1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_first_is_target, "episode 'a' segment 0: its first token is a target"),
        (_short_logprobs, "episode 'a' segment 0: tokens, mask, logprobs and versions differ"),
        (lambda _: {"index": 1}, r"root segments are \[1\], expected 0, 1"),
        (lambda _: {"episode_id": "z"}, "segments of episode 'z' have no episode record"),
        (lambda _: {"run": "child"}, r"root segments are \[\]"),
    ],
)
def test_incomplete_capture_is_refused_by_name(
    change: Callable[[Segment], dict[str, Any]], message: str, make_record: Record, make_segment: MakeSegment
) -> None:
    good = make_segment("a", [1, 2], [0, 1])
    with pytest.raises(ValueError, match=message):
        training_view([make_record("a")], [replace(good, **change(good))])
