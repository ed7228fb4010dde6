"""What OpenClaw does to its requests, as seen in real runs and written out: each is explained, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from occamy.capture.recorder import Recorder
from occamy.capture.render import Renderer
from occamy.capture.segments import build_segments
from occamy.capture.turn import Prefix
from occamy.contracts.episode import QuarantineReason
from occamy.harness.loading import load_adapter

Message = dict[str, Any]

STAMP = "[Sun 2026-11-29 22:02 UTC] "
SYSTEM = {"role": "system", "content": "You are a personal assistant."}
ASK = {"role": "user", "content": f"{STAMP}Void order E91.\n\nRuntime: agent=main"}
TOOL = {"type": "function", "function": {"name": "world__file_read", "description": "Read.", "parameters": {}}}
READ = '<tool_call>\n{"name": "world__file_read", "arguments": {"path": "big"}}\n</tool_call><|im_end|>'
GO_ON: Message = {
    "role": "user",
    "content": f"{STAMP}Continue the current task from the existing transcript, preserving completed work. If an "
    "action was interrupted, inspect its state before deciding whether to retry it. Do not restart the task or repeat "
    "completed actions.",
}


class Talk:
    """OpenClaw in miniature: `history` is what the next request sends."""

    def __init__(self, tokenizer: Path) -> None:
        self.renderer = Renderer(tokenizer)
        rules = load_adapter("openclaw")[0].capture
        self.recorder = Recorder("e", self.renderer, seed=7, rules=rules, context_limit=1 << 16)
        self.history: list[Message] = [SYSTEM, ASK]

    def ask(
        self, text: str, messages: list[Message], role: str = "root", tools: tuple[Message, ...] = (TOOL,)
    ) -> tuple[Prefix, Message]:
        call = self.recorder.begin(role, [dict(m) for m in messages], list(tools))
        ids = list(self.renderer.encode(text))
        return call.prefix, self.recorder.finish(call, ids, [-1.0] * len(ids), 3, "stop")[1]

    def read(self, result: str) -> Prefix:
        prefix, said = self.ask(READ, self.history)
        [given] = said["tool_calls"]
        # As OpenClaw sends a turn back: no text, arguments written anew.
        function = {"name": "world__file_read", "arguments": json.dumps({"path": "big"}, separators=(",", ":"))}
        self.history += [
            {"role": "assistant", "content": None, "tool_calls": [{**given, "function": function}]},
            {"role": "tool", "content": result, "tool_call_id": given["id"]},
        ]
        return prefix

    def segments(self, run: str = "root") -> list[tuple[str, list[int]]]:
        segments = build_segments("e", "policy", self.recorder.turns)
        return [(s.closed_by, s.tokens[s.mask].tolist()) for s in segments if s.run == run]

    def ids(self, *texts: str) -> list[int]:
        return [i for text in texts for i in self.renderer.encode(text)]


@pytest.fixture
def talk(chatml: Path) -> Talk:
    return Talk(chatml)


def summary(text: str) -> Message:
    wrapped = f"compacted into the following summary:\n\n<summary>\n{text}\n</summary>Runtime: agent=main"
    return {"role": "user", "content": f"The conversation history before this point was {wrapped}"}


def test_a_compaction_leaves_a_summary_a_tail_and_a_stamped_word_to_itself(talk: Talk) -> None:
    for result in ("one", "two"):
        talk.read(result)
    notes = [SYSTEM, {"role": "user", "content": "<conversation>…</conversation>"}]
    assert talk.ask("Read twice.<|im_end|>", notes, "auxsummary", ())[0] is Prefix.auxiliary
    talk.history = [SYSTEM, summary("Read twice."), *talk.history[-2:], GO_ON]
    assert talk.read("three") is Prefix.rewrite
    assert talk.read("four") is Prefix.continued
    assert talk.segments() == [("summary_replacement", talk.ids(READ, READ)), ("end", talk.ids(READ, READ))]
    assert talk.segments("auxsummary-0") == [("end", talk.ids("Read twice.<|im_end|>"))]
    assert talk.recorder.quarantine is None


def test_a_long_result_is_cut_in_place_and_the_word_to_itself_moves_to_the_end(talk: Talk) -> None:
    notice = "more characters truncated; rerun with narrower args if needed]"
    talk.read("first")
    talk.history = [SYSTEM, summary("Began."), *talk.history[-2:], GO_ON]
    talk.read(f"long text[... 16841 {notice}")
    talk.read("next")
    cut = {**talk.history[6], "content": f"long text[... 19118 {notice}"}
    talk.history = [*talk.history[:4], talk.history[5], cut, *talk.history[7:], GO_ON]
    assert talk.read("last") is Prefix.rewrite
    assert [closed_by for closed_by, _ in talk.segments()] == ["summary_replacement", "history_pruning", "end"]
    assert talk.segments()[1][1] == talk.ids(READ, READ) and talk.recorder.quarantine is None


def test_an_empty_answer_is_dropped_and_asked_for_again(talk: Talk) -> None:
    talk.ask("<|im_end|>", talk.history)
    again = "produce the visible answer now. Do not restart from scratch."
    more = {"role": "user", "content": f"{STAMP}The previous attempt did not produce a user-visible answer. {again}"}
    assert talk.ask("done<|im_end|>", [*talk.history, more])[0] is Prefix.rewrite
    assert talk.segments() == [("history_pruning", talk.ids("<|im_end|>")), ("end", talk.ids("done<|im_end|>"))]
    assert talk.recorder.quarantine is None


def test_a_last_word_without_tools_is_housekeeping_though_it_comes_on_the_roots_address(talk: Talk) -> None:
    talk.read("one")
    talk.ask("<|im_end|>", talk.history)
    said = "The previous assistant turn completed its tool calls but did not produce a user-visible answer. Continue."
    last = [{"role": "user", "content": "Void order E91."}, *talk.history[2:], {"role": "user", "content": said}]
    assert talk.ask("done<|im_end|>", last, tools=())[0] is Prefix.auxiliary
    assert talk.segments() == [("end", talk.ids(READ, "<|im_end|>"))]
    assert talk.segments("auxanswer-0") == [("end", [])]
    assert talk.recorder.quarantine is None


def test_a_user_message_changed_after_an_error_is_not_explained(talk: Talk) -> None:
    """What OpenClaw does after HTTP 429, which the proxy therefore never sends."""
    talk.read("one")
    changed = {**ASK, "content": f"{STAMP}Void order E91. If an action was interrupted, inspect its state."}
    assert talk.ask("done<|im_end|>", [SYSTEM, changed, *talk.history[2:]])[0] is Prefix.unexplained
    assert talk.recorder.quarantine is QuarantineReason.unexplained_prefix
