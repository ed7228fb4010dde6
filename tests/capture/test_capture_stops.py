"""Stop strings: nothing of one is shown, every sampled id is kept, and the cut answer is known when it comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from occamy.capture.call import Wanted
from occamy.capture.recorder import Recorder
from occamy.capture.render import Renderer
from occamy.capture.segments import build_segments
from occamy.capture.server import ProxyServer
from occamy.capture.stops import before_stop, tokens_before_stop
from occamy.capture.store import Store
from occamy.capture.turn import Exchange, Prefix
from occamy.contracts.capture import Auxiliary, CaptureRules, EpisodeSetup
from occamy.contracts.episode import Segment

ASK = {"role": "user", "content": "set tier of A01 to gold"}
NEXT = {"role": "user", "content": "check"}
Ids = Callable[[str], list[int]]


@pytest.fixture
def proxy(tmp_path: Path, tokenizer_dir: Path, engine: Any) -> Iterator[ProxyServer]:
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url) as server:
        yield server


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("done;ok", (";",), "done"),
        ("done;ok", (), "done;ok"),
        ("done;ok", ("x", "ok", ";o"), "done"),  # the one that begins first
        ("ok", ("ok",), ""),
        ("café ☂", ("é",), "caf"),
        ("don", ("done",), "don"),
    ],
)
def test_text_ends_where_the_first_stop_string_begins(text: str, stop: tuple[str, ...], shown: str) -> None:
    assert before_stop(text, stop) == shown


@pytest.mark.parametrize(
    ("stop", "tokens"),
    [((), 6), (("zz",), 6), (("é",), 2), (("f",), 2), (("ca", "x"), 0), (("x",), 4), (("\u00e9x", "fé"), 2)],
)
def test_no_token_that_reaches_into_a_stop_string_is_told(stop: tuple[str, ...], tokens: int) -> None:
    said = [b"c", b"a", b"f\xc3", b"\xa9", b"x", b"y"]

    def decode(ids: Any) -> str:
        return b"".join(said[i] for i in ids).decode(errors="replace")

    assert tokens_before_stop(range(6), stop, decode) == tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_cut_answer_is_shown_to_the_stop_string_and_recorded_whole(
    proxy: ProxyServer, connect: Any, engine: Any, ids: Ids, stream: bool, finish: str
) -> None:
    """`e;c` begins and ends inside tokens. The engine may have reached max_tokens with the same token."""
    sampled = ids("ok done;check")
    engine.script = [(sampled, finish), (ids("done<end>"), "stop")]
    client = connect(proxy)
    options = {"stop": ["nothing", "e;c"], "max_tokens": 4, "logprobs": True}
    if stream:
        _, lines = client.stream([ASK], **options, stream_options={"include_usage": True})
        assert not any(";" in line or "check" in line for line in lines)
        *deltas, end, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        content = "".join(d["choices"][0]["delta"].get("content") or "" for d in deltas)
        message, choice, usage = {"role": "assistant", "content": content}, end["choices"][0], last["usage"]
    else:
        _, answer = client.chat([ASK], **options)
        choice, usage = answer["choices"][0], answer["usage"]
        message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("okdon", "stop")
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["ok"]
    assert usage["completion_tokens"] == len(sampled) == 4
    assert engine.seen[0]["sampling_params"]["stop"] == ["nothing", "e;c"]
    assert engine.seen[0]["sampling_params"]["stop_token_ids"] == ids("<end>")

    assert client.chat([ASK, message, NEXT])[0] == 200
    assert engine.seen[1]["input_ids"] == engine.seen[0]["input_ids"] + sampled + ids("<end><user>check<assistant>")
    assert "stop" not in engine.seen[1]["sampling_params"]
    captured = proxy.close_episode("e")
    assert [(t.prefix, t.finish) for t in captured.turns] == [("start", "stop"), ("continue", "stop")]
    (segment,) = captured.segments
    assert segment.tokens[segment.mask].tolist() == sampled + ids("done<end>")
    assert segment.logprobs[segment.mask].tolist() == [-0.25, -0.5, -0.75, -1.0, -0.25, -0.5]
    assert captured.quarantine is None


def test_a_raw_prompts_answer_is_cut_too(proxy: ProxyServer, connect: Any, engine: Any, ids: Ids) -> None:
    engine.script = [(ids("ok;done"), "stop")] * 2
    client = connect(proxy, run="aux", rules=CaptureRules(auxiliaries=(Auxiliary(run="aux", purpose="other"),)))
    body = {"prompt": "check", "stop": ";d", "logprobs": 0}
    choice = client.send("POST", "/completions", body)[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ok", "stop")
    assert (choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (["ok"], [0])
    with closing(client.request("POST", "/completions", {**body, "stop": "ok", "stream": True})) as connection:
        event = json.loads(connection.getresponse().read().decode().split("\n\n")[0].removeprefix("data: "))
    assert event["choices"][0]["text"] == "" and event["choices"][0]["logprobs"]["tokens"] == []


@pytest.mark.parametrize(
    "stop", ["", 7, {"a": 1}, ["a", ""], ["a", 7], ["a", "b", "c", "d", "e"], "\ufffd", ["a", "b\ufffd"]]
)
def test_what_is_no_stop_string_is_refused(proxy: ProxyServer, connect: Any, engine: Any, stop: Any) -> None:
    status, answer = connect(proxy).chat([ASK], stop=stop)
    error = answer["error"]
    assert (status, error["code"], error["param"], error["type"]) == (
        400, "invalid_value", "stop", "invalid_request_error",
    )  # fmt: skip
    assert engine.seen == []


class Talk:
    """A harness whose proxy is restarted from its database before every request."""

    def __init__(self, renderer: Renderer, store: Store) -> None:
        self.renderer, self.store = renderer, store
        self.history: list[dict[str, Any]] = [ASK]
        store.open_episode("e", EpisodeSetup(sampled_by="policy"))

    def step(self, text: str, *stop: str) -> tuple[Prefix, dict[str, Any]]:
        turns = self.store.turns("e")
        recorder = Recorder.restore("e", self.renderer, turns, None, seed=1, rules=CaptureRules(), context_limit=512)
        call = recorder.begin("root", json.loads(json.dumps(self.history)), [], wanted=Wanted(stop=stop))
        ids = list(self.renderer.encode(text))
        turn, message = recorder.finish(call, ids, [-1.0] * len(ids), 3, "stop")
        self.store.add_turn("e", turn, Exchange("", "", "", 0, 0.0), recorder.quarantine)
        self.history.append(message)
        for one in message.get("tool_calls", ()):
            self.history.append({"role": "tool", "tool_call_id": one["id"], "content": "ok"})
        return call.prefix, message

    def segment(self) -> Segment:
        [segment] = build_segments("e", "policy", self.store.turns("e"))
        return segment


@pytest.mark.parametrize(
    ("sampled", "stop", "content", "calls"),
    [
        # After a whole call; inside its arguments, which stay broken; before it; in text that was all cut.
        ('crm_get{"id":"A01"}crm_get{"id":"B02"', 'crm_get{"id":"B', None, [("crm_get", '{"id":"A01"}')]),
        ('crm_get{"id":"A01"', "A0", None, [("crm_get", '{"id":"')]),
        ('ok crm_get{"id":"A01"', "_g", "okcrm", []),
        ("done", "do", "", []),
    ],
)
def test_a_cut_answer_comes_back_as_the_same_turn_after_a_restart(
    renderer: Renderer, tmp_path: Path, sampled: str, stop: str, content: str | None, calls: list[Any]
) -> None:
    store = Store(tmp_path / "capture.sqlite")
    talk = Talk(renderer, store)
    _, message = talk.step(sampled, stop)
    told = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    assert (message["content"], told) == (content, calls)
    talk.history += [] if calls else [NEXT]
    assert talk.step("done<end>")[0] is Prefix.continued
    segment = talk.segment()
    assert segment.tokens[segment.mask].tolist() == [*renderer.encode(sampled), *renderer.encode("done<end>")]
    between = "<end><tool>ok<assistant>" if calls else "<end><user>check<assistant>"
    after = len(renderer.encode("<user>set tier of A01 to gold<assistant>" + sampled))
    assert segment.tokens[after:].tolist() == list(renderer.encode(between + "done<end>"))
    store.close()
