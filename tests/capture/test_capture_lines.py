"""What a fork leaves behind: where it came from, which line is the root run, and whose answer trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from occamy.capture.call import Call
from occamy.capture.ledger import ledger
from occamy.capture.recorder import Recorder
from occamy.capture.render import Renderer
from occamy.capture.replay import check_capture
from occamy.capture.segments import CapturedEpisode, capture_episode
from occamy.capture.store import Store
from occamy.capture.turn import Exchange, Prefix
from occamy.contracts.capture import Auxiliary, CaptureRules, EpisodeSetup
from occamy.contracts.episode import EpisodeRecord, Origin, QuarantineReason

Message = dict[str, Any]

ASK = {"role": "user", "content": "set tier of A01 to gold"}
GET, B02 = 'crm_get{"id":"A01"}<end>', 'crm_get{"id":"B02"}<end>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "crm_get", "parameters": {"type": "object"}}}]
RULES = CaptureRules(
    announced=("summary_replacement",),
    auxiliaries=(Auxiliary(run="aux-notes", purpose="summary"), Auxiliary(run="aux-title", purpose="title")),
    subagents=True,
    tools_may_change=True,
)


class Talk:
    """A harness in miniature, and the database of its proxy."""

    def __init__(self, renderer: Renderer, path: Path, rules: CaptureRules = RULES) -> None:
        self.renderer = renderer
        self.recorder = Recorder("e", renderer, seed=7, rules=rules, context_limit=4096)
        self.store = Store(path / "capture.sqlite")
        self.store.open_episode("e", EpisodeSetup(sampled_by="policy", rules=rules))
        self.history: list[Message] = [ASK]

    def begin(self, messages: list[Message] | None = None, role: str = "root", tools: Any = TOOLS, **more: Any) -> Call:
        return self.recorder.begin(role, json.loads(json.dumps(messages or self.history)), tools, **more)

    def finish(self, call: Call, text: str) -> Message:
        ids = self.ids(text)
        turn, message = self.recorder.finish(call, ids, [-1.0] * len(ids), 3, "stop")
        self.store.add_turn("e", turn, Exchange("", "", "", 0, 0.0), self.recorder.quarantine)
        return message

    def step(self, text: str, result: str = "ok", **more: Any) -> Prefix:
        call = self.begin(**more)
        message = self.finish(call, text)
        self.history = [*self.history, message]
        for one in message.get("tool_calls", ()):
            self.history.append({"role": "tool", "tool_call_id": one["id"], "content": result})
        return call.prefix

    def ids(self, text: str) -> list[int]:
        return list(self.renderer.encode(text))

    def captured(self) -> CapturedEpisode:
        """From the database, checked against its own ledger."""
        turns = self.store.turns("e")
        assert turns == self.recorder.turns
        captured = capture_episode("e", "policy", turns, self.recorder.quarantine)
        kept = ledger(turns)
        record = EpisodeRecord.model_construct(
            episode_id="e", sampled_by="policy", steps=0, segments=len(captured.segments),
            input_tokens=sum(t.prompt_tokens for t in kept), output_tokens=sum(len(t.output) for t in kept),
            version_min=3, version_max=3,
        )  # fmt: skip
        assert check_capture(record, captured.segments, kept) == []
        return captured

    def targets(self, captured: CapturedEpisode, run: str = "root") -> list[list[int]]:
        return [s.tokens[s.mask].tolist() for s in captured.segments if s.run == run]


@pytest.fixture
def talk(renderer: Renderer, tmp_path: Path) -> Talk:
    return Talk(renderer, tmp_path)


@pytest.mark.parametrize("tools", [TOOLS, []])
@pytest.mark.parametrize("role", ["sub", "aux-notes"])
def test_a_forked_child_names_its_parent_whatever_its_tools(talk: Talk, role: str, tools: list[Any]) -> None:
    talk.step(GET)
    talk.finish(talk.begin([*talk.history, {"role": "user", "content": "check B02"}], role, tools), "ok<end>")
    [turn] = [t for t in ledger(talk.recorder.turns) if t.run != "root"]
    assert (turn.parent_ordinal, turn.parent_attempt) == (0, 0)
    assert turn.opened_by == ("tool_change" if not tools else "branch" if role == "sub" else "start")
    assert talk.targets(talk.captured()) == [talk.ids(GET)]


def test_the_line_that_the_harness_followed_is_the_root_run_though_its_tools_changed(talk: Talk) -> None:
    talk.step(GET)
    before = talk.history
    talk.step(B02)
    talk.history = [*before[:-1], {**before[-1], "content": "none"}]  # it goes back, without its tools
    assert talk.step(B02, tools=[]) is Prefix.branch
    assert talk.step("done<end>", tools=[]) is Prefix.continued
    captured = talk.captured()
    assert [(s.run, s.closed_by) for s in captured.segments] == [
        ("root", "tool_change"), ("root", "end"), ("branch-0", "end"),
    ]  # fmt: skip
    assert talk.targets(captured) == [talk.ids(GET), talk.ids(B02 + "done<end>")]
    dropped = captured.segments[2]
    assert not dropped.mask.any()
    assert dropped.tokens[dropped.origin == Origin.SUBAGENT].tolist() == talk.ids(B02)
    kept = [(t.run, t.segment, t.parent_ordinal, t.parent_attempt) for t in ledger(talk.recorder.turns)]
    assert kept == [("root", 0, -1, -1), ("branch-0", 0, 0, 0), ("root", 1, -1, -1), ("root", 1, -1, -1)]
    assert captured.quarantine is None


def test_a_dropped_line_whose_tools_had_changed_names_its_parent(talk: Talk) -> None:
    talk.step(GET)
    before = talk.history
    assert talk.step(B02, tools=[]) is Prefix.rewrite
    talk.history = [*before[:-1], {**before[-1], "content": "none"}]
    assert talk.step(B02) is Prefix.branch
    assert talk.step("done<end>") is Prefix.continued
    captured = talk.captured()
    assert [(s.run, s.closed_by) for s in captured.segments] == [("root", "end"), ("branch-0", "end")]
    assert talk.targets(captured) == [talk.ids(GET + B02 + "done<end>")]
    dropped = [t for t in ledger(talk.recorder.turns) if t.run == "branch-0"]
    assert [(t.ordinal, t.opened_by, t.parent_ordinal, t.parent_attempt) for t in dropped] == [(1, "tool_change", 0, 0)]


def test_of_a_summary_that_forks_the_line_that_went_on_trains_and_the_dropped_one_does_not(talk: Talk) -> None:
    talk.step(GET, role="aux-notes")
    at_fork = talk.history
    talk.step(B02, role="aux-notes")
    talk.history = [*at_fork, {"role": "user", "content": "set tier of A01 to gold"}]
    assert talk.step("done<end>", role="aux-notes") is Prefix.branch
    captured = talk.captured()
    assert talk.targets(captured, "aux-notes-0") == [[*talk.ids(GET), *talk.ids("done<end>")]]
    assert talk.targets(captured, "aux-notes-1") == [[]]


def rewritten(talk: Talk) -> None:
    talk.history = [ASK, {"role": "user", "content": "gold"}]
    assert talk.step("done<end>", rewrite="summary_replacement") is Prefix.rewrite


def test_answers_given_at_the_same_time_do_not_train_unless_the_harness_shows_which_it_used(talk: Talk) -> None:
    calls = talk.begin(), talk.begin()
    for call, text in zip(calls, (GET, B02), strict=True):
        talk.finish(call, text)
    rewritten(talk)
    assert talk.captured().quarantine is QuarantineReason.ambiguous_answer


def test_also_those_of_the_last_turn_and_of_a_summary(talk: Talk) -> None:
    talk.step("done<end>")
    notes = [{"role": "user", "content": "summary"}]
    calls = talk.begin(notes, "aux-title"), talk.begin(notes, "aux-title")
    for call, text in zip(calls, ("ok<end>", "gold<end>"), strict=True):
        talk.finish(call, text)
    assert talk.captured().quarantine is None  # titles do not train
    calls = talk.begin(notes, "aux-notes"), talk.begin(notes, "aux-notes")
    for call, text in zip(calls, ("ok<end>", "gold<end>"), strict=True):
        talk.finish(call, text)
    assert talk.captured().quarantine is QuarantineReason.ambiguous_answer


def test_equal_answers_and_those_asked_for_one_after_the_other_are_no_question(talk: Talk) -> None:
    calls = talk.begin(), talk.begin()
    for call in calls:
        talk.finish(call, GET)
    rewritten(talk)
    talk.history = [ASK, {"role": "user", "content": "iron"}]
    for text in (GET, B02):
        talk.finish(talk.begin(rewrite="summary_replacement"), text)
    captured = talk.captured()
    assert captured.quarantine is None and talk.targets(captured)[-1] == talk.ids(B02)


def test_a_later_request_that_holds_one_of_them_settles_it(talk: Talk) -> None:
    calls = talk.begin(), talk.begin()
    used, _ = (talk.finish(call, text) for call, text in zip(calls, (GET, B02), strict=True))
    result = {"role": "tool", "tool_call_id": used["tool_calls"][0]["id"], "content": "ok"}
    talk.history = [*talk.history, used, result]
    talk.step("done<end>")
    captured = talk.captured()
    assert captured.quarantine is None and talk.targets(captured) == [talk.ids(GET + "done<end>")]


def test_a_message_of_a_role_that_the_harness_never_adds_is_unexplained(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, CaptureRules(appends=("tool",)))
    talk.step(GET)
    talk.step(GET)
    talk.history = [*talk.history, {"role": "user", "content": "check"}]
    assert talk.step("done<end>") is Prefix.unexplained
    assert talk.captured().quarantine is QuarantineReason.unexplained_prefix


def test_the_ledger_tells_which_calls_were_answered(talk: Talk) -> None:
    talk.step('crm_get{"id":"A01"}crm_get{"id":"B02"}<end>')
    talk.history.pop()  # the harness sends one of the two results
    talk.step(GET)
    talk.finish(talk.begin(), B02)
    assert [json.loads(t.calls) for t in ledger(talk.recorder.turns)] == [
        [["crm_get", '{"id":"A01"}', True], ["crm_get", '{"id":"B02"}', False]],
        [["crm_get", '{"id":"A01"}', True]],
        [["crm_get", '{"id":"B02"}', False]],
    ]
