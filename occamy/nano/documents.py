"""Pretraining documents as token ids with a target mask, and how text becomes one."""

from __future__ import annotations

import json
import re

from occamy.nano.vocabulary import PATTERN, TOKENS

Document = tuple[list[int], list[int]]
"""(token ids, mask): only positions with mask 1 are targets."""

LAST_INT = 99
"""Largest whole number that is one token."""

_ID_OF = {t: i for i, t in enumerate(TOKENS)}
_SPLIT = re.compile(PATTERN)
_UNKNOWN = _ID_OF["<unk>"]


def encode(text: str) -> list[int]:
    """Encode text as the shipped tokenizer does (tested equal), without its overhead."""
    return [_ID_OF.get(t, _UNKNOWN) for t in _SPLIT.findall(text)]


def dump(value: object) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def compose(parts: list[tuple[str, bool]]) -> Document:
    """Join (text, is a target) parts into one document."""
    ids: list[int] = []
    mask: list[int] = []
    for text, target in parts:
        tokens = encode(text)
        ids += tokens
        mask += [int(target)] * len(tokens)
    return ids, mask
