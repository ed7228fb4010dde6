"""Bodies that go on from earlier ones are read as any other, but for the cost."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from occamy.capture.bodies import Bodies, Body
from occamy.capture.request import ApiError, ChatRequest, parse_chat

SYSTEM = {"role": "system", "content": "check"}
USER = {"role": "user", "content": 'say "]}" or ],"messages":[ é \U0001f600'}
CALL = {"id": "c0", "type": "function", "function": {"name": "read", "arguments": '{"ids":[1,{"a":"]"}]}'}}
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"required": ["messages"]}}}]


def spell(messages: list[Any], **more: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": messages, **more})


def told(raw: bytes, bodies: Bodies) -> ChatRequest | tuple[str, str, str | None]:
    """A request, or its refusal."""
    try:
        request = parse_chat(raw, bodies)
        bodies.keep(request.read)
        return request
    except ApiError as e:
        return e.message, e.code, e.param


def grown(*raws: bytes) -> list[int]:
    """How many messages of each body were read with an earlier one."""
    bodies, old = Bodies(), []
    for raw in raws:
        read = bodies.read(raw)
        assert (read.value, read.digest) == (orjson.loads(raw), hashlib.sha256(raw).hexdigest())
        bodies.keep(read)
        old.append(read.old)
    return old


def test_only_what_is_new_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies, history = Bodies(), [SYSTEM, USER]
    first = told(spell(history, tools=TOOLS), bodies)
    parsed: list[int] = []
    plain = orjson.loads
    monkeypatch.setattr(orjson, "loads", lambda raw: (parsed.append(len(raw)), plain(raw))[1])
    for turn in range(50):
        history += [ASSISTANT, {"role": "tool", "tool_call_id": "c0", "content": f"{turn}" * 100}]
        raw = spell(history, tools=TOOLS)
        again = told(raw, bodies)
        assert isinstance(first, ChatRequest) and isinstance(again, ChatRequest)
        assert again.messages == history and again.messages[0] is first.messages[0] and again.tools is first.tools
        assert again.digest == hashlib.sha256(raw).hexdigest()
        assert sum(parsed) < 1500, parsed
        parsed.clear()


def test_agents_that_take_turns_go_on_from_their_own() -> None:
    one, two = ([SYSTEM, {"role": "user", "content": name}] for name in "AB")
    bodies = [spell(history + [ASSISTANT, USER] * turn) for turn in range(3) for history in (one, two)]
    assert grown(*bodies) == [0, 0, 2, 2, 4, 4]
    fork = [spell([SYSTEM, USER]), spell([SYSTEM, USER, ASSISTANT]), spell([SYSTEM, USER, USER])]
    assert grown(*fork) == [0, 2, 0]


@pytest.mark.parametrize(
    ("first", "then", "old"),
    [
        ('{"messages":[{"a":1}]}', '{"messages":[{"a":1}]}', 1),
        ('{"messages":[{"a":1} ] }', '{"messages":[{"a":1}\n,\t{"b":2} ], "n":1}', 1),
        ('{"messages" : [ {"a":1}]}', '{"messages" : [ {"a":1}, {"b":"]"}],"stop":["]"],"x":[{}]}', 1),
        ('{"x":{"messages":[1]},"messages":[{"a":1}]}', '{"x":{"messages":[1]},"messages":[{"a":1},{}]}', 0),
        ('{"messages":[{"a":1}],"messages":[{"b":1}]}', '{"messages":[{"a":1},{}],"messages":[{"b":1}]}', 0),
        ('{"messages":[{"a":1}]}', '{"messages":[{"a":1},{}],"messages":[{"b":1}]}', 0),
        ('{"messages":[{"a":1}]}', '{"messages":[{"a":1},{}],"mess\\u0061ges":[{"b":1}]}', 0),
        ('{"messages":[{"a":1}]}', '{"messages":[{"a":2},{}]}', 0),
        ('{"messages":[]}', '{"messages":[]}', 0),
        ('["messages",{"messages":[{"a":1}]}]', '["messages",{"messages":[{"a":1},{}]}]', 0),
        ('{"messages":[{"a":{"messages":[{}]}}]}', '{"messages":[{"a":{"messages":[{}]}},{}]}', 1),
    ],
)
def test_a_body_goes_on_only_where_json_says_so(first: str, then: str, old: int) -> None:
    assert grown(first.encode(), then.encode()) == [0, old]


def test_nothing_is_kept_of_a_refused_body() -> None:
    bodies = Bodies()
    assert told(spell([USER, {"role": "judge"}]), bodies) == told(spell([USER, {"role": "judge"}]), bodies)
    assert bodies.read(spell([USER, USER])).old == 0


@pytest.mark.parametrize(
    "end", ["],[{}]}", ",]}", ",{}", "]", "}", "]}]", '],{"x":1}}', ',{"role":"user"]}', ",\xff]}", ""]
)
def test_what_is_no_json_behind_known_messages_is_refused_as_anywhere(end: str) -> None:
    bodies, begin = Bodies(), b'{"messages":[{"role":"user"}'
    told(begin + b"]}", bodies)
    refusal = told(begin + end.encode("latin-1"), bodies)
    assert refusal == told(begin + end.encode("latin-1"), Whole())
    assert isinstance(refusal, tuple) and refusal[1] == "invalid_json"


@pytest.mark.parametrize(("depth", "refused"), [(1021, False), (1022, True)])
def test_the_parsers_limit_on_depth_stays(depth: int, refused: bool) -> None:
    bodies, first = Bodies(), b'{"messages":[{"role":"user"}'
    told(first + b"]}", bodies)
    raw = first + b',{"role":"user","x":' + b"[" * depth + b"]" * depth + b"}]}"
    for seen in (bodies, Bodies()):
        answer = told(raw, seen)
        assert isinstance(answer, tuple) == refused
        assert not refused or "depth limit exceeded" in answer[0]  # type: ignore[index]


class Whole(Bodies):
    """Reads every body as a whole."""

    def read(self, raw: bytes) -> Body:
        return Body(orjson.loads(raw), hashlib.sha256(raw).hexdigest())


TEXT = st.text(st.sampled_from('ab"\\]}[{,: \n\té\U0001f600'), max_size=8) | st.sampled_from(['],"messages":[', "\\"])
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "tool", "assistant"])},
    optional={
        "content": TEXT | st.lists(st.fixed_dictionaries({"text": TEXT}), max_size=2),
        "name": st.recursive(TEXT | st.integers() | st.none(), lambda v: st.lists(v) | st.dictionaries(TEXT, v)),
        "tool_calls": st.just([CALL]),
    },
)
BAD = st.sampled_from([1, "x", None, [], {"role": "judge"}])
REST = st.fixed_dictionaries(
    {}, optional={"tools": st.just(TOOLS), "stop": st.just(["]", "x"]), "seed": st.integers(0, 9)}
)


def spelled(draw: st.DrawFn, items: list[tuple[str, Any]]) -> bytes:
    """A JSON object in some spelling, escapes and spaces as may be."""
    escaped, (comma, colon) = draw(st.booleans()), draw(st.sampled_from([(",", ":"), (" , ", "\n: ")]))
    values = (json.dumps(value, ensure_ascii=escaped, separators=(comma, colon)) for _, value in items)
    return f"{{{comma.join(f'{json.dumps(k)}{colon}{v}' for (k, _), v in zip(items, values, strict=True))}}}".encode()


@st.composite
def written(draw: st.DrawFn, messages: list[Any]) -> tuple[bytes, bytes]:
    """A body, parted behind its last message; now and then with messages twice, or a broken byte."""
    head, tail = draw(REST), draw(REST)
    extra = [("messages", draw(st.lists(MESSAGE, max_size=2)))] if draw(st.integers(0, 9)) == 0 else []
    late = draw(st.booleans())
    begin = spelled(draw, [*head.items(), *([] if late else extra), ("messages", messages)]).removesuffix(b"]}")
    end = b"]}" if not tail else b"]," + spelled(draw, [*(extra if late else []), *tail.items()])[1:]
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(begin) - 1))
        begin = begin[:at] + draw(st.sampled_from([b"", b"]", b"}", b'"', b"\xff", b"]}", b"\\"])) + begin[at + 1 :]
    return begin, end


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bodies_are_read_as_if_each_were_the_first(data: st.DataObject) -> None:
    bodies, history = Bodies(), data.draw(st.lists(MESSAGE, min_size=1, max_size=3))
    begin, end = data.draw(written(history))
    for _ in range(5):
        assert told(begin + end, bodies) == told(begin + end, Bodies()) == told(begin + end, Whole())
        kind = data.draw(st.sampled_from(["grow", "grow", "grow", "turn", "spell", "change", "bad"]))
        more = data.draw(st.lists(MESSAGE, max_size=2))
        history = [*history, *more]
        if kind == "grow":  # as most harnesses do: the same bytes up to the last message
            begin += b"".join(b" ,\n" + json.dumps(message).encode() for message in more)
        elif kind == "turn":
            end = data.draw(written(history))[1]
        elif kind == "change":
            history[data.draw(st.integers(0, len(history) - 1))] = data.draw(MESSAGE | BAD)
        if kind in ("spell", "change", "bad"):
            begin, end = data.draw(written(history + [data.draw(BAD)] * (kind == "bad")))
