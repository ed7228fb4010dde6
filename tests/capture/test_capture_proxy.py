"""The proxy over real HTTP, in front of a scripted engine or a teacher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from occamy.capture.ledger import ledger
from occamy.capture.server import ProxyServer
from occamy.contracts.capture import CaptureRules
from occamy.contracts.episode import QuarantineReason

ASK = {"role": "user", "content": "set tier of A01 to gold"}
GET = 'crm_get{"id":"A01"}<end>'
Answer = tuple[int, dict[str, Any]]


@pytest.fixture
def proxy(tmp_path: Path, tokenizer_dir: Path, engine: Any) -> Iterator[ProxyServer]:
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url, context_limit=64) as server:
        yield server


@pytest.fixture
def client(proxy: ProxyServer, connect: Any) -> Any:
    rules = CaptureRules(announced=("history_pruning",))
    return connect(proxy, rules=rules)


def _error(answer: Answer) -> tuple[int, str | None]:
    return answer[0], answer[1]["error"]["code"]


def test_two_turns_reach_the_engine_as_ids_and_come_back_as_segments(
    proxy: ProxyServer, client: Any, engine: Any, ids: Callable[[str], list[int]]
) -> None:
    engine.script = [(ids(GET), "stop"), (ids("done<end>"), "stop")]
    engine.version = 3
    status, answer = client.chat([ASK], model="nano", max_tokens=8, temperature=0.5, top_p=0.9)
    assert status == 200 and answer["model"] == "nano" and answer["object"] == "chat.completion"
    choice, prompt = answer["choices"][0], ids("<user>set tier of A01 to gold<assistant>")
    call = choice["message"]["tool_calls"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["function"] == {"name": "crm_get", "arguments": '{"id":"A01"}'}
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids(GET)),
        "total_tokens": len(prompt) + len(ids(GET)),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    sent = engine.seen[0]
    assert sent["input_ids"] == prompt and sent["return_logprob"] is True
    sampling = sent["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["max_new_tokens"]) == (0.5, 0.9, 8)
    assert sampling["stop_token_ids"] == ids("<end>") and sampling["sampling_seed"] >= 0

    result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    status, answer = client.chat([ASK, choice["message"], result])
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "done"}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt + ids(GET))
    assert engine.seen[1]["input_ids"] == prompt + ids(GET) + ids("<tool>ok<assistant>")

    captured = proxy.close_episode("e")
    (segment,) = captured.segments
    assert segment.tokens.tolist() == engine.seen[1]["input_ids"] + ids("done<end>")
    assert segment.logprobs[segment.mask].tolist() == [-0.25 * (i + 1) for n in (len(ids(GET)), 2) for i in range(n)]
    assert set(segment.versions[segment.mask].tolist()) == {3}
    assert (captured.turns[0].input_tokens, captured.turns[0].output_tokens) == (len(prompt), len(ids(GET)))
    assert captured.quarantine is None
    proxy.store.finish_episode("e", "{}")
    assert proxy.store.captured("e").segments[0].tokens.tolist() == segment.tokens.tolist()
    assert _error(client.chat([ASK])) == (401, "invalid_api_key")


def test_keys_open_their_own_episode_only(proxy: ProxyServer, client: Any, connect: Any) -> None:
    other = proxy.open_episode("f", sampled_by="policy", seed=1, rules=CaptureRules())
    assert _error(connect(proxy, key=other).chat([ASK])) == (403, "wrong_episode")
    assert _error(connect(proxy, key="guessed").chat([ASK])) == (401, "invalid_api_key")
    assert _error(connect(proxy, key="").send("GET", "/models")) == (401, "invalid_api_key")
    assert client.send("GET", "/models")[1]["data"][0]["id"] == "policy"
    client.base = "/episodes/e/leaf/v1"
    assert _error(client.chat([ASK])) == (404, "unknown_run")
    client.base = ""
    assert client.send("GET", "/healthz") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "invalid_json", None),
        ([], "invalid_value", "body"),
        ({}, "invalid_value", "messages"),
        ({"messages": [{"role": "wizard"}]}, "invalid_value", "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_value", "messages[0].content"),
        ({"messages": [{"role": ["user"]}]}, "invalid_value", "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "invalid_value", "messages[0].tool_calls"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": [], "function": {"name": "x", "arguments": ""}}]}
                ]
            },
            "invalid_value",
            "messages[0].tool_calls",
        ),
        (
            {"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]}]},
            "invalid_value",
            "messages[1].tool_calls",
        ),
        ({"messages": [ASK], "stream": "yes"}, "invalid_value", "stream"),
        ({"messages": [ASK], "stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"messages": [ASK], "n": 2}, "unsupported_value", "n"),
        ({"messages": [ASK], "tool_choice": "required"}, "unsupported_value", "tool_choice"),
        ({"messages": [ASK], "chat_template_kwargs": {}}, "unsupported_parameter", "chat_template_kwargs"),
        ({"messages": [ASK], "temperature": "hot"}, "invalid_value", "temperature"),
        ({"messages": [ASK], "temperature": 1e-320}, "invalid_value", "temperature"),
        ({"messages": [ASK], "temperature": 9e-7}, "invalid_value", "temperature"),
        ({"messages": [ASK], "top_p": 0}, "invalid_value", "top_p"),
        ({"messages": [ASK], "seed": 1.5}, "invalid_value", "seed"),
        ({"messages": [ASK], "max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"messages": [ASK], "max_tokens": 4, "max_completion_tokens": 5}, "invalid_value", "max_tokens"),
        ({"messages": [ASK], "tools": [{}]}, "invalid_value", "tools"),
        ({"messages": [ASK], "max_tokens": 60}, "context_length_exceeded", "messages"),
        (
            b'{"messages":[{"role":"user","content":"x"}],"tools":[{"function":{"name":"x","parameters":'
            + 300 * b'{"a":'
            + b"1"
            + 300 * b"}"
            + b"}}]}",
            "invalid_value",
            "messages",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client: Any, body: Any, code: str, param: str | None) -> None:
    status, answer = client.send("POST", "/chat/completions", body)
    error = answer["error"]
    assert (status, error["code"], error["param"], error["type"]) == (400, code, param, "invalid_request_error")
    assert error["message"]


def test_neutral_parameters_text_parts_and_log_probs(client: Any, engine: Any, ids: Callable[[str], list[int]]) -> None:
    engine.script = [(ids("done;"), "length"), (ids("done"), "length")]
    parts = [{"type": "text", "text": "set tier of A01"}, {"type": "text", "text": " to gold"}]
    options = {"n": 1, "stream": False, "tool_choice": "auto", "user": "x", "seed": 5, "logprobs": True}
    _, answer = client.chat([{"role": "user", "content": parts}], max_completion_tokens=4, **options)
    choice = answer["choices"][0]
    assert engine.seen[0]["input_ids"] == ids("<user>set tier of A01 to gold<assistant>")
    assert engine.seen[0]["sampling_params"]["sampling_seed"] == 5
    assert choice["message"]["content"] == "done;"
    assert [(c["token"], c["logprob"]) for c in choice["logprobs"]["content"]] == [("done", -0.25), (";", -0.5)]
    _, answer = client.chat([ASK, choice["message"], {"role": "user", "content": "check"}])
    assert engine.seen[1]["input_ids"][-5:] == ids(";<end><user>check<assistant>")
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_least_temperature_is_named_and_kept_in_the_ledger(
    proxy: ProxyServer, client: Any, engine: Any, ids: Callable[[str], list[int]]
) -> None:
    assert "send 0, or 1e-06 and more" in client.chat([ASK], temperature=1e-320)[1]["error"]["message"]
    engine.script = [(ids("done<end>"), "stop")] * 3
    for temperature in (1e-6, 0, 0.7):
        assert client.chat([ASK], temperature=temperature, top_p=0.9)[0] == 200
    turns = proxy.store.turns("e")
    assert [(t.temperature, t.top_p) for t in turns] == [(1e-6, 0.9), (0.0, 0.9), (0.7, 0.9)]
    assert [(t.temperature, t.top_p) for t in ledger(turns)] == [(1e-6, 0.9), (0.0, 0.9), (0.7, 0.9)]


def test_rewrites_are_declared_by_header(
    proxy: ProxyServer, client: Any, engine: Any, ids: Callable[[str], list[int]]
) -> None:
    engine.script = [(ids("done<end>"), "stop")] * 3
    client.chat([ASK])
    assert _error(client.chat([ASK], rewrite="magic")) == (400, "invalid_value")
    assert client.chat([ASK], rewrite="history_pruning")[0] == 200
    assert client.chat([ASK], rewrite="summary_replacement")[0] == 200
    captured = proxy.close_episode("e")
    assert [(s.run, s.closed_by) for s in captured.segments] == [
        ("root", "history_pruning"), ("root", "end"), ("stray-0", "end"),
    ]  # fmt: skip
    assert captured.quarantine is QuarantineReason.unexplained_prefix


def test_a_paused_proxy_waits_for_calls_in_flight_and_holds_new_ones(
    proxy: ProxyServer, client: Any, engine: Any, ids: Callable[[str], list[int]], connect: Any
) -> None:
    other = connect(proxy, "f")
    engine.script = [(ids("done<end>"), "stop")] * 2
    engine.release = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        flying = pool.submit(client.chat, [ASK])
        assert engine.arrived.wait(10)
        pausing = pool.submit(proxy.pause)
        engine.release.set()
        pausing.result(10)
        assert flying.result(10)[0] == 200
        engine.version = 1
        held = pool.submit(other.chat, [ASK])
        assert other.send("GET", "/models")[0] == 200 and len(engine.seen) == 1
        proxy.resume()
        assert held.result(10)[0] == 200
    versions = [proxy.close_episode(e).turns[0].version for e in ("e", "f")]
    assert versions == [0, 1]


def test_aborted_and_failed_answers_are_sampled_again(
    proxy: ProxyServer, client: Any, engine: Any, ids: Callable[[str], list[int]]
) -> None:
    engine.script = [(ids("done"), "abort"), 500, (ids("ok<end>"), "stop")]
    assert client.chat([ASK])[1]["choices"][0]["message"]["content"] == "ok"
    captured = proxy.close_episode("e")
    assert len(captured.turns) == 1 and captured.quarantine is None


def test_a_call_waits_for_an_engine_that_comes_back(
    tmp_path: Path, tokenizer_dir: Path, engine: Any, ids: Callable[[str], list[int]], connect: Any
) -> None:
    engine.stop()
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url) as proxy, ThreadPoolExecutor(1) as pool:
        client = connect(proxy)
        waiting = pool.submit(client.chat, [ASK])
        assert client.send("GET", "/models")[0] == 200 and not waiting.done()
        back = type(engine)(engine.port)
        back.script = [(ids("done<end>"), "stop")]
        assert waiting.result(20)[0] == 200
        back.stop()


def test_after_the_deadline_the_episode_is_an_infrastructure_failure(
    tmp_path: Path, tokenizer_dir: Path, engine: Any, ids: Callable[[str], list[int]], connect: Any
) -> None:
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url, hold_seconds=0.2) as proxy:
        client = connect(proxy)
        engine.script = [500] * 100
        assert _error(client.chat([ASK])) == (503, "engine_unavailable")
        engine.script = [400]
        assert _error(client.chat([ASK])) == (500, "backend_failed")
        engine.script = [([10**6], "stop")]
        assert _error(client.chat([ASK])) == (500, "token_mismatch")
        captured = proxy.close_episode("e")
    assert (captured.segments, captured.quarantine) == ([], QuarantineReason.infra_failed)


def test_an_answer_after_the_end_of_the_episode_is_dropped(
    proxy: ProxyServer, client: Any, engine: Any, ids: Callable[[str], list[int]]
) -> None:
    engine.script = [(ids("done<end>"), "stop")]
    engine.release = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        flying = pool.submit(client.chat, [ASK])
        assert engine.arrived.wait(10)
        captured = proxy.close_episode("e")
        engine.release.set()
        assert _error(flying.result(10)) == (404, "episode_closed")
    assert captured.turns == [] and proxy.store.turns("e") == []


def test_many_episodes_at_once_stay_apart(
    proxy: ProxyServer, engine: Any, ids: Callable[[str], list[int]], connect: Any
) -> None:
    engine.script = [(ids(GET), "stop")] * 48

    def play(number: int) -> list[int]:
        name = f"m{number}"
        client = connect(proxy, name, seed=number)
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"check {number}"}]
        for _ in range(3):
            message = client.chat(messages)[1]["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": str(number)}
            messages += [message, result]
        (segment,) = proxy.close_episode(name).segments
        return segment.tokens.tolist()

    with ThreadPoolExecutor(8) as pool:
        for number, tokens in enumerate(pool.map(play, range(16))):
            turn = ids(f"<tool>{number}<assistant>")
            assert tokens == ids(f"<user>check {number}<assistant>") + (ids(GET) + turn) * 2 + ids(GET)


class Oracle:
    """Answers from a list; an exception in it is raised."""

    def __init__(self, *messages: Any) -> None:
        self.messages = list(messages)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def complete(self, episode_id: str, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((episode_id, request))
        message = self.messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return dict(message)


def _taught(tmp_path: Path, tokenizer_dir: Path, *messages: Any) -> tuple[ProxyServer, Oracle]:
    oracle = Oracle(*messages)
    return ProxyServer(tmp_path, tokenizer_dir, engine_url=None, teacher=oracle), oracle


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "content": None,
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def test_a_teachers_turns_are_tokenised_as_the_student_would_sample_them(
    tmp_path: Path, tokenizer_dir: Path, ids: Callable[[str], list[int]], connect: Any
) -> None:
    server, oracle = _taught(tmp_path, tokenizer_dir, _call("crm_get", '{"id": "A01"}'), {"content": "done"})
    with server as proxy:
        client = connect(proxy, sampled_by="teacher")
        message = client.chat([ASK], model="student")[1]["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        assert call_id != "x" and call_id.isalnum()
        client.chat([ASK, message, {"role": "tool", "tool_call_id": call_id, "content": "ok"}])
        captured = proxy.close_episode("e")
    assert oracle.asked[0] == ("e", {"messages": [ASK], "model": "student"})
    (segment,) = captured.segments
    said = ids(GET) + ids("done<end>")
    assert segment.tokens[segment.mask].tolist() == said
    assert segment.logprobs.tolist() == [0.0] * len(segment.tokens)
    assert (segment.versions == -1).all() and segment.sampled_by == "teacher"
    assert captured.quarantine is None


@pytest.mark.parametrize("message", [{"content": "unheard"}, _call("crm_get", '{"id":"Z99x"}'), {"content": "crm_get"}])
def test_a_teacher_that_the_student_cannot_quote_is_quarantined(
    tmp_path: Path, tokenizer_dir: Path, message: dict[str, Any], connect: Any
) -> None:
    server, _ = _taught(tmp_path, tokenizer_dir, message)
    with server as proxy:
        client = connect(proxy, sampled_by="teacher")
        assert client.chat([ASK])[0] == 200
        assert proxy.close_episode("e").quarantine is QuarantineReason.token_mismatch


def test_a_failing_teacher_is_an_infrastructure_failure(tmp_path: Path, tokenizer_dir: Path, connect: Any) -> None:
    server, _ = _taught(tmp_path, tokenizer_dir, RuntimeError("lost the script"))
    with server as proxy:
        client = connect(proxy, sampled_by="teacher")
        answer = client.chat([ASK])
        assert _error(answer) == (500, "backend_failed") and "lost the script" in answer[1]["error"]["message"]
        assert proxy.close_episode("e").quarantine is QuarantineReason.infra_failed


def test_episodes_are_opened_and_closed_once(proxy: ProxyServer, client: Any) -> None:
    with pytest.raises(ValueError, match="episode e is open already"):
        proxy.open_episode("e", sampled_by="policy", seed=1, rules=CaptureRules())
    with pytest.raises(ValueError, match="no teacher behind this proxy"):
        proxy.open_episode("f", sampled_by="teacher", seed=1, rules=CaptureRules())
    with pytest.raises(ValueError, match="announced"):
        CaptureRules(announced=("magic",))
    proxy.close_episode("e")
    with pytest.raises(KeyError, match="episode e is not open"):
        proxy.close_episode("e")
    with pytest.raises(ValueError, match="engine URL or a teacher"):
        ProxyServer(Path("x"), Path("y"), engine_url=None)
