"""Recognises declared rewrites: which history a request's messages come from, and what the harness did to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from occamy.capture.messages import PRINT, SYSTEM, TRAILER, GivenCall, Message, is_marked
from occamy.contracts.capture import CaptureRules, RewriteKind


@dataclass(frozen=True, slots=True)
class Rewrite:
    """How a request was made from a history."""

    kind: RewriteKind
    kept: int
    """Messages of the history that it still holds, cut ones included."""


def recognise(
    known: Sequence[bytes],
    answer: bytes | None,
    messages: Sequence[Message],
    prints: Sequence[bytes],
    *,
    rules: CaptureRules,
    given: Mapping[str, GivenCall],
    appendable: frozenset[str],
) -> Rewrite | None:
    """Explain a request as a declared rewrite of a history.

    `known` are the fingerprints of the history's last request and `answer` that of its answer, if any. The request
    must keep the system message and the order of what it keeps; everything else in it is a declared summary, a message
    cut as declared, or new and at the end. Without a new summary only trailers may be missing. Returns None if it is
    anything else.
    """
    history = [*known, answer] if answer else list(known)
    places = [p[: PRINT // 2] for p in history]
    if places and places[0] == SYSTEM and prints[0] != history[0]:
        return None
    at = kept = summaries = cut = 0
    missing: list[int] = []
    ended = False
    for message, print_ in zip(messages, prints, strict=True):
        summary = is_marked(message, rules.summaries)
        found = _find(history, print_, at)
        if found is None and (summary or is_marked(message, rules.pruned) or _has_cut_calls(message, rules, given)):
            altered = _find(places, print_[: PRINT // 2], at)
            if not summary and altered is None:
                return None
            summaries, cut = summaries + summary, cut + (not summary)
            if not summary or _has_id(message):
                found = altered
            if found is None:
                continue
        if found is None:
            if message["role"] not in appendable:
                return None
            ended = True
            continue
        if ended:
            return None
        missing += range(at, found)
        at, kept = found + 1, kept + 1
    missing += range(at, len(known))
    if summaries:
        return Rewrite("summary_replacement", kept)
    only_trailers = all(places[i] == TRAILER for i in missing)
    return Rewrite("history_pruning", kept) if only_trailers and (cut or missing) else None


def overlap(known: Sequence[bytes], prints: Sequence[bytes]) -> int:
    """Return how many messages of a history a request holds, in order."""
    at = count = 0
    for print_ in prints:
        found = _find(known, print_, at)
        if found is not None:
            at, count = found + 1, count + 1
    return count


def _find(prints: Sequence[bytes], wanted: bytes, start: int) -> int | None:
    try:
        return prints.index(wanted, start)
    except ValueError:
        return None


def _has_id(message: Message) -> bool:
    """True if a message's place names it, so that it can be found whatever it says."""
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _has_cut_calls(message: Message, rules: CaptureRules, given: Mapping[str, GivenCall]) -> bool:
    """True for an assistant turn whose calls are ours, whole or with arguments cut as declared."""
    calls = message.get("tool_calls")
    if message["role"] != "assistant" or not calls or not rules.cut_arguments:
        return False
    return all(
        (known := given.get(call.get("id") or "")) is not None
        and (known.is_echoed_by(call["function"]) or known.is_cut_to(call["function"], rules.cut_arguments))
        for call in calls
    )
