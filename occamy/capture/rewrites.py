"""Recognises declared rewrites: which history a request's messages come from, and what the harness did to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from occamy.capture.messages import PRINT, SYSTEM, TRAILER, GivenCall, Message, is_marked
from occamy.contracts.capture import CaptureRules, RewriteKind


def recognise(
    known: Sequence[bytes],
    answered: int,
    messages: Sequence[Message],
    prints: Sequence[bytes],
    *,
    rules: CaptureRules,
    given: Mapping[str, GivenCall],
    appendable: frozenset[str],
) -> RewriteKind | None:
    """Explain a request as a declared rewrite of a history.

    `known` are the fingerprints of the history's last request; message `answered` is the answer to that, -1 if the
    request does not hold it. The request must keep the system message and the order of what it keeps; everything else
    in it is a declared summary, a message cut as declared, or new and at the end. Without a summary only trailers may
    be missing, and the answer where trailers came in its place. Returns None if it is anything else.
    """
    places = [p[: PRINT // 2] for p in known]
    if places and places[0] == SYSTEM and prints[0] != known[0]:
        return None
    end = answered if answered >= 0 else len(messages)
    after = messages[end + 1 :]
    summaries = sum(is_marked(m, rules.summaries) for m in after)
    at = cut = same = 0
    missing: list[int] = []
    new: list[Message] = []
    for message, print_ in zip(messages[:end], prints, strict=False):
        found = _find(known, print_, at)
        if found is None or (new and message["role"] == "user"):
            summary = is_marked(message, rules.summaries)
            found = _find(places, print_[: PRINT // 2], at) if _is_altered(message, rules, given) else None
            summaries, cut = summaries + summary, cut + (found is not None and not summary)
            if found is None:
                new += [] if summary else [message]
                continue
        if new:
            return None
        missing += range(at, found)
        at = found + 1
        same += is_marked(message, rules.summaries)
    if (new and answered >= 0) or any(m["role"] not in appendable for m in (*new, *after)):
        return None
    missing += range(at, len(known))
    if summaries or (same and not all(places[i] == TRAILER for i in missing)):  # a summary may say the same again
        return "summary_replacement"
    dropped = bool(new) and all(is_marked(m, rules.trailers) for m in new)
    return "history_pruning" if (cut or missing or dropped) and all(places[i] == TRAILER for i in missing) else None


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


def _is_altered(message: Message, rules: CaptureRules, given: Mapping[str, GivenCall]) -> bool:
    """True if a message may stand, changed as declared, in the place of one that was sent before."""
    named = message["role"] == "tool" or bool(message.get("tool_calls"))
    if is_marked(message, rules.pruned) or (named and is_marked(message, rules.summaries)):
        return True
    calls = message.get("tool_calls")
    if not calls or not rules.cut_arguments:
        return False
    return all(
        (known := given.get(call.get("id") or "")) is not None
        and (known.is_echoed_by(call["function"]) or known.is_cut_to(call["function"], rules.cut_arguments))
        for call in calls
    )
