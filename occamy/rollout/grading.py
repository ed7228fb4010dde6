"""The grader: pure functions of a contract, the frozen final state and the dispatcher's log. No world, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from occamy.contracts.task import CallLogged, FieldEquals, FileEquals, Goal, RecordCreated, TaskContract
from occamy.worlds.tools import is_write
from occamy.worlds.world import Event


@dataclass(frozen=True)
class Grade:
    """How an attempt was judged."""

    score: float
    """Weighted share of goals met, in [0, 1]; 0 after a forbidden effect."""
    success: bool
    """Completed, and the score reached the contract's threshold."""
    goals_met: tuple[bool, ...]
    """One per goal, in the contract's order."""
    forbidden: tuple[str, ...]
    """State changes that no goal asks for, as ``crm A01.tier``, ``orders F03 created`` or ``file memo``, sorted."""


def grade(
    contract: TaskContract, state: dict[str, Any], events: Sequence[Event], answer: str, completed: bool
) -> Grade:
    """Judge a finished attempt.

    `state` has the form of ``World.state()``. The wording of `answer` earns nothing: only effects and evidence do.
    Writing a wrong value where a goal wants a change leaves the goal unmet and is not forbidden.
    """
    new = _new_records(contract, state)
    met = [_met(goal, state, events, new) for goal in contract.grading.goals]
    forbidden = () if contract.grading.allow_other_changes else _forbidden(contract, state, new)
    weights = [goal.weight for goal in contract.grading.goals]
    share = sum(w for w, ok in zip(weights, met, strict=True) if ok) / sum(weights)
    score = 0.0 if forbidden else share
    return Grade(score, completed and score >= contract.grading.pass_threshold, tuple(met), forbidden)


_Key = tuple[str, str]
_Records = dict[_Key, dict[str, Any]]


def _new_records(contract: TaskContract, state: dict[str, Any]) -> _Records:
    return {
        (service, key): row
        for service, rows in state["services"].items()
        for key, row in rows.items()
        if key not in contract.world.records.get(service, {})
    }


def _met(goal: Goal, state: dict[str, Any], events: Sequence[Event], unclaimed: _Records) -> bool:
    """Whether a goal holds; a record that meets a RecordCreated goal is taken out of `unclaimed`."""
    match goal:
        case FieldEquals():
            row = state["services"].get(goal.service, {}).get(goal.id, {})
            return bool(row.get(goal.field) == goal.value)
        case RecordCreated():
            for (service, key), row in unclaimed.items():
                if service == goal.service and row == goal.fields:
                    del unclaimed[service, key]
                    return True
            return False
        case FileEquals():
            text = state["files"].get(goal.path)
            return text is not None and text.strip() == goal.text.strip()
        case CallLogged():
            return _logged(goal, events)
    assert_never(goal)


def _logged(goal: CallLogged, events: Sequence[Event]) -> bool:
    writes = [event.ordinal for event in events if event.ok and is_write(event.name)]
    if goal.after_last_write and not writes:
        return False
    since = writes[-1] if goal.after_last_write else -1
    call = goal.call
    return any(e.ok and e.ordinal > since and e.name == call.name and e.arguments == call.arguments for e in events)


def _forbidden(contract: TaskContract, state: dict[str, Any], unclaimed: _Records) -> tuple[str, ...]:
    goals = contract.grading.goals
    cells = {(g.service, g.id, g.field) for g in goals if isinstance(g, FieldEquals)}
    files = {g.path for g in goals if isinstance(g, FileEquals)}
    changes = [f"{service} {key} created" for service, key in unclaimed]
    for service, rows in contract.world.records.items():
        after = state["services"].get(service, {})
        for key, row in rows.items():
            if key not in after:
                changes.append(f"{service} {key} removed")
                continue
            fields = sorted(row.keys() | after[key].keys())
            changed = [f for f in fields if after[key].get(f) != row.get(f) and (service, key, f) not in cells]
            changes += [f"{service} {key}.{f}" for f in changed]
    before, now = contract.world.files, state["files"]
    changes += [f"file {p}" for p in before.keys() | now.keys() if p not in files and before.get(p) != now.get(p)]
    return tuple(sorted(changes))
