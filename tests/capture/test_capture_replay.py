"""Token replay on a hand-made segment."""

from __future__ import annotations

import numpy as np
import pytest

from occamy.capture.replay import replay_segment
from occamy.contracts.episode import Segment

SEGMENT = Segment(
    "e", "root", 0, "end", "policy",
    tokens=np.array([1, 2, 3, 4], np.int32), mask=np.array([False, True, True, True]),
    logprobs=np.array([0, -0.5, -1.0, -2.0], np.float32), versions=np.array([-1, 3, 3, 4], np.int32),
    origin=np.array([0, 1, 1, 1], np.int8),
)  # fmt: skip


def test_only_positions_of_the_replayed_version_are_compared() -> None:
    replay = replay_segment(SEGMENT, lambda ids: [float("nan"), -0.5, -1.25, -99.0], version=3, tolerance=0.3)
    assert (replay.compared, replay.worst, replay.position, replay.ok) == (2, 0.25, 2, True)
    assert not replay_segment(SEGMENT, lambda ids: [0.0, -0.5, -1.25, 0.0], version=3, tolerance=0.2).ok


def test_a_score_that_is_not_a_number_fails() -> None:
    assert not replay_segment(SEGMENT, lambda ids: [0.0, 0.0, 0.0, float("nan")], version=4, tolerance=9.0).ok


def test_replay_names_what_it_cannot_compare() -> None:
    with pytest.raises(ValueError, match=r"nothing was sampled under weight version 5; it holds \[3, 4\]"):
        replay_segment(SEGMENT, lambda ids: [0.0] * 4, version=5, tolerance=0.1)
    with pytest.raises(ValueError, match="3 log-probs for 4 tokens"):
        replay_segment(SEGMENT, lambda ids: [0.0] * 3, version=3, tolerance=0.1)
