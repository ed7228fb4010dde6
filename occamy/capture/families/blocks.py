"""Qwen turns: one <think> block at the head, then text and <tool_call> blocks. Families bring the reader of a call."""

from __future__ import annotations

import re
from collections.abc import Callable

from occamy.capture.families.family import ParsedAnswer, ParsedCall

ReadCall = Callable[[str, int], tuple[ParsedCall, int] | None]
"""(text, where a block's inside starts) -> (the call, where it ends), or None when the block names no call."""

_OPEN = "<tool_call>"
_CLOSE = re.compile(r"\s*</tool_call>")
_ANY_END = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)")


def read_turn(text: str, read_call: ReadCall) -> ParsedAnswer:
    """Split a turn into reasoning, calls and the content around them. A block that names no call stays content.

    The whitespace between the parts belongs to none of them.
    """
    reasoning, said = _split_thinking(text)
    calls: list[ParsedCall] = []
    outside: list[str] = []
    kept = at = 0
    while (start := said.find(_OPEN, at)) >= 0:
        at = start + len(_OPEN)
        if found := read_call(said, at):
            calls.append(found[0])
            outside.append(said[kept:start])
            close = _CLOSE.match(said, found[1])
            kept = at = close.end() if close else found[1]
    if not calls:
        return ParsedAnswer(said, (), reasoning)
    outside.append(said[kept:])
    content = "".join(part for part in outside if part.strip())
    return ParsedAnswer(content.rstrip() or None, tuple(calls), reasoning)


def block_end(text: str, at: int) -> int:
    """Return where a block that cannot be read ends: before its closing tag, the next block or the end of the text."""
    end = _ANY_END.search(text, at)
    return end.start() if end else len(text)


def _split_thinking(text: str) -> tuple[str | None, str]:
    """Return (reasoning, the text after it). Reasoning that was cut off goes to the end; an empty block is none."""
    inside = text.lstrip()
    if not inside.startswith("<think>"):
        return None, text
    reasoning, _, rest = inside.removeprefix("<think>").partition("</think>")
    return reasoning.strip() or None, rest.lstrip("\n")
