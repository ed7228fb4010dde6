"""Runs scripted calls in a fresh world through the public interface, and grades what they leave behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from occamy.contracts.task import (
    CallLogged,
    FieldEquals,
    FileEquals,
    Goal,
    RecordCreated,
    Scalar,
    TaskContract,
    ToolCall,
)
from occamy.rollout.grading import Grade, grade
from occamy.worlds.tools import is_write
from occamy.worlds.workspace import MemoryWorkspace
from occamy.worlds.world import Event, World


@dataclass(frozen=True)
class Attempt:
    """A finished scripted run."""

    events: tuple[Event, ...]
    fingerprint: str
    grade: Grade


@dataclass(frozen=True)
class Negative:
    """A scripted run that must fail."""

    name: str
    calls: tuple[ToolCall, ...]
    completed: bool
    answer: str
    expected: float | None = None
    """The exact score that a near miss deserves; None where only failing is asked for."""


def attempt(contract: TaskContract, calls: Iterable[ToolCall], answer: str, completed: bool = True) -> Attempt:
    """Run calls in a fresh world, in order, each again once when it answers `unavailable`, then grade the end."""
    world = World(contract.world, MemoryWorkspace())
    judged = _play(world, contract, calls, answer, completed)
    fingerprint = world.fingerprint()
    world.close()
    return Attempt(tuple(world.events), fingerprint, judged)


def grade_negatives(contract: TaskContract) -> Iterator[tuple[Negative, Grade]]:
    """Run every negative from the initial state, in one world that is restored in between."""
    world = World(contract.world, MemoryWorkspace())
    start = world.snapshot()
    for negative in negatives(contract):
        world.restore(start)
        yield negative, _play(world, contract, negative.calls, negative.answer, negative.completed)
    world.close()


def _play(world: World, contract: TaskContract, calls: Iterable[ToolCall], answer: str, completed: bool) -> Grade:
    for call in calls:
        result = world.call(call.name, dict(call.arguments))
        if result.error == "unavailable":
            world.call(call.name, dict(call.arguments))
    return grade(contract, world.state(), world.events, answer, completed)


def negatives(contract: TaskContract) -> list[Negative]:
    """Runs that must score below the threshold and below gold, derived from the gold path."""
    gold, answer = contract.grading.reference, contract.grading.answer
    writes = [k for k, call in enumerate(gold) if is_write(call.name)]
    reads = tuple(call for call in gold if not is_write(call.name))
    found = [
        Negative("no_op", (), False, ""),
        Negative("finish_at_once", (), True, answer),
        Negative("answer_without_action", reads, True, answer),
        Negative("guessing_text", (), True, " ".join([answer, *(str(v) for v in contract.meta.literals)])),
    ]
    if len(writes) > 1:
        found.append(Negative("touch_only_first", gold[: writes[0] + 1], True, answer))
        found += [Negative(f"skip_call_{k}", (*gold[:k], *gold[k + 1 :]), True, answer) for k in writes[:-1]]
    if writes:
        last = writes[-1]
        found.append(Negative("near_miss", gold[:last], True, answer, _share_without(contract, gold[last])))
        wrong = _elsewhere(contract, gold[last])
        if wrong:
            found.append(Negative("wrong_entity", (*gold[:last], wrong), True, answer))
    found += [Negative("unverified", gold[:-1], True, answer)] if gold and not is_write(gold[-1].name) else []
    extra = None if contract.grading.allow_other_changes else collateral(contract)
    return [*found, Negative("collateral", (*gold, extra), True, answer, 0.0)] if extra else found


def serves(call: ToolCall, goal: Goal) -> bool:
    """Whether a write is what a goal asks for."""
    service = call.name.rpartition("_")[0]
    match goal:
        case FieldEquals():
            here = call.name == f"{goal.service}_update" and call.arguments.get("id") == goal.id
            return here and call.arguments.get(goal.field) == goal.value
        case RecordCreated():
            return call.name.endswith("_create") and service == goal.service and call.arguments == goal.fields
        case FileEquals():
            same_text = str(call.arguments.get("text", "")).strip() == goal.text.strip()
            return call.name == "file_write" and call.arguments.get("path") == goal.path and same_text
    return False


def collateral(contract: TaskContract) -> ToolCall | None:
    """A write that changes a record no goal speaks of. None in a world without one."""
    wanted = {goal.id for goal in contract.grading.goals if isinstance(goal, FieldEquals)}
    for service, rows in contract.world.records.items():
        for key in sorted(rows.keys() - wanted):
            for name in contract.world.services[service]:
                value = _other_value(contract, service, key, name)
                if value is not None:
                    return ToolCall(name=f"{service}_update", arguments={"id": key, name: value})
    return None


def _share_without(contract: TaskContract, omitted: ToolCall) -> float:
    """Weighted share of goals that the gold path up to `omitted` meets: neither its own nor evidence logged later."""
    goals = contract.grading.goals
    kept = [g.weight for g in goals if not serves(omitted, g) and not isinstance(g, CallLogged)]
    before = contract.grading.reference[: contract.grading.reference.index(omitted)]
    logged = [g.weight for g in goals if isinstance(g, CallLogged) and not g.after_last_write and g.call in before]
    return sum(kept + logged) / sum(goal.weight for goal in goals)


def _elsewhere(contract: TaskContract, call: ToolCall) -> ToolCall | None:
    """The same write on another place. None when the world has no other place."""
    service, _, verb = call.name.rpartition("_")
    if verb == "write":
        return call.model_copy(update={"arguments": {**call.arguments, "path": f"{call.arguments['path']}_other"}})
    if verb == "create":
        values = {f: _other_value(contract, service, "", f, v) for f, v in call.arguments.items()}
        changed = {f: v for f, v in values.items() if v is not None}
        return call.model_copy(update={"arguments": {**call.arguments, **changed}}) if changed else None
    wanted = {goal.id for goal in contract.grading.goals if isinstance(goal, FieldEquals)}
    for key in sorted(contract.world.records[service].keys() - wanted):
        row = contract.world.records[service][key]
        if any(row.get(f) != v for f, v in call.arguments.items() if f != "id"):
            return call.model_copy(update={"arguments": {**call.arguments, "id": key}})
    return None


def _other_value(
    contract: TaskContract, service: str, key: str, name: str, avoid: Scalar | None = None
) -> Scalar | None:
    """A value that a field may hold and does not. None when it has no other."""
    spec = contract.world.services[service][name]
    stored = contract.world.records[service].get(key, {}).get(name)
    pool: Iterable[Scalar] = range(1, 100)
    if spec.kind == "enum":
        pool = spec.values
    elif spec.target is not None:
        pool = contract.world.records[spec.target]
    return next((v for v in pool if v not in (stored, avoid)), None)
