"""What a turn costs does not grow with the history, and a long episode stays small in memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from occamy.capture import incoming
from occamy.capture.call import Call
from occamy.capture.history import Tokens
from occamy.capture.recorder import Recorder
from occamy.capture.render import Renderer
from occamy.contracts.capture import CaptureRules

SAID = 'file_write{"path":"notes","text":"' + "A01.tier=gold;" * 20 + '"}<end>'
RESULT = "A01.tier=gold; B02.tier=gold; " * 32


def converse(renderer: Renderer, turns: int, name: str) -> Iterator[tuple[Call, Recorder, float]]:
    """A harness that sends its history anew each turn, some 500 tokens longer; with the recorder's CPU seconds.

    Another name makes other results, which no cache has seen.
    """
    recorder = Recorder("e", renderer, seed=0, rules=CaptureRules(), context_limit=1 << 20)
    output = list(renderer.encode(SAID))
    history: list[dict[str, Any]] = [{"role": "system", "content": "check"}, {"role": "user", "content": "check A01"}]
    for turn in range(turns):
        messages = orjson.loads(orjson.dumps(history))
        began = time.process_time()
        call = recorder.begin("root", messages, [])
        _, message = recorder.finish(call, output, [-0.5] * len(output), 0, "stop")
        yield call, recorder, time.process_time() - began
        given = message["tool_calls"][0]["id"]
        history += [message, {"role": "tool", "tool_call_id": given, "content": f"{name}{RESULT}{turn}"}]


def test_only_new_messages_are_hashed(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    plain = incoming.fingerprint
    monkeypatch.setattr(incoming, "fingerprint", lambda *a: (hashed.append(a[0]["role"]), plain(*a))[1])
    for turn, _ in enumerate(converse(renderer, 30, "A")):
        assert hashed == (["assistant", "tool"] if turn else ["system", "user"])
        hashed.clear()


def test_only_new_messages_are_tokenised(tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(tokenizer_dir)
    texts: list[str] = []
    plain = renderer.encode
    monkeypatch.setattr(renderer, "encode", lambda text: (texts.append(text), plain(text))[1])
    for turn, _ in enumerate(converse(renderer, 30, "D")):
        told = f"<tool>D{RESULT}{turn - 1}<assistant>" if turn else "<system>check<user>check A01<assistant>"
        assert [t for t in texts if t != SAID] == [told]
        texts.clear()


def test_the_json_of_a_prompt_is_extended(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    plain = orjson.dumps
    for call, *_ in converse(renderer, 30, "F"):
        with monkeypatch.context() as patch:
            patch.setattr(orjson, "dumps", lambda ids, option: (written.append(len(ids)), plain(ids, option=option))[1])
            sent = call.step.prompt_json()
        assert orjson.loads(sent) == call.input_ids.tolist()
        assert written.pop() < 1000


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 99), max_size=4), st.integers(0, 9)), max_size=9))
def test_ids_are_written_as_they_are(steps: list[tuple[int, list[int], int]]) -> None:
    tokens, ids = Tokens(), list[int]()
    for keep, new, size in steps:
        ids = ids[:keep] + new
        tokens.regrow(min(keep, len(tokens)), new)
        assert orjson.loads(tokens.json(min(size, len(ids)))) == ids[:size]
        assert orjson.loads(tokens.json(len(ids))) == ids


def test_children_that_take_turns_are_not_hashed_anew(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder("e", renderer, seed=0, rules=CaptureRules(subagents=True), context_limit=1 << 20)
    output = list(renderer.encode('crm_get{"id":"A01"}<end>'))
    goals = [[{"role": "user", "content": f"check {name}"}] for name in ("A01", "B02", "C03")]
    hashed: list[str] = []
    plain = incoming.fingerprint
    monkeypatch.setattr(incoming, "fingerprint", lambda *a: (hashed.append(a[0]["role"]), plain(*a))[1])
    for turn in range(4):
        for messages in goals:
            call = recorder.begin("sub", orjson.loads(orjson.dumps(messages)), [])
            message = recorder.finish(call, output, [0.0] * len(output), 0, "stop")[1]
            messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}]
            assert hashed == (["assistant", "tool"] if turn else ["user"])
            hashed.clear()


def test_an_episode_of_100k_tokens_is_small(renderer: Renderer) -> None:
    seconds = [spent for *_, spent in converse(renderer, 200, "B")]
    tracemalloc.start()
    try:
        *_, (call, recorder, _) = converse(renderer, 200, "C")
        held = tracemalloc.get_traced_memory()[0] / 1e6
    finally:
        tracemalloc.stop()
    early, late = sorted(seconds[2:22])[10], sorted(seconds[180:])[10]
    print(
        f"\n{len(call.input_ids)} prompt tokens after {len(recorder.turns)} turns: {held:.1f} MB held; "
        f"CPU of a turn {1e3 * early:.2f} ms at the start, {1e3 * late:.2f} ms at the end"
    )
    assert len(call.input_ids) > 100_000
    assert held < 30
