"""Faults behind the proxy: each becomes a typed answer and a reason, and none loses what was recorded before."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from occamy.capture.server import ProxyServer
from occamy.contracts.episode import QuarantineReason

ASK = {"role": "user", "content": "set tier of A01 to gold"}
Ids = Callable[[str], list[int]]


def _code(answer: Any) -> tuple[int, str]:
    return answer[0], answer[1]["error"]["code"]


def _said(ids: list[int], **changes: Any) -> str:
    scored = [[-1.0, token, None] for token in ids]
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "0", "output_token_logprobs": scored}
    return json.dumps({"output_ids": ids, "meta_info": {**meta, **changes}})


@pytest.mark.parametrize(
    ("garbage", "code", "reason"),
    [
        ("no JSON", "backend_failed", QuarantineReason.infra_failed),
        ("{}", "backend_failed", QuarantineReason.infra_failed),
        (_said([5], output_token_logprobs=[]), "backend_failed", QuarantineReason.infra_failed),
        (_said([5], weight_version="new"), "backend_failed", QuarantineReason.infra_failed),
        (_said([10**6]), "token_mismatch", QuarantineReason.token_mismatch),
        (_said([5], output_token_logprobs=[[0.5, 5, None]]), "backend_failed", QuarantineReason.infra_failed),
        (_said([5]).replace("-1.0", "NaN"), "backend_failed", QuarantineReason.infra_failed),
        (_said([5] * 9), "backend_failed", QuarantineReason.infra_failed),
    ],
)
def test_an_engine_that_talks_garbage(
    tmp_path: Path, tokenizer_dir: Path, engine: Any, connect: Any, garbage: str, code: str, reason: QuarantineReason
) -> None:
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url) as proxy:
        engine.script = [garbage.encode()]
        assert _code(connect(proxy).chat([ASK], max_tokens=8)) == (500, code)
        assert proxy.store.read_open("e").quarantine is reason
        captured = proxy.close_episode("e")
    assert (captured.turns, captured.quarantine) == ([], reason)


def test_an_engine_that_breaks_connections_and_fails_for_a_while_is_waited_for(
    tmp_path: Path, tokenizer_dir: Path, engine: Any, connect: Any, ids: Ids
) -> None:
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url) as proxy:
        engine.script = [b"", 500, b"", 503, (ids("done"), "abort"), (ids("done<end>"), "stop")]
        assert connect(proxy).chat([ASK])[0] == 200
        captured = proxy.close_episode("e")
    assert [t.attempt for t in captured.turns] == [0] and captured.quarantine is None


def test_an_engine_that_never_answers_is_given_up(
    tmp_path: Path, tokenizer_dir: Path, engine: Any, connect: Any
) -> None:
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url, answer_seconds=0.1) as proxy:
        engine.script, engine.release = [500], threading.Event()
        assert _code(connect(proxy).chat([ASK])) == (503, "engine_unavailable")
        assert engine.aborted.get(timeout=10) == engine.seen[0]["rid"]
        engine.release.set()
        assert proxy.close_episode("e").quarantine is QuarantineReason.infra_failed


def test_a_full_disk_refuses_the_turn_and_quarantines_the_episode(
    tmp_path: Path, tokenizer_dir: Path, engine: Any, connect: Any, ids: Ids
) -> None:
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url) as proxy:
        engine.script = [(ids("done<end>"), "stop")] * 3
        client = connect(proxy)
        message = client.chat([ASK])[1]["choices"][0]["message"]
        proxy.store._db.execute(f"PRAGMA max_page_count = {_pages(proxy)}")
        more = [ASK, message, {"role": "user", "content": "check " * 900}]
        assert _code(client.chat(more)) == (500, "capture_failed")
        proxy.store._db.execute("PRAGMA max_page_count = 100000")
        assert client.chat(more)[0] == 200
        assert proxy.store.read_open("e").quarantine is QuarantineReason.incomplete_capture
        assert [(t.ordinal, t.attempt) for t in proxy.store.turns("e")] == [(0, 0), (1, 1)]
        assert proxy.close_episode("e").quarantine is QuarantineReason.incomplete_capture
        stored = proxy.store.captured("e")
    assert stored.quarantine is QuarantineReason.incomplete_capture
    assert stored.segments[0].mask.sum() == 4


def _pages(proxy: ProxyServer) -> int:
    return int(proxy.store._db.execute("PRAGMA page_count").fetchone()[0])


def test_an_episode_that_cannot_be_closed_stays_open(
    tmp_path: Path, tokenizer_dir: Path, engine: Any, connect: Any, ids: Ids
) -> None:
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url) as proxy:
        engine.script = [(ids("done<end>"), "stop")]
        client = connect(proxy)
        other = sqlite3.connect(tmp_path / "capture.sqlite", isolation_level=None)
        proxy.store._db.execute("PRAGMA busy_timeout = 0")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            proxy.close_episode("e")
        other.execute("ROLLBACK")
        other.close()
        assert client.chat([ASK])[0] == 200
        assert len(proxy.close_episode("e").turns) == 1


def test_a_slow_disk_holds_back_its_own_answer_only(
    tmp_path: Path, tokenizer_dir: Path, engine: Any, connect: Any, ids: Ids
) -> None:
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url) as proxy, ThreadPoolExecutor(2) as pool:
        engine.script = [(ids("done<end>"), "stop")] * 2
        one, two = connect(proxy, "e"), connect(proxy, "f")
        other = sqlite3.connect(tmp_path / "capture.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        asked = [pool.submit(client.chat, [ASK]) for client in (one, two)]
        while len(engine.seen) < 2:
            assert engine.arrived.wait(10)
        assert one.send("GET", "/models")[0] == 200
        assert not any(answer.done() for answer in asked)
        other.execute("ROLLBACK")
        other.close()
        assert [answer.result(20)[0] for answer in asked] == [200, 200]
