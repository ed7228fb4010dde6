"""What a harness is shown of an answer that a stop string ended. Pure; the record keeps every sampled id."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return what comes before the first place where one of `stop` begins; all of it where none does."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


def tokens_before_stop(ids: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int:
    """Return how many leading ids say nothing of a stop string, nor of what comes after its beginning."""
    text = decode(ids) if stop else ""
    shown = before_stop(text, stop)
    if shown == text:
        return len(ids)
    return bisect_right(range(len(ids) + 1), len(shown), key=lambda size: len(decode(ids[:size]))) - 1
