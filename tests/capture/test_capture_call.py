"""Answers that cannot be what was sampled: each is refused by name, and nothing of it is recorded."""

from __future__ import annotations

import pytest

from occamy.capture.call import EngineAnswerError, Wanted
from occamy.capture.recorder import Recorder
from occamy.capture.render import Renderer
from occamy.contracts.capture import CaptureRules
from occamy.contracts.episode import QuarantineReason

ASK = {"role": "user", "content": "set tier of A01 to gold"}


@pytest.fixture
def recorder(renderer: Renderer) -> Recorder:
    return Recorder("e", renderer, seed=7, rules=CaptureRules(), context_limit=1024)


@pytest.mark.parametrize(
    ("ids", "logprobs", "said"),
    [
        ([5, 100_000], [0.0, 0.0], "token id 100000 is outside"),
        ([5, -1], [0.0, 0.0], "token id -1 is outside"),
        ([5, 6], [0.0], "2 sampled ids came with 1 log-probs"),
        ([5, 6], [0.0, float("nan")], "nan, of sampled id 6, is no log-prob"),
        ([5, 6], [float("-inf"), 0.0], "-inf, of sampled id 5, is no log-prob"),
        ([5, 6], [-1.0, 2e-4], "0.0002, of sampled id 6, is no log-prob"),
        ([5, 6, 7], [-1.0] * 3, "3 sampled ids where max_new_tokens was 2"),
    ],
)
def test_an_answer_that_cannot_be_recorded_is_refused(
    recorder: Recorder, ids: list[int], logprobs: list[float], said: str
) -> None:
    """What the engine cannot have sampled so is its fault; ids that are none of this model's are a mismatch."""
    with pytest.raises(EngineAnswerError, match=f"episode e: {said}"):
        recorder.finish(recorder.begin("root", [ASK], [], wanted=Wanted(2)), ids, logprobs, 0, "stop")
    ours = "id" in said[:8] or "came" in said
    assert recorder.quarantine is (QuarantineReason.token_mismatch if ours else QuarantineReason.infra_failed)
    assert recorder.turns == []


def test_rounding_above_0_and_a_teachers_length_are_recorded(recorder: Recorder) -> None:
    recorder.finish(recorder.begin("root", [ASK], [], wanted=Wanted(2)), [5, 6], [1e-6, 0.0], 0, "stop")
    recorder.finish(recorder.begin("root", [ASK], [], wanted=Wanted(2)), [5, 6, 7], [0.0] * 3, -1, "stop")
    assert len(recorder.turns) == 2 and recorder.quarantine is None
