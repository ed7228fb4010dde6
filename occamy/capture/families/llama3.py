"""Llama 3.1, 3.2 and 3.3: header tokens, <|eot_id|>, one bare JSON call per turn, tool results as `ipython`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from occamy.capture.families.family import ParsedAnswer, ParsedCall, TemplateFamily

_HEAD = re.compile(r'\s*(?:<\|python_tag\|>)?\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:parameters|arguments)"\s*:\s*')
_DECODER = json.JSONDecoder()


def parse_bare_call(text: str, tools: Sequence[Any] = ()) -> ParsedAnswer:
    """Read a turn that is one ``{"name": …, "parameters": …}`` object, <|python_tag|> before it or not, as a call.

    A named call whose parameters are not JSON is still a call and keeps them raw: the tool answers it with a typed
    error. All other text, also an object amid prose, is plain content.
    """
    head = _HEAD.match(text)
    if head is None:
        return ParsedAnswer(text, ())
    raw = text[head.end() :].rstrip()
    try:
        end = _DECODER.raw_decode(raw)[1]
    except (ValueError, RecursionError):  # also numbers and nesting beyond what Python reads
        return ParsedAnswer(None, (ParsedCall(head[1], raw),))
    return ParsedAnswer(None, (ParsedCall(head[1], raw[:end] if raw[end:].strip() == "}" else raw),))


LLAMA3 = TemplateFamily(
    name="llama3",
    # As published with the models and shipped in trl 1.16 (trl/chat_templates).
    template_digests=frozenset(
        {
            "sha256:e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65",  # Llama 3.1 and 3.3
            "sha256:5816fce10444e03c2e9ee1ef8a4a1ea61ae7e69e438613f3b17b69d0426223a4",  # Llama 3.2
        }
    ),
    closing="<|eot_id|>",
    appendable=frozenset({"tool", "user"}),
    parse=parse_bare_call,
    header="<|start_header_id|>assistant<|end_header_id|>\n\n",
    control=frozenset({"<|start_header_id|>", "<|end_header_id|>"}),
    stops=("<|eom_id|>", "<|end_of_text|>"),
    arguments="object",
    # Llama 3.2 prints today's date unless told: the same seed would not give the same episode tomorrow. This is
    # Llama 3.1's own default.
    variables={"date_string": "26 Jul 2024"},
)
