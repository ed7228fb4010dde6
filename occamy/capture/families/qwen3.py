"""ChatML with JSON tool calls: Qwen2.5, Qwen3, Qwen3-Instruct-2507 and Qwen3-VL (text).

Consecutive tool results share one user block; a newline follows each <|im_end|>; Qwen3 drops earlier thinking.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from occamy.capture.families.blocks import block_end, read_turn
from occamy.capture.families.family import ParsedAnswer, ParsedCall, TemplateFamily

_SPACE = re.compile(r"\s*")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*')
_BRACE = re.compile(r"\s*\}")
_DECODER = json.JSONDecoder()


def parse_json_calls(text: str, tools: Sequence[Any] = ()) -> ParsedAnswer:
    """Read ``<think>`` reasoning, content and ``<tool_call>{"name": …, "arguments": …}</tool_call>`` blocks.

    A named call whose arguments are not JSON is still a call and keeps them raw: the tool answers it with a typed
    error.
    """
    return read_turn(text, _read_call)


def _read_call(text: str, at: int) -> tuple[ParsedCall, int] | None:
    """Read one JSON call; its arguments keep their spelling."""
    if (head := _HEAD.match(text, at)) is None:
        return _read_other_order(text, at)
    start = head.end()
    try:
        end = _DECODER.raw_decode(text, start)[1]
        brace = _BRACE.match(text, end)
    except (ValueError, RecursionError):  # also numbers and nesting beyond what Python reads
        brace = None
    if brace:
        return ParsedCall(head[1], text[start:end]), brace.end()
    end = block_end(text, start)
    return ParsedCall(head[1], text[start:end]), end


def _read_other_order(text: str, at: int) -> tuple[ParsedCall, int] | None:
    space = _SPACE.match(text, at)
    try:
        call, end = _DECODER.raw_decode(text, space.end() if space else at)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    read = ParsedCall(call["name"], json.dumps(call.get("arguments", {}), ensure_ascii=False))
    try:
        "".join(read).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no answer can carry
        return None
    return read, end


QWEN3 = TemplateFamily(
    name="qwen3",
    # As published with the models and shipped in trl 1.16 (trl/chat_templates).
    template_digests=frozenset(
        {
            "sha256:cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f",  # Qwen2.5
            "sha256:a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",  # Qwen3
            "sha256:64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326",  # Qwen3-Instruct-2507
            "sha256:3636d0f0bd6bef02654cdffdc447b79cb2cef8ab02cc75267345946291a489e4",  # Qwen3-VL
        }
    ),
    closing="<|im_end|>",
    appendable=frozenset({"tool", "user"}),
    parse=parse_json_calls,
    header="<|im_start|>assistant\n",
    control=frozenset({"<|im_start|>"}),
    delimiters=frozenset({"<tool_response>", "</tool_response>"}),
    stops=("<|endoftext|>",),
    arguments="object",
)
