"""ChatML with calls of named parameters: Qwen3.5, Qwen3.6 and Qwen3.8.

The generation prompt opens (or closes, for models that do not think) the reasoning block. Parameters carry no types:
they are read with the request's tool schemas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from occamy.capture.families.blocks import block_end, read_turn
from occamy.capture.families.family import ParsedAnswer, ParsedCall, TemplateFamily

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)",
    re.DOTALL,
)
_END = re.compile(r"\s*</function>")
_PYTHON = {"True": True, "False": False, "None": None}
"""Qwen3.5's template spells these values so."""


def parse_parameter_calls(text: str, tools: Sequence[Any] = ()) -> ParsedAnswer:
    """Read reasoning, content and ``<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`` blocks.

    A value becomes what `tools` declare for it if it reads as that, else it stays text. A named call whose parameters
    are not well formed keeps them raw as arguments: the tool answers it with a typed error.
    """
    return read_turn(text, lambda said, at: _read_call(said, at, tools))


def _read_call(text: str, at: int, tools: Sequence[Any]) -> tuple[ParsedCall, int] | None:
    function = _FUNCTION.match(text, at)
    if function is None:
        return None
    name, end = function[1], function.end()
    properties = _properties(name, tools)
    values: dict[str, Any] = {}
    while found := _PARAMETER.match(text, end):
        values[found[1]] = _value(found[2], _types(properties.get(found[1])))
        end = found.end()
    if closed := _END.match(text, end):
        try:
            return ParsedCall(name, orjson.dumps(values).decode()), closed.end()
        except orjson.JSONEncodeError:  # nested deeper than it writes
            pass
    end = block_end(text, function.end())
    return ParsedCall(name, text[function.end() : end].lstrip("\n")), end


def _properties(name: str, tools: Sequence[Any]) -> Mapping[str, Any]:
    """Return the declared parameters of a tool, empty if there are none or it is unknown."""
    for tool in tools:
        if tool["function"].get("name") == name:
            properties = (tool["function"].get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _types(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows by name, alternatives included; empty if it names none."""
    return frozenset(_named_types(schema)) if isinstance(schema, dict) else frozenset()


def _named_types(schema: Mapping[str, Any]) -> Iterator[str]:
    kind = schema.get("type")
    yield from [kind] if isinstance(kind, str) else kind or []
    for alternative in [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        yield from _named_types(alternative)


def _value(text: str, types: frozenset[str]) -> Any:
    """Read a value as one of the declared types that is not string, if it is one."""
    if not types - {"string"}:
        return text
    try:
        value = _PYTHON[text] if text in _PYTHON else orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if _type_names(value) & types else text


def _type_names(value: Any) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number"})
        case list():
            return frozenset({"array"})
        case dict():
            return frozenset({"object"})
    return frozenset()


QWEN35 = TemplateFamily(
    name="qwen3.5",
    # As published with the models and shipped in trl 1.16 (trl/chat_templates).
    template_digests=frozenset(
        {
            "sha256:a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",  # Qwen3.5, 4B and larger
            "sha256:273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80",  # Qwen3.5, 2B and smaller
            "sha256:e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259",  # Qwen3.6
            "sha256:c3cf9e34abf4f9e36c2d72165aa9c132d3e2a725b6c2586aaa3a8af9d7a81041",  # Qwen3.8
        }
    ),
    closing="<|im_end|>",
    appendable=frozenset({"tool", "user"}),
    parse=parse_parameter_calls,
    header="<|im_start|>assistant\n",
    control=frozenset({"<|im_start|>"}),
    delimiters=frozenset({"<tool_response>", "</tool_response>"}),
    stops=("<|endoftext|>",),
    arguments="object",
)
