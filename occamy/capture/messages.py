"""Canonical form of chat messages: what makes an echo the same message, and two requests share a history."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from occamy.contracts.capture import CaptureRules, Marked

Message = dict[str, Any]

PRINT = 32
"""Bytes of a fingerprint: 16 for the message's place, 16 for what it says."""

_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


class GivenCall:
    """A tool call as the proxy handed it out; recognises its echo whatever the harness did to the JSON text."""

    __slots__ = ("arguments", "name")

    def __init__(self, name: str, arguments: str) -> None:
        self.name, self.arguments = name, arguments

    def is_echoed_by(self, function: Mapping[str, Any]) -> bool:
        """True if name and argument values agree. Key order, spaces, escapes and the spelling of numbers may differ;
        arguments that were never valid JSON may have been repaired by the harness into anything."""
        if function.get("name") != self.name:
            return False
        echo = function.get("arguments") or ""
        if echo == self.arguments or (given := _json_or_none(self.arguments)) is None:
            return True
        said = _json_or_none(echo)
        try:
            return said is not None and (said == given or _coarse(echo) == _coarse(self.arguments))
        except RecursionError:  # nested deeper than Python compares
            return False

    def is_cut_to(self, function: Mapping[str, Any], end: str) -> bool:
        """True if the arguments agree but for strings that were cut and now end in `end`."""
        echo = _json_or_none(function.get("arguments") or "")
        try:
            return function.get("name") == self.name and _is_cut(_json_or_none(self.arguments), echo, end)
        except RecursionError:
            return False


def _json_or_none(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _coarse(text: Any) -> Any:
    """Arguments with all numbers as JavaScript holds them: 64-bit floats."""
    return json.loads(text if isinstance(text, str) else orjson.dumps(text), parse_int=float)


def _is_cut(given: Any, echo: Any, end: str) -> bool:
    if isinstance(given, str) and isinstance(echo, str):
        return given == echo or (echo.endswith(end) and given.startswith(echo.removesuffix(end)))
    if isinstance(given, dict) and isinstance(echo, dict):
        return given.keys() == echo.keys() and all(_is_cut(v, echo[k], end) for k, v in given.items())
    if isinstance(given, list) and isinstance(echo, list):
        return len(given) == len(echo) and all(_is_cut(a, b, end) for a, b in zip(given, echo, strict=True))
    return bool(given == echo)


def is_marked(message: Message, marks: Iterable[Marked]) -> bool:
    """True if a message begins and ends as one of the marks says."""
    role, text = message["role"], message.get("content") or ""
    return any(role == m.role and text.startswith(m.starts or "") and text.endswith(m.ends or "") for m in marks)


def fingerprint(message: Message, given: Mapping[str, GivenCall], rules: CaptureRules) -> bytes:
    """Return the 32 bytes that identify a message in a history; the first 16 name its place, whatever it says there.

    An assistant turn with tool calls is its call ids (those in `given`, their arguments unaltered); without, its text
    with thinking and outer whitespace removed. Of tool calls the place is the ids, of a tool result its call id, of a
    declared trailer that it is one, of any other message its role.
    """
    role, text = message["role"], message.get("content") or ""
    place: list[Any] = [role]
    said: Any = text
    if role == "assistant" and (calls := message.get("tool_calls")):
        place = ["calls", *(call.get("id") for call in calls)]
        summary = text if is_marked(message, rules.summaries) else ""
        said = [summary, *(_altered(call, given) for call in calls)]
    elif role == "assistant":
        said = (_THINKING.sub("", text) if "<think>" in text else text).strip()
    elif role == "tool":
        place = ["tool", message.get("tool_call_id")]
    elif is_marked(message, rules.trailers):
        place = ["trailer"]
    return _digest(orjson.dumps(place)) + _digest(orjson.dumps(said))


def result_place(call_id: str) -> bytes:
    """Return the first 16 bytes of the fingerprint of a tool result, known by its call id."""
    return _digest(orjson.dumps(["tool", call_id]))


def _altered(call: Mapping[str, Any], given: Mapping[str, GivenCall]) -> Any:
    """None for a call as it was handed out, else what it says."""
    known = given.get(call.get("id") or "")
    function = call["function"]
    if known is not None and known.is_echoed_by(function):
        return None
    return [function.get("name"), function.get("arguments")]


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=PRINT // 2).digest()


SYSTEM = _digest(orjson.dumps(["system"]))
"""Place of system messages."""
TRAILER = _digest(orjson.dumps(["trailer"]))
"""Place of declared trailers."""


def extend_chain(link: bytes, prints: Iterable[bytes]) -> list[bytes]:
    """Return one 16-byte digest per fingerprint, each over the link before it and the fingerprint. The chain of a
    history starts from the empty link."""
    links = []
    for print_ in prints:
        link = _digest(link + print_)
        links.append(link)
    return links


def digest_tools(tools: Sequence[Any]) -> bytes:
    """Return 16 bytes that identify a tool list."""
    return _digest(orjson.dumps(tools, option=orjson.OPT_SORT_KEYS))
