"""Canonical form of chat messages and their hash chain: what makes two requests share a history."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

Message = dict[str, Any]

_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


class GivenCall:
    """A tool call as the proxy handed it out; recognises its echo whatever the harness did to the JSON text."""

    __slots__ = ("_value", "name")

    def __init__(self, name: str, arguments: str) -> None:
        self.name = name
        self._value = _json_or_none(arguments)

    def is_echoed_by(self, function: Mapping[str, Any]) -> bool:
        """True if name and argument values agree. Key order, spaces and escapes may differ; arguments that were
        never valid JSON may have been repaired by the harness into anything."""
        if function.get("name") != self.name:
            return False
        return self._value is None or _json_or_none(function.get("arguments") or "") == self._value


def _json_or_none(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def canonical_message(message: Message, given: Mapping[str, GivenCall]) -> bytes:
    """Return the bytes that identify a message in a history.

    An assistant turn with tool calls is its call ids (those in `given`, unaltered); without, its text with thinking
    and outer whitespace removed. Other turns are role, tool-call id and exact text.
    """
    role = message["role"]
    if role == "assistant":
        if calls := message.get("tool_calls"):
            return orjson.dumps(["calls", [_canonical_call(call, given) for call in calls]])
        text = message.get("content") or ""
        if "<think>" in text:
            text = _THINKING.sub("", text)
        return orjson.dumps(["text", text.strip()])
    return orjson.dumps([role, message.get("tool_call_id"), message.get("content")])


def _canonical_call(call: Mapping[str, Any], given: Mapping[str, GivenCall]) -> Any:
    known = given.get(call.get("id") or "")
    if known is not None and known.is_echoed_by(call["function"]):
        return call["id"]
    function = call["function"]
    return ["foreign", call.get("id"), function.get("name"), function.get("arguments")]


def extend_chain(link: bytes, messages: Sequence[Message], given: Mapping[str, GivenCall]) -> list[bytes]:
    """Return one 16-byte digest per message, each over the link before it and the message."""
    links = []
    for message in messages:
        link = hashlib.blake2b(link + canonical_message(message, given), digest_size=16).digest()
        links.append(link)
    return links


def chain_seed(role: str, tools: Sequence[Any]) -> bytes:
    """Return the first link: histories under other tools or another URL role never meet."""
    text = role.encode() + b"\0" + orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(text, digest_size=16).digest()
