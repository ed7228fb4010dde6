"""Declared rewrites by content, as Hermes and OpenClaw make them, and what is not one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from occamy.capture.call import Call
from occamy.capture.recorder import Recorder
from occamy.capture.render import Renderer
from occamy.capture.segments import build_segments
from occamy.capture.turn import Prefix
from occamy.contracts.capture import Auxiliary, CaptureRules, Marked
from occamy.contracts.episode import QuarantineReason, Segment

Message = dict[str, Any]

COMPACTED = "[CONTEXT COMPACTION — REFERENCE ONLY] Earlier turns were compacted into the summary below."
PRIOR = "[PRIOR CONTEXT — for reference only; not a new message]"
HERMES = CaptureRules(
    summaries=tuple(
        Marked(role=role, starts=text) for role in ("user", "assistant") for text in (COMPACTED[:37], PRIOR)
    ),
    pruned=(
        Marked(role="tool", starts="[crm_get] "),
        Marked(role="tool", starts="[crm_update] "),
        Marked(role="tool", starts="[Duplicate tool output"),
    ),
    cut_arguments="...[truncated]",
    auxiliaries=(Auxiliary(run="aux-compression", purpose="summary"),),
    subagents=True,
)
OPENCLAW = CaptureRules(
    summaries=(Marked(role="user", starts="The conversation history before this point was compacted"),),
    trailers=(Marked(role="user", starts="Continue the current task from the existing transcript"),),
    auxiliaries=(Auxiliary(run="aux", purpose="summary"),),
)
SYSTEM = {"role": "system", "content": "check"}
ASK = {"role": "user", "content": "set tier of A01 to gold"}
GET = 'crm_get{"id":"A01"}<end>'
UPDATE = 'crm_update{"id":"A01","tier":"gold"}<end>'


class Talk:
    """A harness in miniature."""

    def __init__(self, renderer: Renderer, rules: CaptureRules) -> None:
        self.renderer = renderer
        self.recorder = Recorder("e", renderer, seed=7, rules=rules, context_limit=1 << 16)
        self.history: list[Message] = [SYSTEM, ASK]

    def ask(self, text: str, messages: list[Message] | None = None, role: str = "root") -> tuple[Call, Message]:
        sent = [dict(m) for m in (self.history if messages is None else messages)]
        call = self.recorder.begin(role, sent, [])
        ids = list(self.renderer.encode(text))
        return call, self.recorder.finish(call, ids, [-1.0] * len(ids), 3, "stop")[1]

    def step(self, text: str, *results: str) -> Prefix:
        call, message = self.ask(text)
        self.history.append(message)
        for given, result in zip(message.get("tool_calls", ()), results, strict=True):
            self.history.append({"role": "tool", "tool_call_id": given["id"], "content": result})
        return call.prefix

    def segments(self, run: str = "root") -> list[Segment]:
        return [s for s in build_segments("e", "policy", self.recorder.turns) if s.run == run]

    def targets(self, run: str = "root") -> list[list[int]]:
        return [s.tokens[s.mask].tolist() for s in self.segments(run)]

    def ids(self, *texts: str) -> list[int]:
        return [i for text in texts for i in self.renderer.encode(text)]


@pytest.fixture
def talk_of(renderer: Renderer) -> Callable[[CaptureRules], Talk]:
    return lambda rules: Talk(renderer, rules)


def test_hermes_compacts_twice(talk_of: Callable[[CaptureRules], Talk]) -> None:
    talk = talk_of(HERMES)
    for result in ("one", "two", "three"):
        talk.step(GET, result)
    notes = [{"role": "user", "content": "Summarise the turns below."}]
    assert talk.ask("A01.tier=gold;<end>", notes, "aux-compression")[0].prefix is Prefix.auxiliary

    head, first, _, last = talk.history[:2], talk.history[2:4], talk.history[4:6], talk.history[6:]
    placeholder = {**first[1], "content": "[crm_get] id=A01 (3 chars result)"}
    summary = {"role": "user", "content": f"{COMPACTED}\nA01.tier=gold;"}
    talk.history = [*head, first[0], placeholder, summary, *last]
    assert talk.step(UPDATE, "four") is Prefix.rewrite
    assert talk.step(GET, "five") is Prefix.continued

    tail = talk.history[-4:]
    pruned = {**tail[1], "content": "[crm_update] id=A01 (4 chars result)"}
    again = {"role": "assistant", "content": f"{COMPACTED}\nA01.tier=gold; more"}
    talk.history = [SYSTEM, again, ASK, tail[0], pruned, *tail[2:]]
    assert talk.step("done<end>") is Prefix.rewrite

    assert talk.recorder.quarantine is None
    assert talk.targets() == [talk.ids(GET, GET, GET), talk.ids(UPDATE, GET), talk.ids("done<end>")]
    assert [s.closed_by for s in talk.segments()] == ["summary_replacement", "summary_replacement", "end"]
    assert talk.targets("aux-compression-0") == [talk.ids("A01.tier=gold;<end>")]


def test_hermes_merges_a_summary_into_the_turn_after_it(talk_of: Callable[[CaptureRules], Talk]) -> None:
    """The summary reaches the model though the turn's calls are known by their ids."""
    talk = talk_of(HERMES)
    for result in ("one", "two"):
        talk.step(GET, result)
    merged = {**talk.history[4], "content": f"{PRIOR}\nA01.tier=gold;"}
    call, _ = talk.ask("done<end>", [SYSTEM, ASK, merged, talk.history[5]])
    assert call.prefix is Prefix.rewrite
    assert talk.recorder.quarantine is None
    assert talk.segments()[0].closed_by == "summary_replacement"


def test_a_summary_may_say_again_what_the_one_before_said(talk_of: Callable[[CaptureRules], Talk]) -> None:
    talk = talk_of(OPENCLAW)
    talk.step(GET, "one")
    summary = {"role": "user", "content": f"{OPENCLAW.summaries[0].starts}: all is well"}
    for _ in range(2):
        talk.history = [SYSTEM, summary, *talk.history[-2:]]
        assert talk.step(GET, "two") is Prefix.rewrite
        assert talk.step(GET, "three") is Prefix.continued
    assert talk.recorder.quarantine is None and len(talk.segments()) == 3
    talk.history = [SYSTEM, {"role": "user", "content": "something else"}]
    assert talk.step(GET, "four") is Prefix.unexplained


def test_hermes_cuts_long_arguments_in_place(talk_of: Callable[[CaptureRules], Talk]) -> None:
    talk = talk_of(HERMES)
    write = 'file_write{"path":"notes","text":"A01.tier=gold;B02.tier=gold;"}<end>'
    talk.step(write, "ok")
    talk.step(GET, "one")
    given = talk.history[2]["tool_calls"][0]

    def cut(text: str) -> list[Message]:
        function = {"name": "file_write", "arguments": f'{{"path": "notes", "text": "{text}"}}'}
        return [*talk.history[:2], {**talk.history[2], "tool_calls": [{**given, "function": function}]}]

    assert talk.ask("ok<end>", cut("A01.tier...[truncated]") + talk.history[3:])[0].prefix is Prefix.rewrite
    assert talk.segments()[0].closed_by == "history_pruning"
    assert talk.ask("ok<end>", cut("B02.tier...[truncated]") + talk.history[3:])[0].prefix is Prefix.unexplained


def test_openclaw_compacts_with_a_trailer_that_it_may_drop_again(talk_of: Callable[[CaptureRules], Talk]) -> None:
    talk = talk_of(OPENCLAW)
    for result in ("one", "two", "three"):
        talk.step(GET, result)
    summary = {"role": "user", "content": "The conversation history before this point was compacted: gold"}
    trailer = {"role": "user", "content": "Continue the current task from the existing transcript."}
    talk.history = [SYSTEM, summary, *talk.history[4:6], *talk.history[6:], trailer]
    assert talk.step(UPDATE, "four") is Prefix.rewrite
    assert talk.step(GET, "five") is Prefix.continued
    talk.history.remove(trailer)
    assert talk.step(GET, "six") is Prefix.rewrite
    assert talk.step(GET, "seven") is Prefix.continued
    newer = {**summary, "content": f"{summary['content']}, silver"}
    talk.history = [SYSTEM, newer, *talk.history[-4:], trailer]
    assert talk.step("done<end>") is Prefix.rewrite
    assert talk.recorder.quarantine is None
    assert talk.targets() == [
        talk.ids(GET, GET, GET), talk.ids(UPDATE, GET), talk.ids(GET, GET), talk.ids("done<end>"),
    ]  # fmt: skip
    kinds = ["summary_replacement", "history_pruning", "summary_replacement", "end"]
    assert [s.closed_by for s in talk.segments()] == kinds


SUMMARY = {"role": "user", "content": COMPACTED}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("history cut without a summary", lambda h: [*h[:2], *h[4:]]),
        ("an unknown message among known ones", lambda h: [*h[:2], {"role": "user", "content": "check"}, *h[2:]]),
        ("kept messages in another order", lambda h: [h[0], SUMMARY, *h[4:6], *h[2:4]]),
        ("another system message", lambda h: [{**SYSTEM, "content": "check all"}, SUMMARY, *h[4:]]),
        ("no system message", lambda h: [SUMMARY, *h[4:]]),
        ("a system message added", lambda h: [*h[:1], h[0], SUMMARY, *h[4:]]),
        ("a foreign answer kept", lambda h: [*h[:2], SUMMARY, {"role": "assistant", "content": "done"}]),
        ("a result cut to other words", lambda h: [*h[:3], {**h[3], "content": "cut"}, *h[4:]]),
        ("a result cut and another dropped", lambda h: [*h[:2], h[4], {**h[5], "content": "[crm_get] cut"}]),
        ("a summary by the wrong role", lambda h: [*h[:2], {**SUMMARY, "role": "system"}, *h[4:]]),
    ],
)
def test_what_is_not_declared_stays_unexplained(
    talk_of: Callable[[CaptureRules], Talk], name: str, change: Callable[[list[Message]], list[Message]]
) -> None:
    talk = talk_of(HERMES)
    for result in ("one", "two"):
        talk.step(GET, result)
    call, message = talk.ask("done<end>", change(talk.history))
    assert (call.prefix, message["content"]) == (Prefix.unexplained, "done"), name
    assert talk.recorder.quarantine is QuarantineReason.unexplained_prefix


def test_a_rewrite_keeps_the_attempt_that_it_holds(talk_of: Callable[[CaptureRules], Talk]) -> None:
    talk = talk_of(HERMES)
    talk.step(GET, "one")
    used = talk.ask(UPDATE)[1]
    talk.ask(GET)
    result = {"role": "tool", "tool_call_id": used["tool_calls"][0]["id"], "content": "two"}
    assert talk.ask("done<end>", [SYSTEM, ASK, SUMMARY, used, result])[0].prefix is Prefix.rewrite
    assert talk.targets() == [talk.ids(GET, UPDATE), talk.ids("done<end>")]


def test_a_rewrite_of_one_child_among_several_is_told_by_its_messages(
    talk_of: Callable[[CaptureRules], Talk],
) -> None:
    talk = talk_of(HERMES)
    talk.step(GET, "one")
    lines = [[SYSTEM, {"role": "user", "content": f"check {name}"}] for name in ("A01", "B02")]
    for line in (*lines, *lines):
        message = talk.ask(GET, line, "sub")[1]
        line += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}]
    first = lines[0]
    call, _ = talk.ask("done<end>", [*first[:2], SUMMARY, *first[4:]], "sub")
    assert (call.prefix, call.step.segment.run.name, call.step.segment.index) == (Prefix.rewrite, "sub-0", 1)
    assert talk.recorder.quarantine is None
    assert [s.closed_by for s in talk.segments("sub-0")] == ["summary_replacement", "end"]
    assert not any(s.mask.any() for s in talk.segments("sub-0"))
