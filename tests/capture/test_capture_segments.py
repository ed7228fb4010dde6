"""The invariant of capture over random conversations: each used token once, in order, nothing else a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from occamy.capture.recorder import Recorder
from occamy.capture.render import Renderer
from occamy.capture.segments import build_segments
from occamy.capture.store import Store
from occamy.capture.turn import Exchange
from occamy.contracts.capture import CaptureRules, EpisodeSetup
from occamy.contracts.episode import Origin

ANSWERS = [
    'crm_get{"id":"A01"}<end>',
    'crm_get{"id":"A01"}crm_get{"id":"B02"}<end>',
    "done<end>",
    'crm_get{"id":"',
    "ok",
]
STEP = st.fixed_dictionaries(
    {
        "attempts": st.lists(st.tuples(st.sampled_from(ANSWERS), st.integers(0, 3)), min_size=1, max_size=3),
        "used": st.integers(0, 2),
        "fails": st.booleans(),
        "rewrite": st.sampled_from([None, None, None, "summary_replacement", "history_pruning"]),
    }
)


@given(st.lists(STEP, min_size=1, max_size=8))
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_used_token_is_a_target_exactly_once(renderer: Renderer, steps: list[dict[str, Any]]) -> None:
    recorder = Recorder(
        "e",
        renderer,
        seed=0,
        rules=CaptureRules(announced=("summary_replacement", "history_pruning")),
        context_limit=4096,
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": "check A01"}]
    rewrite, prompts, expected = None, [], []
    for number, step in enumerate(steps):
        if step["fails"]:
            recorder.abandon(recorder.begin("root", list(messages), [], rewrite=rewrite))
        answers = []
        for text, version in step["attempts"]:
            call = recorder.begin("root", list(messages), [], rewrite=rewrite)
            ids = list(renderer.encode(text))
            logprobs = [-float(number + 1)] * len(ids)
            message = recorder.finish(call, ids, logprobs, version, "stop" if text.endswith("<end>") else "length")[1]
            answers.append((message, ids, version))
        followed = number < len(steps) - 1 and not step["rewrite"]
        used = step["used"] % len(answers) if followed else len(answers) - 1
        message, ids, version = answers[used]
        same = [a for a in answers if not a[0].get("tool_calls") and a[0]["content"] == message["content"]]
        if same and not message.get("tool_calls"):  # equal texts cannot be told apart: the latest counts
            message, ids, version = same[-1]
        prompts.append(call.input_ids.tolist())
        expected.append((rewrite, ids, version, -float(number + 1)))
        messages = [*messages, message]
        for c in message.get("tool_calls", []):
            messages.append({"role": "tool", "tool_call_id": c["id"], "content": "ok"})
        messages.append({"role": "user", "content": f"check {number}"})
        rewrite = step["rewrite"]
        if rewrite:
            messages = [messages[0], {"role": "user", "content": f"summary:{number}"}]
    assert recorder.quarantine is None
    segments = build_segments("e", "policy", recorder.turns)

    targets = [(token, version, logprob) for _, ids, version, logprob in expected for token in ids]
    found = [
        (t, v, lp)
        for s in segments
        for t, v, lp in zip(s.tokens[s.mask].tolist(), s.versions[s.mask].tolist(), s.logprobs[s.mask].tolist())
    ]
    assert found == targets
    assert [s.index for s in segments] == list(range(len(segments)))
    assert [s.closed_by for s in segments[:-1]] == [r for r, *_ in expected[1:] if r]
    for s in segments:
        assert np.array_equal(s.mask, s.origin == Origin.SAMPLED)
        assert (s.versions[~s.mask] == -1).all() and (s.logprobs[~s.mask] == 0).all()
    histories = iter(segments)
    current = next(histories)
    for prompt, (rewritten, ids, *_) in zip(prompts, expected):
        if rewritten:
            current = next(histories)
        assert current.tokens[: len(prompt) + len(ids)].tolist() == prompt + ids


def test_the_store_gives_back_what_the_recorder_holds(renderer: Renderer, tmp_path: Path) -> None:
    recorder = Recorder("e", renderer, seed=0, rules=CaptureRules(announced=("history_pruning",)), context_limit=1024)
    store = Store(tmp_path / "capture.sqlite")
    store.open_episode("e", EpisodeSetup(sampled_by="policy"))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "check A01"}]
    for number, rewrite in enumerate([None, None, "history_pruning", None]):
        if rewrite:
            messages = messages[:1]
        for _ in range(2):
            call = recorder.begin("root", list(messages), [], rewrite=rewrite)
            ids = list(renderer.encode('crm_get{"id":"A01"}<end>'))
            turn, message = recorder.finish(call, ids, [-0.1 * number] * len(ids), number, "stop")
            store.add_turn("e", turn, Exchange("d", "h", "{}", 0, 0.0))
        messages = [*messages, message, {"role": "tool", "tool_call_id": "x", "content": "ok"}]
    store.close_episode("e", None)
    kept, live = store.captured("e").segments, build_segments("e", "policy", recorder.turns)
    assert len(kept) == len(live) == 2
    for a, b in zip(kept, live):
        assert (a.run, a.index, a.closed_by, a.sampled_by) == (b.run, b.index, b.closed_by, b.sampled_by)
        for name in ("tokens", "mask", "logprobs", "versions", "origin"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
            assert getattr(a, name).dtype == getattr(b, name).dtype
    store.close()
