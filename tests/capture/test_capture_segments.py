"""Segments from the store are those of the live recorder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from occamy.capture.recorder import Recorder
from occamy.capture.render import Renderer
from occamy.capture.segments import build_segments
from occamy.capture.store import Store
from occamy.capture.turn import Exchange
from occamy.contracts.capture import CaptureRules, EpisodeSetup


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
