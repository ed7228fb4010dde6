"""Generic pretraining documents: tool-use transcripts over random services, lookups, copies, records and sums.

Nothing here knows the task mix: services, fields, values, ids and wordings are drawn at random for every document.
A document is (token ids, mask); only masked positions are targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from occamy.nano import phrases
from occamy.nano.documents import LAST_INT, Document, compose, dump
from occamy.nano.drills import alternations, copies, pairs, records, sums
from occamy.nano.vocabulary import FIELDS, FILES, IDS, SERVICES, VALUES

Value = int | str

_KEPT_STEPS = 2


@dataclass(frozen=True)
class _Type:
    kind: str  # enum, int or ref
    values: tuple[str, ...] = ()
    target: str = ""


@dataclass
class _Step:
    call: str
    observation: str
    write: str = ""  # what a summary says of it, if it changed something
    slip: _Step | None = None  # a likely mistake in its place: the other branch, a sum off by a little, another field


@dataclass
class _Store:
    """Random services with random records, and the bookkeeping of which records a goal already uses."""

    schema: dict[str, dict[str, _Type]]
    rows: dict[str, dict[str, dict[str, Value]]]
    fresh: list[str]
    files: list[str]
    used: set[str] = field(default_factory=set)


def _random_schema(r: Random) -> dict[str, dict[str, _Type]]:
    services = r.sample(SERVICES, r.choice((1, 2, 2, 3, 3, 3)))
    names, words = r.sample(FIELDS, 12), r.sample(VALUES, len(VALUES))
    schema: dict[str, dict[str, _Type]] = {}
    for k, service in enumerate(services):
        fields: list[tuple[str, _Type]] = []
        if k and r.random() < 0.85:
            fields.append(
                (names.pop(), _Type("ref", target=services[k - 1] if r.random() < 0.7 else r.choice(services[:k])))
            )
        for _ in range(r.choice((1, 2, 2)) if fields else r.choice((2, 3, 3))):
            if r.random() < 0.5 or len(words) < 4:
                fields.append((names.pop(), _Type("int")))
            else:
                fields.append((names.pop(), _Type("enum", values=tuple(words.pop() for _ in range(4)))))
        if r.random() < 0.3:
            r.shuffle(fields)
        schema[service] = dict(fields)
    return schema


def _random_store(r: Random) -> _Store:
    schema = _random_schema(r)
    count = r.choice((4, 5, 6, 6))
    ids = r.sample(IDS, count * len(schema) + 4)
    rows: dict[str, dict[str, dict[str, Value]]] = {}
    for k, service in enumerate(schema):
        rows[service] = {i: {} for i in ids[k * count : (k + 1) * count]}
    for service, fields in schema.items():
        for name, type_ in fields.items():
            drawn: list[Value]
            if type_.kind == "int":
                drawn = list(r.sample(range(1, 90), count))
            elif type_.kind == "ref":
                drawn = list(r.sample(list(rows[type_.target]), count))
            else:
                drawn = [r.choice(type_.values) for _ in range(count)]
            for row, value in zip(rows[service].values(), drawn, strict=True):
                row[name] = value
    return _Store(schema, rows, ids[-4:], list(r.sample(FILES, 3)))


def _pick(r: Random, store: _Store, service: str) -> str | None:
    free = [i for i in store.rows[service] if i not in store.used]
    return r.choice(free) if free else None


def _fields(store: _Store, service: str, *kinds: str) -> list[str]:
    return [f for f, t in store.schema[service].items() if t.kind in kinds]


def _new_value(r: Random, store: _Store, service: str, name: str, *avoid: Value) -> Value:
    type_ = store.schema[service][name]
    pool: list[Value]
    if type_.kind == "enum":
        pool = list(type_.values)
    elif type_.kind == "int":
        pool = list(range(1, 90))
    else:
        pool = list(store.rows[type_.target])
    return r.choice([v for v in pool if v not in avoid])


def _get(store: _Store, service: str, id_: str) -> _Step:
    return _Step(f'{service}_get{{"id":"{id_}"}}', dump(store.rows[service][id_]))


def _update(service: str, id_: str, name: str, value: Value) -> _Step:
    return _Step(f'{service}_update{{"id":"{id_}","{name}":{dump(value)}}}', "ok", f"{id_}.{name}={value};")


def _file_write(path: str, value: Value) -> _Step:
    return _Step(f'file_write{{"path":"{path}","text":"{value}"}}', "ok", f"{path}={value};")


def _path(r: Random, store: _Store, service: str, id_: str) -> tuple[str, str, str, list[_Step]] | None:
    """Choose how the target is said: (wording, service, id, calls that find it). None when it cannot be said."""
    way = r.choices(("direct", "cross", "chain", "found", "named"), (0.42, 0.22, 0.1, 0.14, 0.12))[0]
    here = phrases.direct(r, service, id_)
    if way in ("cross", "chain"):
        steps: list[_Step] = []
        for _ in range(2 if way == "chain" else 1):
            refs = _fields(store, service, "ref")
            if not refs:
                break
            column = r.choice(refs)
            steps.append(_get(store, service, id_))
            here = phrases.referred(r, column, here)
            service, id_ = store.schema[service][column].target, str(store.rows[service][id_][column])
        if not steps or id_ in store.used:
            return None
        return here, service, id_, steps
    if way == "found":
        keys = _fields(store, service, "int", "ref")
        if not keys:
            return None
        key = r.choice(keys)
        value = store.rows[service][id_][key]
        call = f'{service}_search{{"field":"{key}","value":{dump(value)}}}'
        return phrases.found(r, service, key, str(value)), service, id_, [_Step(call, dump({"ids": [id_]}))]
    if way == "named" and store.files:
        path = store.files.pop()
        return phrases.named(r, service, path), service, id_, [_Step(f'file_read{{"path":"{path}"}}', id_)]
    return here, service, id_, []


_KINDS = {"set": 0.4, "cond": 0.18, "copy": 0.14, "add": 0.16, "report": 0.12}


def _goal(r: Random, store: _Store, waste: float, kinds: dict[str, float]) -> tuple[str, list[_Step]] | None:
    """Draw one goal: its wording and the calls that reach it. None when this draw does not fit the store."""
    origin = r.choice(list(store.schema))
    start = _pick(r, store, origin)
    if start is None:
        return None
    if r.random() < 0.1:
        return _create_goal(r, store, origin)
    path = _path(r, store, origin, start)
    if path is None:
        return None
    target, service, id_, steps = path
    row = store.rows[service][id_]
    kind = r.choices(list(kinds), list(kinds.values()))[0]
    find = list(steps)
    if kind == "set":
        goal = _set_goal(r, store, target, service, id_)
    elif kind == "cond":
        goal = _cond_goal(r, store, target, service, id_)
    elif kind == "copy":
        goal = _copy_goal(r, store, target, service, id_)
    elif kind == "add":
        numbers = [f for f in _fields(store, service, "int") if int(row[f]) <= LAST_INT - 15]
        if not numbers:
            return None
        name, amount = r.choice(numbers), r.randint(1, 15)
        after = int(row[name]) + amount
        write = _update(service, id_, name, after)
        write.slip = _update(service, id_, name, after + (1, -1, 2)[amount % 3])
        goal = phrases.add(r, target, name, amount), [_get(store, service, id_), write]
    else:
        if not store.files:
            return None
        name, file = r.choice(list(row)), store.files.pop()
        fields = list(row)
        write = _file_write(file, row[name])
        write.slip = _file_write(file, row[fields[fields.index(name) - 1]])
        goal = phrases.report(r, target, name, file), [_get(store, service, id_), write]
    if goal is None:
        return None
    text, act = goal
    if r.random() < waste and len(act) == 1:
        act = [_get(store, service, id_), *act]
    store.used |= {start, id_}
    return text, find + act


def _create_goal(r: Random, store: _Store, service: str) -> tuple[str, list[_Step]] | None:
    if not store.fresh or len(store.schema[service]) < 2:
        return None
    first, second = r.sample(list(store.schema[service]), 2)
    x, y = _new_value(r, store, service, first), _new_value(r, store, service, second)
    new = store.fresh.pop(0)
    call = f'{service}_create{{"{first}":{dump(x)},"{second}":{dump(y)}}}'
    return phrases.create(r, service, (first, str(x)), (second, str(y))), [
        _Step(call, dump({"id": new}), f"{new}=new;")
    ]


def _set_goal(r: Random, store: _Store, target: str, service: str, id_: str) -> tuple[str, list[_Step]] | None:
    names = _fields(store, service, "enum", "int")
    if not names:
        return None
    name = r.choice(names)
    value = _new_value(r, store, service, name, store.rows[service][id_][name])
    alone = _fields(store, service, "enum") == [name]
    text = phrases.assign(r, target, name, str(value), may_omit_field=alone)
    steps = [_update(service, id_, name, value)]
    if r.random() < 0.06:
        changed = dict(store.rows[service][id_]) | {name: value}
        return phrases.checked(r, text), [*steps, _Step(_get(store, service, id_).call, dump(changed))]
    return text, steps


def _cond_goal(r: Random, store: _Store, target: str, service: str, id_: str) -> tuple[str, list[_Step]] | None:
    row = store.rows[service][id_]
    tests, names = _fields(store, service, "enum"), _fields(store, service, "enum", "int")
    if not tests or len(names) < 1:
        return None
    tested, name = r.choice(tests), r.choice(names)
    asked = str(row[tested]) if r.random() < 0.5 else r.choice(store.schema[service][tested].values)
    yes = _new_value(r, store, service, name, row[name])
    no = _new_value(r, store, service, name, row[name], yes)
    value = yes if row[tested] == asked else no
    text = phrases.conditional(r, target, tested, asked, name, str(yes), str(no))
    write = _update(service, id_, name, value)
    write.slip = _update(service, id_, name, no if value == yes else yes)
    return text, [_get(store, service, id_), write]


def _copy_goal(r: Random, store: _Store, target: str, service: str, id_: str) -> tuple[str, list[_Step]] | None:
    """Copy a number of the target into another record: get the source, then update."""
    sources = _fields(store, service, "int")
    other = r.choice(list(store.schema))
    sinks, free = _fields(store, other, "int"), [i for i in store.rows[other] if i not in store.used and i != id_]
    if not sources or not sinks or not free:
        return None
    name, sink, goal_id = r.choice(sources), r.choice(sinks), r.choice(free)
    value = store.rows[service][id_][name]
    if store.rows[other][goal_id][sink] == value:
        return None
    store.used.add(goal_id)
    said = r.choice(("the {f} of {t}", "{f} of {t}", "{f} from {t}", "the {f} from {t}")).format(f=name, t=target)
    there = phrases.direct(r, other, goal_id)
    if r.random() < 0.5:
        text = r.choice(
            (
                "copy {v} to {f} of {t}",
                "put {v} into {f} of {t}",
                "copy {v} into the {f} of {t}",
                "take {v} and put it in {f} of {t}",
                "move {v} onto {f} of {t}",
            )
        ).format(v=said, f=sink, t=there)
    else:
        text = phrases.assign(r, there, sink, said)
    return text, [_get(store, service, id_), _update(other, goal_id, sink, value)]


def _header(r: Random, store: _Store) -> str:
    lines = [
        f"{service}:" + "".join(f + (f">{t.target}" if t.kind == "ref" else "") + " " for f, t in fields.items()) + ";"
        for service, fields in store.schema.items()
    ]
    uses_files = len(store.files) < 3
    return "<tools>" + "".join(lines) + ("file;" if uses_files or r.random() < 0.6 else "")


def _draw(
    r: Random, sizes: tuple[int, ...], kinds: dict[str, float], waste: float
) -> tuple[_Store, list[tuple[str, list[_Step]]]]:
    """Draw a store and as many goals as one of `sizes` says: (wording, calls) each."""
    while True:
        store = _random_store(r)
        wanted, goals, often = r.choice(sizes), list[tuple[str, list[_Step]]](), waste if r.random() < 0.3 else 0.0
        for _ in range(30):
            goal = _goal(r, store, often, kinds)
            if goal is not None:
                goals.append(goal)
            if len(goals) == wanted:
                return store, goals


def _render(r: Random, store: _Store, texts: list[str], steps: list[_Step]) -> Iterator[Document]:
    if r.random() < 0.12:
        k = r.randrange(len(steps))
        steps.insert(k, _Step(steps[k].call, '{"error":"unavailable"}'))
    cuts = sorted(r.sample(range(3, len(steps)), r.choice((1, 1, 2)))) if len(steps) > 5 and r.random() < 0.4 else []
    system = "<system>work" if r.random() < 0.25 else ""
    opening = _header(r, store) + system + "<user>" + r.choice((" ; ", " ; ", " . ", " , then ")).join(texts)
    yield from _segments(opening, steps, cuts)


def transcripts(r: Random) -> Iterator[Document]:
    """One episode over random services: one document, or one per segment when its history was summarised."""
    store, goals = _draw(r, (1, 1, 2, 2, 3, 3, 3, 4), _KINDS, 0.3)
    yield from _render(r, store, [text for text, _ in goals], [s for _, steps in goals for s in steps])


_HARDER = {"set": 0.2, "cond": 0.27, "copy": 0.12, "add": 0.25, "report": 0.16}


def rehearsals(r: Random, careless: float) -> Iterator[Document]:
    """Harder episodes of uneven quality: a share of them was recorded from somebody careless.

    What the careless do: skip a goal, read again and again, take the other branch, miscount, forget to stop. A model
    of such records can do the work and often does not: the room that post-training is for.
    """
    store, goals = _draw(r, (1, 1, 2, 2, 3, 3), _HARDER, 0.0)
    texts, parts = [text for text, _ in goals], [steps for _, steps in goals]
    if r.random() < careless:
        if len(parts) > 1 and r.random() < 0.35:
            parts.pop(r.randrange(len(parts)))
        parts = [[slipped for step in steps for slipped in _careless(r, step)] for steps in parts]
        if r.random() < 0.3:
            reads = [s for steps in parts for s in steps if not s.write] or parts[-1]
            parts.append([r.choice(reads) for _ in range(r.randint(2, 9))])
    yield from _render(r, store, texts, [s for steps in parts for s in steps])


def _careless(r: Random, step: _Step) -> list[_Step]:
    if not step.write:
        return [step] * r.choice((1, 1, 1, 2))
    return [step.slip if step.slip is not None and r.random() < 0.3 else step]


def _segments(opening: str, steps: list[_Step], cuts: list[int]) -> Iterator[Document]:
    """Render an episode; at each cut a summary is asked for, which closes the document and opens the next."""
    prefix, first, summary = opening, 0, ""
    for cut in [*cuts, len(steps)]:
        parts = [(prefix, False)]
        for step in steps[first:cut]:
            parts += [("<assistant>", False), (step.call + "<end>", True), ("<tool>" + step.observation, False)]
        if cut < len(steps):
            summary = "".join(s.write for s in steps[:cut]) or "none"
            parts += [("<user>summary<assistant>", False), (summary + "<end>", True)]
            kept = steps[cut - _KEPT_STEPS : cut]
            tail = "".join(f"<assistant>{s.call}<end><tool>{s.observation}" for s in kept)
            prefix, first = f"{opening}<user>summary:{summary}{tail}", cut
        else:
            parts += [("<assistant>", False), ("done<end>", True)]
        yield compose(parts)


STREAMS: dict[str, tuple[Callable[[Random], Iterator[Document]], float]] = {
    "transcripts": (transcripts, 0.56),
    "pairs": (pairs, 0.13),
    "copies": (copies, 0.11),
    "records": (records, 0.1),
    "sums": (sums, 0.07),
    "alternations": (alternations, 0.03),
}
"""Name -> (generator, share of draws). Our choice."""


def documents(r: Random, drills: int = 0) -> Iterator[Document]:
    """Endless mixed stream of documents, after `drills` documents of copies and alternations alone.

    Copying by content (induction) appears within about 1.5M tokens of these two, and not within 10M of the mix.
    """
    for _ in range(drills):
        yield from r.choice((copies, alternations))(r)
    makers, shares = zip(*STREAMS.values(), strict=True)
    while True:
        yield from r.choices(makers, shares)[0](r)


def rehearsed_documents(r: Random, careless: float) -> Iterator[Document]:
    """Endless stream of the second phase: mostly rehearsals, with drills so that base skills stay."""
    while True:
        if r.random() < 0.75:
            yield from rehearsals(r, careless)
        else:
            yield from r.choice((copies, pairs, records, sums))(r)
