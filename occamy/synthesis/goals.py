"""Goal kinds: each draws records of an office that can carry it, and gives slots, goals and gold calls.

A draw that does not fit the office returns None and claims nothing; the author draws again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from occamy.contracts.task import CallLogged, FieldEquals, FileEquals, Goal, RecordCreated, Scalar, ToolCall
from occamy.synthesis.office import Office
from occamy.synthesis.wordings import OPERANDS, GoalKind

INT_LIMIT = 99
"""Largest number that a sum may reach."""


@dataclass(frozen=True)
class Piece:
    """One goal of a task, before it is worded."""

    kind: GoalKind
    slots: dict[str, Scalar]
    """What the wording names."""
    goals: tuple[Goal, ...]
    calls: tuple[ToolCall, ...]
    """Gold calls, in order."""


CAPABILITIES: dict[GoalKind, tuple[str, ...]] = {
    "set": ("act",),
    "mark": ("act",),
    "create": ("act",),
    "search": ("locate", "act"),
    "cross": ("resolve", "act"),
    "report": ("inspect", "report"),
    "memo": ("recall", "act"),
    "cond": ("decide", "act"),
    "copy": ("reconcile", "act"),
    "add": ("compute", "act"),
    "chain": ("resolve", "resolve", "act"),
    "trace": ("locate", "resolve", "act"),
    "verify": ("act", "verify"),
}
"""Goal kind -> its nodes of the capability graph, in order of dependency."""


def draw_piece(kind: GoalKind, r: Random, office: Office) -> Piece | None:
    """Draw one goal of a kind, claiming what it uses. None when this draw does not fit."""
    return _DRAWS[kind](r, office)


def _get(service: str, key: str) -> ToolCall:
    return ToolCall(name=f"{service}_get", arguments={"id": key})


def _update(service: str, key: str, name: str, value: Scalar) -> ToolCall:
    return ToolCall(name=f"{service}_update", arguments={"id": key, name: value})


def _change(
    office: Office, kind: GoalKind, slots: dict[str, Scalar], find: list[ToolCall], cell: tuple[str, str, str, Scalar]
) -> Piece | None:
    """Finish a piece that ends in one update of `cell`; None when its value would make another search ambiguous."""
    service, key, name, value = cell
    if (service, name, value) in office.searched:
        return None
    office.written.add((service, name, value))
    office.claimed.add(key)
    goal = FieldEquals(service=service, id=key, field=name, value=value)
    return Piece(kind, slots, (goal,), (*find, _update(*cell)))


def _start(r: Random, office: Office, services: list[str] | None = None) -> tuple[str, str] | None:
    service = r.choice(services or list(office.schema))
    free = office.free(service)
    return (service, r.choice(free)) if free else None


def _target(
    r: Random, office: Office, service: str, key: str, *kinds: str, skip: str = ""
) -> tuple[str, Scalar] | None:
    """Draw a field of a record and a value that is new to it."""
    names = [n for n in office.names(service, *(kinds or ("enum", "int"))) if n != skip]
    if not names:
        return None
    name = r.choice(names)
    values = office.new_values(service, name, office.records[service][key][name])
    return (name, r.choice(values)) if values else None


def _set(r: Random, office: Office) -> Piece | None:
    start = _start(r, office)
    target = start and _target(r, office, *start)
    if not start or not target:
        return None
    (service, key), (name, value) = start, target
    return _change(office, "set", {"s": service, "i": key, "f": name, "v": value}, [], (service, key, name, value))


def _mark(r: Random, office: Office) -> Piece | None:
    """Like set, in a service with one enum field: the value alone says which field is meant."""
    start = _start(r, office, [s for s in office.schema if len(office.names(s, "enum")) == 1])
    target = start and _target(r, office, *start, "enum")
    if not start or not target:
        return None
    (service, key), (name, value) = start, target
    return _change(office, "mark", {"s": service, "i": key, "v": value}, [], (service, key, name, value))


def _verify(r: Random, office: Office) -> Piece | None:
    piece = _set(r, office)
    if piece is None:
        return None
    look = _get(str(piece.slots["s"]), str(piece.slots["i"]))
    evidence = CallLogged(call=look, after_last_write=True)
    return Piece("verify", piece.slots, (*piece.goals, evidence), (*piece.calls, look))


def _create(r: Random, office: Office) -> Piece | None:
    service = r.choice(list(office.schema))
    f, g = r.sample(list(office.schema[service]), 2)
    x, y = r.choice(office.new_values(service, f)), r.choice(office.new_values(service, g))
    if office.searched & {(service, f, x), (service, g, y)}:
        return None
    office.written |= {(service, f, x), (service, g, y)}
    slots: dict[str, Scalar] = {"s": service, "f": f, "x": x, "g": g, "y": y}
    call = ToolCall(name=f"{service}_create", arguments={f: x, g: y})
    return Piece("create", slots, (RecordCreated(service=service, fields={f: x, g: y}),), (call,))


def _search(r: Random, office: Office) -> Piece | None:
    start = _start(r, office)
    if not start:
        return None
    service, key = start
    f = r.choice(office.names(service, "int", "ref"))
    target = _target(r, office, service, key, skip=f)
    x = office.records[service][key][f]
    if not target or (service, f, x) in office.written:
        return None
    g, v = target
    find = ToolCall(name=f"{service}_search", arguments={"field": f, "value": x})
    slots: dict[str, Scalar] = {"s": service, "f": f, "x": x, "g": g, "v": v}
    piece = _change(office, "search", slots, [find], (service, key, g, v))
    if piece:
        office.searched.add((service, f, x))
    return piece


def _follow(
    r: Random, office: Office, service: str, key: str, hops: int
) -> tuple[list[str], list[tuple[str, str]]] | None:
    """Follow references: the fields followed and the records passed, start first. None when a record is claimed."""
    fields: list[str] = []
    path = [(service, key)]
    for _ in range(hops):
        here, at = path[-1]
        refs = office.names(here, "ref")
        if not refs:
            return None
        fields.append(r.choice(refs))
        path.append((str(office.schema[here][fields[-1]].target), str(office.records[here][at][fields[-1]])))
    return None if office.claimed & {key for _, key in path} else (fields, path)


def _across(r: Random, office: Office, kind: GoalKind, hops: int) -> Piece | None:
    start = _start(r, office)
    followed = start and _follow(r, office, *start, hops)
    if not followed:
        return None
    fields, path = followed
    target = _target(r, office, *path[-1])
    if not target:
        return None
    slots: dict[str, Scalar] = {"s": path[0][0], "i": path[0][1], "c": fields[-1], "c2": fields[0]}
    slots |= {"g": target[0], "v": target[1]}
    piece = _change(office, kind, slots, [_get(*step) for step in path[:-1]], (*path[-1], *target))
    if piece:
        office.claimed |= {key for _, key in path}
    return piece


def _cross(r: Random, office: Office) -> Piece | None:
    return _across(r, office, "cross", 1)


def _chain(r: Random, office: Office) -> Piece | None:
    return _across(r, office, "chain", 2)


def _trace(r: Random, office: Office) -> Piece | None:
    """Search for a record by a number, follow its reference, change what it points to."""
    start = _start(r, office, [s for s in office.schema if office.names(s, "ref")])
    followed = start and _follow(r, office, *start, 1)
    if not start or not followed:
        return None
    (service, key), (fields, path) = start, followed
    f = r.choice(office.names(service, "int"))
    x = office.records[service][key][f]
    target = _target(r, office, *path[-1])
    if not target or (service, f, x) in office.written:
        return None
    find = ToolCall(name=f"{service}_search", arguments={"field": f, "value": x})
    slots: dict[str, Scalar] = {"s": service, "f": f, "x": x, "c": fields[0], "g": target[0], "v": target[1]}
    piece = _change(office, "trace", slots, [find, _get(service, key)], (*path[-1], *target))
    if piece:
        office.searched.add((service, f, x))
        office.claimed.add(key)
    return piece


def _cond(r: Random, office: Office) -> Piece | None:
    start = _start(r, office)
    if not start:
        return None
    service, key = start
    row = office.records[service][key]
    f = r.choice(office.names(service, "enum"))
    target = _target(r, office, service, key, skip=f)
    if not target:
        return None
    g, v = target
    others = office.new_values(service, g, row[g], v)
    if not others:
        return None
    w = r.choice(others)
    a = row[f] if r.random() < 0.5 else r.choice(office.schema[service][f].values)
    slots: dict[str, Scalar] = {"s": service, "i": key, "f": f, "a": a, "g": g, "v": v, "w": w}
    return _change(office, "cond", slots, [_get(service, key)], (service, key, g, v if row[f] == a else w))


def _copy(r: Random, office: Office) -> Piece | None:
    start = _start(r, office)
    other = _start(r, office)
    if not start or not other or start == other:
        return None
    (service, key), (service2, key2) = start, other
    f, g = r.choice(office.names(service, "int")), r.choice(office.names(service2, "int"))
    value = office.records[service][key][f]
    if office.records[service2][key2][g] == value:
        return None
    slots: dict[str, Scalar] = {"s": service, "i": key, "f": f, "s2": service2, "j": key2, "g": g}
    piece = _change(office, "copy", slots, [_get(service, key)], (service2, key2, g, value))
    if piece:
        office.claimed.add(key)
    return piece


def _add(r: Random, office: Office) -> Piece | None:
    start = _start(r, office)
    if not start:
        return None
    service, key = start
    f = r.choice(office.names(service, "int"))
    n = r.choice(OPERANDS)
    total = int(office.records[service][key][f]) + n
    if total > INT_LIMIT:
        return None
    slots: dict[str, Scalar] = {"s": service, "i": key, "f": f, "n": n}
    return _change(office, "add", slots, [_get(service, key)], (service, key, f, total))


def _report(r: Random, office: Office) -> Piece | None:
    start = _start(r, office)
    if not start or not office.file_names:
        return None
    service, key = start
    f, path = r.choice(list(office.schema[service])), office.file_names.pop()
    text = str(office.records[service][key][f])
    office.claimed.add(key)
    write = ToolCall(name="file_write", arguments={"path": path, "text": text})
    slots: dict[str, Scalar] = {"s": service, "i": key, "f": f, "p": path}
    return Piece("report", slots, (FileEquals(path=path, text=text),), (_get(service, key), write))


def _memo(r: Random, office: Office) -> Piece | None:
    """The id stands in a workspace file: read it, then update."""
    start = _start(r, office)
    target = start and _target(r, office, *start)
    if not start or not target or not office.file_names:
        return None
    (service, key), (name, value) = start, target
    path = office.file_names[-1]
    read = ToolCall(name="file_read", arguments={"path": path})
    slots: dict[str, Scalar] = {"s": service, "p": path, "f": name, "v": value}
    piece = _change(office, "memo", slots, [read], (service, key, name, value))
    if piece:
        office.files[office.file_names.pop()] = key
    return piece


_DRAWS: dict[GoalKind, Callable[[Random, Office], Piece | None]] = {
    "set": _set,
    "mark": _mark,
    "create": _create,
    "search": _search,
    "cross": _cross,
    "report": _report,
    "memo": _memo,
    "cond": _cond,
    "copy": _copy,
    "add": _add,
    "chain": _chain,
    "trace": _trace,
    "verify": _verify,
}
