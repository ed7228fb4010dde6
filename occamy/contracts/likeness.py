"""What makes two tasks alike: the literals they use, the skeletons of their clauses, what a variant truly changed."""

from __future__ import annotations

import re
from typing import Literal

from occamy.contracts.record import digest
from occamy.contracts.task import CallLogged, FieldEquals, FileEquals, RecordCreated, Scalar, TaskContract

CLAUSE = " ; "
"""What joins the clauses of a request, one clause per goal of the request."""

Element = Literal["files", "backend", "wording", "grading"]

_TOKEN = re.compile(r"\w+|\S")
_COMMON = ("page",)


def task_literals(contract: TaskContract) -> tuple[Scalar, ...]:
    """Entity ids, stored or target values and file names that a task uses, in a fixed order.

    Taken from the arguments of the gold path, the goals, and the ids and enum words of the request. Operands that only
    the request names (``add 5``) are common property and no literals.
    """
    found: dict[str, Scalar] = {}
    values: list[Scalar] = []
    for call in contract.grading.reference:
        values += _argument_literals(call.name, call.arguments)
    for goal in contract.grading.goals:
        match goal:
            case FieldEquals():
                values += [goal.id, goal.value]
            case RecordCreated():
                values += goal.fields.values()
            case FileEquals():
                values += [goal.path, goal.text]
            case CallLogged():
                values += _argument_literals(goal.call.name, goal.call.arguments)
    owned = _ids(contract) | _enum_words(contract)
    values += [token for token in _TOKEN.findall(contract.request) if token in owned]
    for value in values:
        found.setdefault(str(value), value)
    return tuple(found[text] for text in sorted(found))


def clause_skeletons(contract: TaskContract) -> tuple[str, ...]:
    """The clauses of a request with every literal, field, service and file name masked, case aside, in order."""
    masks = dict.fromkeys(contract.world.services, "<service>")
    masks |= {field: "<field>" for fields in contract.world.services.values() for field in fields}
    masks |= dict.fromkeys(_paths(contract), "<file>")
    masks |= dict.fromkeys(_ids(contract) | _enum_words(contract), "<literal>")
    return tuple(
        " ".join("<literal>" if t.isdigit() else masks.get(t, t.lower()) for t in _TOKEN.findall(clause))
        for clause in contract.request.split(CLAUSE)
    )


def changed_elements(parent: TaskContract, variant: TaskContract) -> tuple[Element, ...]:
    """Which of the four elements of a task truly differ.

    files: initial workspace files · backend: schema, records, ids to come or faults · wording: the clauses with names
    and values masked, so that swapping names is no new wording · grading: the goals.
    """
    a, b = parent.world, variant.world
    differs: dict[Element, bool] = {
        "files": a.files != b.files,
        "backend": (a.services, a.records, a.fresh_ids, a.faults) != (b.services, b.records, b.fresh_ids, b.faults),
        "wording": clause_skeletons(parent) != clause_skeletons(variant),
        "grading": parent.grading.goals != variant.grading.goals,
    }
    return tuple(element for element, changed in differs.items() if changed)


def duplicate_key(contract: TaskContract) -> str:
    """Digest that two tasks share when they ask the same by the same capability graph with the same gold path."""
    request = " ".join(_TOKEN.findall(contract.request.lower()))
    path = [call.model_dump(mode="json") for call in contract.grading.reference]
    return digest([request, list(contract.meta.capabilities), path])


def _argument_literals(name: str, arguments: dict[str, Scalar]) -> list[Scalar]:
    skip = (*_COMMON, "field") if name.endswith("_search") else ()
    return [value for key, value in arguments.items() if key not in skip]


def _ids(contract: TaskContract) -> set[str]:
    return {key for rows in contract.world.records.values() for key in rows}


def _enum_words(contract: TaskContract) -> set[str]:
    return {word for fields in contract.world.services.values() for field in fields.values() for word in field.values}


def _paths(contract: TaskContract) -> set[str]:
    return set(contract.world.files) | {g.path for g in contract.grading.goals if isinstance(g, FileEquals)}
