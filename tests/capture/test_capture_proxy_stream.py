"""Streams of the proxy: what harnesses read, how they stay alive, and what a client that leaves leaves behind."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from occamy.capture.server import ProxyServer
from occamy.capture.stream import Delivery
from occamy.contracts.capture import CaptureRules
from occamy.contracts.episode import QuarantineReason

ASK = {"role": "user", "content": "set tier of A01 to gold"}
TWO_CALLS = 'crm_get{"id":"A01"}crm_get{"id":"A02"}<end>'
Ids = Callable[[str], list[int]]


@pytest.fixture
def proxy(tmp_path: Path, tokenizer_dir: Path, engine: Any) -> Iterator[ProxyServer]:
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url, context_limit=128) as server:
        yield server


@pytest.fixture
def impatient(tmp_path: Path, tokenizer_dir: Path, engine: Any) -> Iterator[ProxyServer]:
    """A proxy whose streams begin at once."""
    delivery = Delivery(commit_seconds=0.0, alive_seconds=0.02)
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url, hold_seconds=0.3, delivery=delivery) as server:
        yield server


def _events(lines: list[str]) -> list[dict[str, Any]]:
    """The events of a stream, after its comments; it must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in lines if not line.startswith(":")]
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def test_parallel_tool_calls_come_by_index_and_the_echo_continues(
    proxy: ProxyServer, engine: Any, connect: Any, ids: Ids
) -> None:
    engine.script = [(ids(TWO_CALLS), "stop"), (ids("done<end>"), "stop")]
    client = connect(proxy)
    status, lines = client.stream([ASK], model="m", stream_options={"include_usage": True}, logprobs=True)
    *chunks, end, usage = _events(lines)
    assert status == 200 and {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in [*chunks, end, usage]}) == 1 and {c["model"] for c in chunks} == {"m"}
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    calls = [delta["tool_calls"][0] for delta in deltas[1:]]
    assert [c["index"] for c in calls] == [0, 1] and len({c["id"] for c in calls}) == 2
    assert [c["function"] for c in calls] == [
        {"name": "crm_get", "arguments": '{"id":"A01"}'},
        {"name": "crm_get", "arguments": '{"id":"A02"}'},
    ]
    assert [c["choices"][0]["finish_reason"] for c in [*chunks, end]] == [None, None, None, "tool_calls"]
    assert all(c["usage"] is None for c in [*chunks, end])
    assert len(end["choices"][0]["logprobs"]["content"]) == len(ids(TWO_CALLS))
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(ids(TWO_CALLS))

    said = [{key: c[key] for key in ("id", "type", "function")} for c in calls]
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in calls]
    _, lines = client.stream([ASK, {"role": "assistant", "content": None, "tool_calls": said}, *results])
    _, content, end = _events(lines)
    assert content["choices"][0]["delta"] == {"content": "done"} and "usage" not in end
    assert end["choices"][0]["finish_reason"] == "stop" and end["choices"][0]["logprobs"] is None
    captured = proxy.close_episode("e")
    assert len(captured.segments) == 1 and captured.quarantine is None


def test_an_answer_cut_by_length_says_so(proxy: ProxyServer, engine: Any, connect: Any, ids: Ids) -> None:
    engine.script = [(ids("done;"), "length")]
    _, lines = connect(proxy).stream([ASK], max_tokens=2)
    assert _events(lines)[-1]["choices"][0]["finish_reason"] == "length"


def test_what_is_refused_is_refused_before_the_first_byte(
    proxy: ProxyServer, engine: Any, connect: Any, ids: Ids
) -> None:
    client = connect(proxy)
    assert client.stream([ASK], max_tokens=1000)[0] == 400
    engine.script = [400]
    status, lines = client.stream([ASK])
    assert status == 500 and json.loads(lines[0])["error"]["code"] == "backend_failed"


def test_comments_keep_a_stream_alive_until_its_answer_is_there(
    impatient: ProxyServer, engine: Any, connect: Any, ids: Ids
) -> None:
    engine.script, engine.release = [(ids("done<end>"), "stop")], threading.Event()
    connection = connect(impatient).request("POST", "/chat/completions", {"messages": [ASK], "stream": True})
    response = connection.getresponse()
    assert response.status == 200 and response.getheader("content-type") == "text/event-stream; charset=utf-8"
    assert [response.readline() for _ in range(4)] == [b": held\n", b"\n"] * 2
    engine.release.set()
    lines = [line for line in response.read().decode().split("\n") if line]
    assert _events(lines)[1]["choices"][0]["delta"] == {"content": "done"}
    assert impatient.close_episode("e").quarantine is None
    connection.close()


def test_a_stream_that_has_begun_ends_with_an_error_event_when_no_answer_comes(
    impatient: ProxyServer, engine: Any, connect: Any
) -> None:
    engine.script = [500] * 100
    status, lines = connect(impatient).stream([ASK])
    (error,) = _events(lines)
    assert status == 200 and error["error"]["code"] == "engine_unavailable"
    with closing(http.client.HTTPConnection(impatient.url.removeprefix("http://"))) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    assert 'occamy_capture_refused_total{code="engine_unavailable"} 1\n' in text
    assert impatient.close_episode("e").quarantine is QuarantineReason.infra_failed


@pytest.mark.parametrize(("begun", "options"), [(True, {"stream": True}), (False, {"stream": True}), (False, {})])
def test_a_client_that_leaves_ends_its_request_and_may_ask_again(
    request: pytest.FixtureRequest, engine: Any, connect: Any, ids: Ids, begun: bool, options: dict[str, Any]
) -> None:
    proxy = request.getfixturevalue("impatient" if begun else "proxy")
    engine.script, engine.release = [(ids("done<end>"), "stop")] * 2, threading.Event()
    client = connect(proxy)
    connection = client.request("POST", "/chat/completions", {"messages": [ASK], **options})
    assert engine.arrived.wait(10)
    if begun:
        connection.getresponse().readline()
    connection.close()
    assert engine.aborted.get(timeout=10) == engine.seen[0]["rid"]
    assert proxy.store.turns("e") == []
    engine.release.set()
    assert client.chat([ASK])[1]["choices"][0]["message"]["content"] == "done"
    captured = proxy.close_episode("e")
    assert len(captured.turns) == 1 and captured.quarantine is None
    assert captured.segments[0].mask.sum() == 2


def test_calls_of_one_episode_run_beside_each_other(proxy: ProxyServer, engine: Any, connect: Any, ids: Ids) -> None:
    root = connect(proxy, rules=CaptureRules(subagents=True))
    engine.script, engine.release = [(ids("done<end>"), "stop")] * 9, threading.Event()
    children = [connect(proxy, key=root.key, run="sub") for _ in range(8)]
    with ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(root.stream, [ASK])]
        asked += [pool.submit(c.stream, [{"role": "user", "content": f"check {i}"}]) for i, c in enumerate(children)]
        while len(engine.seen) < 9:
            assert engine.arrived.wait(10)
        engine.release.set()
        assert [future.result(10)[0] for future in asked] == [200] * 9
    captured = proxy.close_episode("e")
    assert len(captured.segments) == 9 and captured.quarantine is None
    assert sorted(t.ordinal for t in captured.turns) == list(range(9))
