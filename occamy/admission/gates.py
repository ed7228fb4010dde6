"""Gates 1 to 5, each a pure function of one contract: evidence when it passes, Refused with a reason when not."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from typing import Any

from occamy.admission.attempts import Attempt, attempt, grade_negatives, serves
from occamy.admission.receipts import Reason, Refused
from occamy.contracts.likeness import CLAUSE, task_literals
from occamy.contracts.task import CallLogged, FieldEquals, FieldSpec, Goal, RecordCreated, Scalar, TaskContract
from occamy.worlds.tools import fits, is_write, tool_names
from occamy.worlds.workspace import check_new_path
from occamy.worlds.world import Event, WorldError, check_spec

_TOKEN = re.compile(r"\w+")
_TOLERANCE = 1e-9

Evidence = dict[str, Any]


def canonical(contract: TaskContract, folder: str) -> Evidence:
    """Gate 1: identity, normal form and a world that can be built."""
    meta, grading = contract.meta, contract.grading
    problems = {
        f"task id {meta.task_id!r} in folder {folder!r}": meta.task_id != folder,
        f"schema version {meta.schema_version}, expected 1": meta.schema_version != 1,
        "a tool is offered twice": len(set(contract.tools)) != len(contract.tools),
        "weights must be positive and finite": not all(g.weight > 0 and math.isfinite(g.weight) for g in grading.goals),
        f"pass threshold {grading.pass_threshold} outside (0, 1]": not 0 < grading.pass_threshold <= 1,
        "an empty request": not contract.request.strip(),
        "a template id per clause": len(meta.templates) != len(contract.request.split(CLAUSE)),
    }
    for problem, found in problems.items():
        if found:
            raise Refused(Reason.not_canonical, problem)
    try:
        check_spec(contract.world)
        for path in contract.world.files:
            check_new_path(path)
    except (WorldError, ValueError) as e:
        raise Refused(Reason.invalid_world, str(e)) from e
    if meta.literals != task_literals(contract):
        raise Refused(Reason.not_canonical, "literals differ from those that the task uses")
    return {"literals": len(meta.literals), "clauses": len(meta.templates)}


def feasible(contract: TaskContract) -> Evidence:
    """Gate 2: tools exist, goals can be met, and request, gold path and grader speak of the same things."""
    gold, goals = contract.grading.reference, contract.grading.goals
    if not gold:
        raise Refused(Reason.misaligned, "no gold path")
    absent = set(contract.tools) - set(tool_names(contract.world))
    needed = {call.name for call in gold} | {g.call.name for g in goals if isinstance(g, CallLogged)}
    for name in sorted(absent | (needed - set(contract.tools))):
        raise Refused(Reason.tool_unavailable, name)
    for goal in goals:
        _goal_is_feasible(contract, goal)
    _goals_agree(contract)
    idle = attempt(contract, (), "")
    for goal, met in zip(goals, idle.grade.goals_met, strict=True):
        if met:
            raise Refused(Reason.met_at_start, _show(goal))
    _aligned(contract)
    return {"goals": len(goals), "gold_calls": len(gold)}


def discoverable(contract: TaskContract, gold: Attempt) -> Evidence:
    """Gate 3: every literal of the gold path comes from the request or an earlier observation (data flow)."""
    asked = set(_TOKEN.findall(contract.request))
    seen = set(asked)
    used: set[str] = set()
    sources: dict[str, int] = {"request": 0, "observation": 0, "computed": 0}
    past: list[Event] = []
    for event in gold.events:
        for key, value in _literal_arguments(event):
            for token in _TOKEN.findall(str(value)):
                sources[_source(contract, event, key, token, asked, seen, past)] += 1
                used.add(token)
        if event.ok:
            seen |= set(_TOKEN.findall(event.response))
            past.append(event)
    _unambiguous(past, used - asked)
    return {"literals_from": sources}


def reference(contract: TaskContract, gold: Attempt) -> Evidence:
    """Gate 4: the gold path runs twice through the public interface, meets every goal, and ends in equal states."""
    for event in gold.events:
        if not event.ok and event.ordinal not in contract.world.faults:
            raise Refused(Reason.reference_failed, f"call {event.ordinal} {event.name} answered {event.error}")
    if not gold.grade.success or not all(gold.grade.goals_met):
        detail = f"score {gold.grade.score}, forbidden effects {list(gold.grade.forbidden)}"
        raise Refused(Reason.reference_failed, detail)
    budget = contract.meta.budget
    turns = len(gold.events) + 1
    if len(gold.events) > budget.tool_calls or turns > min(budget.turns, budget.tokens) or budget.wall_seconds <= 0:
        raise Refused(Reason.reference_failed, f"{len(gold.events)} calls outgrow the budget of {budget}")
    unreached = [k for k in contract.world.faults if k >= len(gold.events)]
    if unreached:
        raise Refused(Reason.reference_failed, f"scheduled faults {unreached} are never reached")
    again = attempt(contract, contract.grading.reference, contract.grading.answer)
    if again.fingerprint != gold.fingerprint:
        raise Refused(Reason.nondeterministic, f"{gold.fingerprint} then {again.fingerprint}")
    return {"score": gold.grade.score, "calls": len(gold.events), "fingerprints": [gold.fingerprint, again.fingerprint]}


def refuses_negatives(contract: TaskContract, gold: Attempt) -> Evidence:
    """Gate 5: runs that skip, misplace or overdo the work fail; a near miss gets exactly its share."""
    scores: dict[str, float] = {}
    limit = min(contract.grading.pass_threshold, gold.grade.score)
    for negative, grade in grade_negatives(contract):
        scores[negative.name] = grade.score
        if grade.success or grade.score >= limit:
            raise Refused(Reason.negative_passed, f"{negative.name} scored {grade.score}", {"scores": scores})
        if negative.expected is not None and abs(grade.score - negative.expected) > _TOLERANCE:
            detail = f"{negative.name} scored {grade.score}, deserves {negative.expected}"
            raise Refused(Reason.wrong_partial_credit, detail, {"scores": scores})
    return {"scores": scores}


def _goal_is_feasible(contract: TaskContract, goal: Goal) -> None:
    world = contract.world
    if isinstance(goal, FieldEquals):
        if goal.id not in world.records.get(goal.service, {}):
            raise Refused(Reason.infeasible_goal, f"{_show(goal)}: no such record")
        fields = {goal.field: goal.value}
    elif isinstance(goal, RecordCreated):
        fields = goal.fields
    else:
        return
    for name, value in fields.items():
        spec = world.services.get(goal.service, {}).get(name)
        if spec is None or not _holds(world.records, spec, value):
            raise Refused(Reason.infeasible_goal, f"{_show(goal)}: field {name!r} cannot hold {value!r}")


def _holds(records: dict[str, dict[str, dict[str, Scalar]]], spec: FieldSpec, value: Scalar) -> bool:
    return fits(spec, value) and (spec.target is None or value in records.get(spec.target, {}))


def _goals_agree(contract: TaskContract) -> None:
    cells: dict[tuple[str, ...], Goal] = {}
    created = [g for g in contract.grading.goals if isinstance(g, RecordCreated)]
    if len(created) > len(contract.world.fresh_ids):
        raise Refused(Reason.infeasible_goal, f"{len(created)} records to create, {len(contract.world.fresh_ids)} ids")
    for goal in contract.grading.goals:
        if isinstance(goal, CallLogged | RecordCreated):
            continue
        place = (goal.service, goal.id, goal.field) if isinstance(goal, FieldEquals) else (goal.path,)
        if cells.setdefault(place, goal) is not goal:
            raise Refused(Reason.contradictory_goals, " ".join(place))


def _aligned(contract: TaskContract) -> None:
    """Ids that the request names are used; every goal has its gold write, and every gold write its goal."""
    gold, goals = contract.grading.reference, contract.grading.goals
    words = set(_TOKEN.findall(contract.request))
    ids = {key for rows in contract.world.records.values() for key in rows}
    used = {str(value) for call in gold for value in call.arguments.values()}
    for key in sorted((words & ids) - used):
        raise Refused(Reason.misaligned, f"the request names {key}, which the gold path does not use")
    for call in gold:
        if is_write(call.name) and not any(serves(call, goal) for goal in goals):
            raise Refused(Reason.misaligned, f"gold write {call.name} {call.arguments} serves no goal")
    for goal in goals:
        reached = goal.call in gold if isinstance(goal, CallLogged) else any(serves(call, goal) for call in gold)
        if not reached:
            raise Refused(Reason.misaligned, f"{_show(goal)}: the gold path does not do it")
        if isinstance(goal, FieldEquals) and goal.field not in words:
            fields = contract.world.services[goal.service]
            fitting = [name for name, spec in fields.items() if _holds(contract.world.records, spec, goal.value)]
            if fitting != [goal.field]:
                raise Refused(Reason.ambiguous, f"the request does not say which of {fitting} gets {goal.value!r}")


def _arguments(event: Event) -> dict[str, Any]:
    return event.arguments if isinstance(event.arguments, dict) else {}


def _literal_arguments(event: Event) -> list[tuple[str, Scalar]]:
    structural = ("field", "page") if event.name.endswith("_search") else ()
    return [(key, value) for key, value in _arguments(event).items() if key not in structural]


def _source(
    contract: TaskContract, event: Event, key: str, token: str, asked: set[str], seen: set[str], past: list[Event]
) -> str:
    """Where a literal comes from: request, observation, or an observed number plus an operand of the request."""
    if token in asked:
        return "request"
    if token in seen:
        return "observation"
    look = event.name.replace("_update", "_get")
    for earlier in past:
        if earlier.name == look and earlier.arguments == {"id": _arguments(event).get("id")} and token.isdigit():
            before = json.loads(earlier.response).get(key)
            if isinstance(before, int) and str(int(token) - before) in asked:
                return "computed"
    raise Refused(Reason.undiscoverable, f"{event.name} {key}={token!r} in {contract.request!r}")


def _unambiguous(events: list[Event], used: set[str]) -> None:
    """Picking one of several records that a search found needs a look at all of them, on every page."""
    found: dict[str, set[str]] = defaultdict(set)
    unread: dict[str, bool] = {}
    for event in events:
        if event.name.endswith("_search"):
            query = f"{event.name} {dict(arg for arg in _arguments(event).items() if arg[0] != 'page')}"
            page = json.loads(event.response)
            found[query] |= set(page["ids"])
            unread[query] = "next" in page
    for query, ids in found.items():
        if (len(ids) > 1 or unread[query]) and ids & used and (unread[query] or not ids <= used):
            raise Refused(Reason.ambiguous, f"{query} finds {sorted(ids)}; the gold path picks {sorted(ids & used)}")


def _show(goal: Goal) -> str:
    return json.dumps(goal.model_dump(mode="json", exclude={"weight"}), separators=(",", ":"))
