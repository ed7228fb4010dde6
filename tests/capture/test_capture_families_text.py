"""Sampled text to reasoning, content and calls, whatever the policy wrote."""

from __future__ import annotations

import pytest

from occamy.capture.families.llama3 import parse_bare_call
from occamy.capture.families.qwen3 import parse_json_calls
from occamy.capture.families.qwen35 import parse_parameter_calls

Calls = list[tuple[str, str]]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("done", None, "done"),
        ("", None, ""),
        ("<think>\nwhy\n</think>\n\ndone", "why", "done"),
        ("<think>\n\n</think>\n\ndone", None, "done"),
        ("<think>\ncut off", "cut off", ""),
        ("done <think>late</think>", None, "done <think>late</think>"),
        ("<think>a <think> b</think>done</think>", "a <think> b", "done</think>"),
        ("why</think>done", None, "why</think>done"),
    ],
)
def test_thinking_at_the_head_is_reasoning(text: str, reasoning: str | None, content: str) -> None:
    assert parse_json_calls(text) == parse_parameter_calls(text) == (content, (), reasoning)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "get", "arguments": {"n": 1}}\n</tool_call>', None, [("get", '{"n": 1}')]),
        ('I look.\n<tool_call>{"name":"get","arguments":{"n":1}}</tool_call>', "I look.", [("get", '{"n":1}')]),
        (
            '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "put", "arguments": {"t": "</tool_call><tool_call>"}}\n</tool_call>',
            None,
            [("get", "{}"), ("put", '{"t": "</tool_call><tool_call>"}')],
        ),
        ('<tool_call>\n{"arguments": {"n": 1}, "name": "get"}\n</tool_call>', None, [("get", '{"n": 1}')]),
        ('<tool_call>\n{"name": "get"}\n</tool_call>', None, [("get", "{}")]),
        ('<tool_call>\n{"name": "get", "arguments": {"n": 1', None, [("get", '{"n": 1')]),
        ('<tool_call>\n{"name": "get", "arguments": {"n": 1}', None, [("get", '{"n": 1}')]),
        ('<tool_call>\n{"name": "get", "arguments": {"n": x}}\n</tool_call>', None, [("get", '{"n": x}}')]),
        (
            '<tool_call>{"name": "get", "arguments": {"n": <tool_call>{"name": "put", "arguments": {}}</tool_call>',
            None,
            [("get", '{"n":'), ("put", "{}")],
        ),
        ('<tool_call>{"name": "get", "arguments": {}}</tool_call> so far', " so far", [("get", "{}")]),
        ("<tool_call>get me that</tool_call>", "<tool_call>get me that</tool_call>", []),
        ("<tool_call>", "<tool_call>", []),
        ('<tool_call>[1]</tool_call><tool_call>{"n": 1}</tool_call>', "all", []),
        ('{"name": "get", "arguments": {}}', "all", []),
        ('<tool_call>{"arguments": {"t": "\\ud800"}, "name": "get"}</tool_call>', "all", []),
        ('<tool_call>{"name": "get", "arguments": {"t": "\\ud800"}}</tool_call>', None, [("get", '{"t": "\\ud800"}')]),
        ("<tool_call>" + '{"name": "get", "arguments": ' + "[" * 5000, None, [("get", "[" * 5000)]),
    ],
)
def test_qwen3_calls_are_json_blocks(text: str, content: str | None, calls: Calls) -> None:
    said = parse_json_calls(text)
    assert (said.content, [tuple(c) for c in said.calls]) == (text if content == "all" else content, calls)


DEEP = "[" * 300 + "]" * 300
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "put",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "n": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "flag": {"type": "boolean"},
                    "rows": {"type": "array"},
                    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "either": {"type": ["string", "integer"]},
                    "free": {"description": "anything"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "bare"}},
]


def _put(key: str, value: str) -> str:
    return f"<tool_call>\n<function=put>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "value", "arguments"),
    [
        ("text", "1", '{"text":"1"}'),
        ("text", "\nline\n\n", '{"text":"\\nline\\n\\n"}'),
        ("text", "", '{"text":""}'),
        ("text", "<b></parameter> and </b>", '{"text":"<b></parameter> and </b>"}'),
        ("n", "1", '{"n":1}'),
        ("n", "1.5", '{"n":"1.5"}'),
        ("n", "many", '{"n":"many"}'),
        ("n", "true", '{"n":"true"}'),
        ("ratio", "1", '{"ratio":1}'),
        ("ratio", "1.5", '{"ratio":1.5}'),
        ("flag", "true", '{"flag":true}'),
        ("flag", "False", '{"flag":false}'),
        ("flag", "1", '{"flag":"1"}'),
        ("rows", '["a",1]', '{"rows":["a",1]}'),
        ("maybe", "None", '{"maybe":null}'),
        ("maybe", "3", '{"maybe":3}'),
        ("either", "3", '{"either":3}'),
        ("either", "three", '{"either":"three"}'),
        ("free", "3", '{"free":"3"}'),
        ("unknown", "3", '{"unknown":"3"}'),
    ],
)
def test_qwen35_values_are_what_their_tool_declares(key: str, value: str, arguments: str) -> None:
    assert parse_parameter_calls(_put(key, value), TOOLS) == (None, (("put", arguments),), None)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            "I look.\n\n" + _put("n", "1") + "\n" + _put("n", "2"),
            "I look.",
            [("put", '{"n":1}'), ("put", '{"n":2}')],
        ),
        ("<tool_call>\n<function=bare>\n</function>\n</tool_call>", None, [("bare", "{}")]),
        ("<tool_call><function=bare></function></tool_call>", None, [("bare", "{}")]),
        ("<tool_call><function=put><parameter=n>1</parameter></function></tool_call>", None, [("put", '{"n":1}')]),
        ("<tool_call>\n<function=put>\n<parameter=n>\n1", None, [("put", "<parameter=n>\n1")]),
        (
            "<tool_call>\n<function=put>\n<parameter=n>\n1\n</parameter>\n",
            None,
            [("put", "<parameter=n>\n1\n</parameter>")],
        ),
        ("<tool_call>\n<function=put>\nn = 1\n</function>\n</tool_call>", None, [("put", "n = 1\n</function>")]),
        (_put("rows", DEEP), None, [("put", f"<parameter=rows>\n{DEEP}\n</parameter>\n</function>")]),
        (_put("n", "1") + "\nso far", "\nso far", [("put", '{"n":1}')]),
        ("<tool_call>\nput n=1\n</tool_call>", "all", []),
        ('<tool_call>{"name": "put", "arguments": {}}</tool_call>', "all", []),
    ],
)
def test_qwen35_calls_are_parameter_blocks(text: str, content: str | None, calls: Calls) -> None:
    said = parse_parameter_calls(text, TOOLS)
    assert (said.content, [tuple(c) for c in said.calls]) == (text if content == "all" else content, calls)


def test_qwen35_calls_without_tools_carry_text() -> None:
    assert parse_parameter_calls(_put("n", "1")).calls == (("put", '{"n":"1"}'),)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "get", "parameters": {"n": 1}}', None, [("get", '{"n": 1}')]),
        ('<|python_tag|>{"name": "get", "parameters": {}}', None, [("get", "{}")]),
        ('\n{"name":"get","arguments":{"n":1}} ', None, [("get", '{"n":1}')]),
        ('{"name": "get", "parameters": {"n": 1', None, [("get", '{"n": 1')]),
        ('{"name": "get", "parameters": {}}; {"name": "put"}', None, [("get", '{}}; {"name": "put"}')]),
        ("done", "done", []),
        ('I call {"name": "get", "parameters": {}}', "all", []),
        ('{"tier": "gold"}', "all", []),
    ],
)
def test_llama3_calls_are_one_bare_object(text: str, content: str | None, calls: Calls) -> None:
    said = parse_bare_call(text)
    assert (said.content, [tuple(c) for c in said.calls]) == (text if content == "all" else content, calls)
