"""The family of the nano model: `name{json}` calls back to back, assistant turns closed by <end>."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from occamy.capture.families.family import ParsedAnswer, ParsedCall, TemplateFamily

_NAME = re.compile(r"[a-z]+_[a-z]+")
_NEXT_CALL = re.compile(r"[a-z]+_[a-z]+\{")
_DECODER = json.JSONDecoder()


def parse_calls(text: str, tools: Sequence[Any] = ()) -> ParsedAnswer:
    """Read a turn as calls if it starts with a tool name, else as plain content.

    A named call whose arguments are not one JSON object is still a call and keeps its raw arguments, up to the next
    call: the tool answers it with a typed error.
    """
    calls: list[ParsedCall] = []
    at, size = 0, len(text)
    while at < size and (name := _NAME.match(text, at)):
        start = name.end()
        end = _object_end(text, start)
        if end < size and not _NEXT_CALL.match(text, end):
            following = _NEXT_CALL.search(text, end)
            end = following.start() if following else size
        calls.append(ParsedCall(name.group(), text[start:end]))
        at = end
    return ParsedAnswer(None, tuple(calls)) if calls else ParsedAnswer(text, ())


def _object_end(text: str, start: int) -> int:
    """Return where the JSON object at `start` ends, or `start` itself if there is none."""
    if not text.startswith("{", start):
        return start
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):  # also numbers and nesting beyond what Python reads
        return start


NANO = TemplateFamily(
    name="nano",
    template_digests=frozenset({"sha256:ed94792b80c174b3ca963316cf0419a8e0ad504c652639ed28ea64025132005e"}),
    closing="<end>",
    appendable=frozenset({"tool", "user"}),
    parse=parse_calls,
    header="<assistant>",
    control=frozenset({"<tools>", "<system>", "<user>", "<assistant>", "<tool>"}),
)
