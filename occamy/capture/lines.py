"""Settles, at the end, which line of turns each run is: after a fork a run is the line that the harness went on with.

A harness goes back to an earlier turn when an answer never reached it, or when it drops one. What it dropped becomes
the forked run; the line that it followed to the end keeps the name, and with it, in the root run, its loss.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from occamy.capture.turn import Turn

_ANEW = "tool_change"
"""What opened a segment whose prompt was rendered anew, though it goes on from an earlier turn."""
Lines = dict[str, list[Turn]]
"""Run -> its attempts, by ordinal and attempt."""


def settle(turns: Sequence[Turn]) -> list[Turn]:
    """Return all attempts by ordinal and attempt, the tails of forked runs swapped where the fork went on longer."""
    lines: Lines = {}
    for turn in sorted(turns, key=_place):
        lines.setdefault(turn.run, []).append(turn)
    answered = {(t.ordinal, t.attempt): t for t in turns}
    for run in reversed(list(lines)):
        first = lines[run][0]
        parent = answered.get(first.parent) if first.parent else None
        if parent is not None and parent.role == first.role:
            trunk = _run_of(lines, parent)
            if lines[run][-1].ordinal > lines[trunk][-1].ordinal:
                _swap(lines, trunk, run, parent, answered)
    return sorted((t for line in lines.values() for t in line), key=_place)


def _place(turn: Turn) -> tuple[int, int]:
    return turn.ordinal, turn.attempt


def _run_of(lines: Lines, turn: Turn) -> str:
    return next(run for run, line in lines.items() if any(_place(t) == _place(turn) for t in line))


def _swap(lines: Lines, trunk: str, fork: str, parent: Turn, answered: dict[tuple[int, int], Turn]) -> None:
    """Let the trunk go on after `parent` with what the fork holds, and the fork with what the trunk held there."""
    at = next(t.segment for t in lines[trunk] if t.ordinal == parent.ordinal)
    head = [t for t in lines[trunk] if t.ordinal <= parent.ordinal]
    tail = [t for t in lines[trunk] if t.ordinal > parent.ordinal]
    opens = lines[fork][0]
    first = at + (opens.opened_by == _ANEW)
    joins = [replace(t, run=trunk, summary=parent.summary, segment=first + t.segment) for t in lines[fork]]
    lines[trunk] = head + [_attached(t, parent) for t in joins]
    lines[fork] = [replace(t, run=fork, summary=opens.summary, segment=t.segment - at) for t in tail]
    for i, turn in enumerate(lines[fork]):
        if turn.ordinal == tail[0].ordinal:
            lines[fork][i] = _detached(turn, parent.ordinal, _prompt(head), answered)
    if not tail:
        del lines[fork]


def _attached(turn: Turn, parent: Turn) -> Turn:
    """A turn of a fork as one of the run that it forked from."""
    if turn.parent is None:
        return turn
    if turn.opened_by == _ANEW:
        return replace(turn, continues=parent.attempt, parent=None)
    delta = turn.delta[parent.prompt_tokens + len(parent.output) :]
    return replace(turn, continues=parent.attempt, parent=None, opened_by="", delta=delta)


def _detached(turn: Turn, after: int, prompt: array[int], answered: dict[tuple[int, int], Turn]) -> Turn:
    """A run's turn as the first of a fork after the turn of ordinal `after`, whose prompt is given."""
    parent = after, turn.continues
    if turn.opened_by:
        return replace(turn, continues=-1, parent=parent if turn.opened_by == _ANEW else None)
    delta = prompt + answered[parent].output + turn.delta
    return replace(turn, continues=-1, parent=parent, opened_by="branch", delta=delta)


def _prompt(line: Sequence[Turn]) -> array[int]:
    """P_t of the last turn of a run, put together from those before it."""
    ids, before = array("i"), line[0]
    outputs = {_place(t): t.output for t in line}
    for turn in line:
        if turn.opened_by:
            ids = turn.delta
        elif turn.ordinal != before.ordinal:
            ids = ids + outputs[before.ordinal, turn.continues] + turn.delta
        before = turn
    return ids
