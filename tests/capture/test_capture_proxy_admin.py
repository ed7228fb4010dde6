"""The proxy's admin API, health, metrics, raw prompts, model list and what harnesses probe for."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from occamy.capture.metrics import Metrics, add_up
from occamy.capture.proxy import MAX_BODY
from occamy.capture.server import ProxyServer
from occamy.contracts.capture import Auxiliary, CaptureRules

ASK = {"role": "user", "content": "set tier of A01 to gold"}
ADMIN = "admin-key-of-this-test"
Ids = Callable[[str], list[int]]


@pytest.fixture
def proxy(tmp_path: Path, tokenizer_dir: Path, engine: Any) -> Iterator[ProxyServer]:
    with ProxyServer(
        tmp_path, tokenizer_dir, engine_url=engine.url, context_limit=64, hold_seconds=5.0, admin_key=ADMIN
    ) as server:
        yield server


@pytest.fixture
def admin(proxy: ProxyServer, connect: Any) -> Any:
    client = connect(proxy, key=ADMIN)
    client.base = "/admin"
    return client


def _code(answer: Any) -> tuple[int, str]:
    return answer[0], answer[1]["error"]["code"]


def test_an_episode_from_open_to_close(proxy: ProxyServer, admin: Any, connect: Any, engine: Any, ids: Ids) -> None:
    engine.script = [(ids("done<end>"), "stop")]
    rules = CaptureRules(announced=("history_pruning",)).model_dump(mode="json")
    status, opened = admin.send("POST", "/episodes/e", {"seed": 1, "rules": rules})
    assert status == 201 and opened["path"] == "/episodes/e/root/v1"
    client = connect(proxy, key=opened["api_key"])
    assert client.chat([ASK])[0] == 200
    assert admin.send("GET", "/episodes") == (200, {"episodes": ["e"]})
    state = admin.send("GET", "/episodes/e")[1]
    assert state["open"] and state["quarantine"] is None and state["classes"] == {"start": 1}
    assert [(t["run"], t["class"], t["sampled_tokens"]) for t in state["turns"]] == [("root", "start", 2)]
    status, closed = admin.send("POST", "/episodes/e/close")
    tokens = state["turns"][0]["prompt_tokens"] + 2
    assert status == 200 and closed["quarantine"] is None
    assert closed["segments"] == [{"run": "root", "index": 0, "closed_by": "end", "tokens": tokens, "targets": 2}]
    assert _code(client.chat([ASK])) == (401, "invalid_api_key")
    assert admin.send("GET", "/episodes/e")[1] == state | {"open": False}
    assert _code(admin.send("POST", "/episodes/e", {"seed": 1})) == (409, "episode_not_new")
    assert _code(admin.send("GET", "/episodes/none")) == (404, "episode_not_open")
    assert _code(admin.send("POST", "/episodes/e/close")) == (404, "episode_not_open")


def test_the_path_of_an_odd_id_is_ready_for_a_url(proxy: ProxyServer, admin: Any, connect: Any) -> None:
    opened = admin.send("POST", "/episodes/a%3Fb%20%C3%A9", {"seed": 1})[1]
    assert (opened["episode_id"], opened["path"]) == ("a?b é", "/episodes/a%3Fb%20%C3%A9/root/v1")
    client = connect(proxy, key=opened["api_key"])
    client.base = opened["path"]
    assert client.send("GET", "/models")[0] == 200


def test_only_the_admin_key_administers(proxy: ProxyServer, admin: Any, connect: Any, tmp_path: Path) -> None:
    key = admin.send("POST", "/episodes/e", {"seed": 1})[1]["api_key"]
    for wrong in ("", key, ADMIN + "x", "ключ"):
        admin.key = wrong.encode().decode("latin1")
        for method, path in [("GET", "/episodes"), ("POST", "/episodes/f"), ("POST", "/pause"), ("GET", "/episodes/e")]:
            assert _code(admin.send(method, path, {"seed": 1})) == (401, "invalid_api_key")
    assert _code(connect(proxy, key=ADMIN).chat([ASK])) == (401, "invalid_api_key")


def test_without_an_admin_key_there_is_no_admin_api(
    tmp_path: Path, tokenizer_dir: Path, engine: Any, connect: Any
) -> None:
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url) as proxy:
        client = connect(proxy, key="")
        client.base = "/admin"
        assert _code(client.send("GET", "/episodes")) == (404, "not_found")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_value"),
        ({}, 400, "invalid_value"),
        ({"seed": 1, "colour": "red"}, 400, "invalid_value"),
        ({"seed": 1, "rules": {"announced": ["magic"]}}, 400, "invalid_value"),
        ({"seed": 1, "sampled_by": "teacher"}, 409, "episode_not_new"),
    ],
)
def test_what_cannot_be_opened(admin: Any, body: Any, status: int, code: str) -> None:
    assert _code(admin.send("POST", "/episodes/e", body)) == (status, code)
    assert admin.send("POST", "/episodes/e", {"seed": 1})[0] == 201
    assert _code(admin.send("POST", "/episodes/e", {"seed": 1})) == (409, "episode_not_new")


@pytest.mark.parametrize("place", ["", "/episodes/e"])
def test_a_pause_holds_one_episode_or_all(
    proxy: ProxyServer, admin: Any, connect: Any, engine: Any, ids: Ids, place: str
) -> None:
    engine.script = [(ids("done<end>"), "stop")] * 2
    held, other = connect(proxy, "e"), connect(proxy, "f")
    with ThreadPoolExecutor(2) as pool:
        assert admin.send("POST", f"{place}/pause") == (200, {"paused": True})
        waiting = pool.submit(held.stream, [ASK])
        passing = pool.submit(other.chat, [ASK])
        if place:
            assert passing.result(10)[0] == 200
        while "occamy_capture_held_calls 0\n" in _metrics(admin):
            pass
        assert len(engine.seen) == (1 if place else 0) and not waiting.done()
        assert admin.send("POST", f"{place}/resume") == (200, {"paused": False})
        assert waiting.result(10)[0] == 200 and passing.result(10)[0] == 200
    assert _code(admin.send("POST", "/episodes/none/pause")) == (404, "episode_not_open")


def test_a_pause_that_cannot_wait_for_calls_in_flight_pauses_nothing(
    tmp_path: Path, tokenizer_dir: Path, engine: Any, connect: Any, ids: Ids
) -> None:
    with (
        ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url, hold_seconds=0.1, admin_key=ADMIN) as proxy,
        ThreadPoolExecutor(1) as pool,
    ):
        client, admin = connect(proxy), connect(proxy, key=ADMIN)
        admin.base = "/admin"
        engine.script, engine.release = [(ids("done<end>"), "stop")] * 2, threading.Event()
        flying = pool.submit(client.chat, [ASK])
        assert engine.arrived.wait(10)
        assert _code(admin.send("POST", "/pause")) == (503, "still_sampling")
        with pytest.raises(TimeoutError):
            proxy.pause()
        engine.release.set()
        assert flying.result(10)[0] == 200
        assert connect(proxy, "f").chat([ASK])[0] == 200


def _metrics(client: Any) -> str:
    client.base, base = "", client.base
    with closing(client.request("GET", "/metrics")) as connection:
        response = connection.getresponse()
        assert response.getheader("content-type").startswith("text/plain; version=0.0.4")
        text = response.read().decode()
    client.base = base
    return str(text)


def test_metrics_count_calls_by_class_tokens_and_refusals(
    proxy: ProxyServer, connect: Any, engine: Any, ids: Ids
) -> None:
    engine.script = [(ids("done<end>"), "stop")] * 3
    client = connect(proxy)
    message = client.chat([ASK])[1]["choices"][0]["message"]
    client.chat([ASK])
    client.chat([ASK, message, {"role": "user", "content": "check"}])
    client.chat([ASK], n=2)
    text = _metrics(client)
    prompt = len(ids("<user>set tier of A01 to gold<assistant>"))
    more = prompt + len(ids("done<end><user>check<assistant>"))
    for line in (
        'calls_total{class="start"} 1', 'calls_total{class="retry"} 1', 'calls_total{class="continue"} 1',
        'refused_total{code="unsupported_value"} 1', 'tokens_total{kind="sampled"} 6',
        f'tokens_total{{kind="prompt"}} {2 * prompt + more}', "open_episodes 1", "held_calls 0", "calls_in_flight 0",
        'call_seconds_bucket{le="+Inf"} 3', "call_seconds_count 3",
    ):  # fmt: skip
        assert f"occamy_capture_{line}\n" in text


def test_metrics_of_several_proxies_add_up() -> None:
    one, two = Metrics(), Metrics()
    one.answered("start", prompt=10, cached=0, sampled=2, seconds=0.02)
    two.answered("retry", prompt=5, cached=5, sampled=1, seconds=0.02)
    two.answered("start", prompt=5, cached=5, sampled=1, seconds=500.0)
    lines = add_up([one.text(3), two.text(4)]).splitlines()
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds)) == 7
    starts = lines.index("# TYPE occamy_capture_calls_total counter")
    assert lines[starts + 1 : starts + 3] == [
        'occamy_capture_calls_total{class="start"} 2.0', 'occamy_capture_calls_total{class="retry"} 1.0',
    ]  # fmt: skip
    assert 'occamy_capture_call_seconds_bucket{le="0.03"} 2.0' in lines
    assert 'occamy_capture_call_seconds_bucket{le="300.0"} 2.0' in lines
    assert 'occamy_capture_call_seconds_bucket{le="+Inf"} 3.0' in lines
    assert "occamy_capture_open_episodes 7.0" in lines


def test_the_model_list_tells_the_context_and_probes_get_a_plain_404(proxy: ProxyServer, connect: Any) -> None:
    client = connect(proxy)
    (model,) = client.send("GET", "/models")[1]["data"]
    assert model["id"] == "policy" and model["max_model_len"] == model["context_length"] == 64
    assert client.send("GET", "/models/some/name") == (200, model)
    assert client.send("GET", "/models/") == client.send("GET", "/models")
    client.base = "/episodes/e/root"
    for method, path in [("GET", "/api/v1/models"), ("POST", "/api/show"), ("GET", "/v1/props"), ("GET", "/api/tags")]:
        assert _code(client.send(method, path)) == (404, "not_found")
    assert _code(client.send("GET", "/v1/chat/completions")) == (405, "not_found")
    client.base = ""
    assert client.send("GET", "/healthz") == (200, {"status": "ok"})


@pytest.mark.parametrize("told", [True, False])
def test_a_body_that_is_too_large_is_refused_unread(proxy: ProxyServer, connect: Any, told: bool) -> None:
    client = connect(proxy)
    chunk = b" " * (1 << 20)
    if told:
        headers = {"content-length": str(MAX_BODY + 1)}
        answer = client.send("POST", "/chat/completions", chunk, headers)
    else:
        sent = iter([chunk] * (MAX_BODY // len(chunk) + 1))
        with closing(client.request("GET", "/models")) as connection:
            connection.getresponse().read()
            path, auth = f"{client.base}/chat/completions", {"Authorization": f"Bearer {client.key}"}
            connection.request("POST", path, sent, auth, encode_chunked=True)
            response = connection.getresponse()
            answer = response.status, json.loads(response.read())
    assert _code(answer) == (413, "request_too_large")
    assert client.send("GET", "/models")[0] == 200


HINTS = {
    "store": False, "service_tier": "auto", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "user": "u",
    "reasoning_effort": "low", "reasoning": {"enabled": True}, "think": False, "options": {"num_ctx": 65536},
    "metadata": {"a": "b"}, "parallel_tool_calls": True, "tool_choice": "auto", "n": 1, "logit_bias": {}, "tools": [],
}  # fmt: skip


def test_hints_of_harnesses_change_nothing(proxy: ProxyServer, connect: Any, engine: Any, ids: Ids) -> None:
    engine.script = [(ids("done<end>"), "stop")] * 2
    assert connect(proxy, "e").chat([ASK])[0] == connect(proxy, "f").chat([ASK], **HINTS)[0] == 200
    plain, hinted = engine.seen
    assert plain["input_ids"] == hinted["input_ids"]
    for sent in (plain, hinted):
        del sent["sampling_params"]["sampling_seed"]  # another in every episode
    assert plain["sampling_params"] == hinted["sampling_params"]


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_raw_prompt_reaches_the_engine_as_it_is_and_has_a_run_of_its_own(
    proxy: ProxyServer, connect: Any, engine: Any, ids: Ids, as_ids: bool
) -> None:
    prompt = "<user>check<assistant>"
    engine.script = [(ids(TWO), "stop"), (ids("done<end>"), "stop")]
    rules = CaptureRules(auxiliaries=(Auxiliary(run="aux", purpose="other"),))
    client = connect(proxy, run="aux", rules=rules)
    asked = {"prompt": ids(prompt) if as_ids else prompt, "logprobs": 0, "temperature": 0.5}
    status, answer = client.send("POST", "/completions", asked)
    (choice,) = answer["choices"]
    assert status == 200 and answer["object"] == "text_completion"
    assert choice["text"] == 'crm_get{"id":"A01"}' and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["token_logprobs"][:2] == [-0.25, -0.5]
    assert answer["usage"]["completion_tokens"] == len(ids(TWO))
    assert engine.seen[0]["input_ids"] == ids(prompt) and engine.seen[0]["sampling_params"]["max_new_tokens"] == 16
    with closing(client.request("POST", "/completions", {"prompt": "check", "stream": True})) as connection:
        events = connection.getresponse().read().decode().split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"] == "done"
    assert events[1:] == ["data: [DONE]", ""]
    captured = proxy.close_episode("e")
    assert [s.run for s in captured.segments] == ["aux-0", "aux-1"]
    assert not any(s.mask.any() for s in captured.segments) and captured.quarantine is None


TWO = 'crm_get{"id":"A01"}<end>'


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "invalid_value", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": ["one", "two"]}, "invalid_value", "prompt"),
        ({"prompt": [1, "x"]}, "invalid_value", "prompt"),
        ({"prompt": [1 << 20]}, "template_refused", "prompt"),
        ({"prompt": [-1]}, "invalid_value", "prompt"),
        ({"prompt": [1 << 40]}, "invalid_value", "prompt"),
        ({"prompt": "check", "echo": True}, "unsupported_value", "echo"),
        ({"prompt": "check", "best_of": 2}, "unsupported_value", "best_of"),
        ({"prompt": "check", "messages": []}, "unsupported_parameter", "messages"),
        ({"prompt": "check", "max_tokens": 100}, "context_length_exceeded", "prompt"),
    ],
)
def test_raw_prompts_that_are_refused(
    proxy: ProxyServer, connect: Any, engine: Any, body: Any, code: str, param: str
) -> None:
    status, answer = connect(proxy, run="aux").send("POST", "/completions", body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, param)
    assert engine.seen == []
