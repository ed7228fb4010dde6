"""Short drills of the base skills: look a key up, copy a span, read a record, add small numbers."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from occamy.nano.documents import LAST_INT, Document, compose, dump, encode
from occamy.nano.vocabulary import FIELDS, IDS, INTS, SERVICES, TOKENS, VALUES

_ID_OF = {t: i for i, t in enumerate(TOKENS)}
_ENTITIES = [_ID_OF[x] for x in IDS]
_NUMBERS = [_ID_OF[x] for x in INTS]
_NAMES = [_ID_OF[x] for x in (*VALUES, *FIELDS, *SERVICES)]


def pairs(r: Random) -> Iterator[Document]:
    """A random key-value list, then lookups; targets are the looked-up values."""
    n = r.randint(2, 12)
    keys = r.sample(r.choice((_ENTITIES, _ENTITIES, _NAMES, _NUMBERS)), n)
    values = [r.choice(r.choice((_ENTITIES, _NUMBERS, _NAMES))) for _ in keys]
    equals = encode("=") if r.random() < 0.5 else []
    end, ask = encode(";") if r.random() < 0.5 else [], encode("?") if r.random() < 0.5 else []
    ids = [t for k, v in zip(keys, values, strict=True) for t in (k, *equals, v, *end)]
    mask = [0] * len(ids)
    for _ in range(r.randint(n, 3 * n)):
        j = r.randrange(n)
        row = [*ask, keys[j], *equals, values[j]]
        ids += row
        mask += [0] * (len(row) - 1) + [1]
    yield ids, mask


def copies(r: Random) -> Iterator[Document]:
    """A random span said again one to three times: plain induction."""
    n, pool = r.randint(3, 24), r.choice((_ENTITIES, _NUMBERS, _NAMES, _ENTITIES + _NUMBERS + _NAMES))
    span, times = [r.choice(pool) for _ in range(n)], r.randint(1, 3)
    yield span * (times + 1), [0] * (n + 1) + [1] * (n * times - 1)


def records(r: Random) -> Iterator[Document]:
    """JSON records by id, then lookups by field and id."""
    names = r.sample(FIELDS, 3)
    rows = {
        i: {f: r.choice((r.choice(IDS), r.randrange(100), r.choice(VALUES))) for f in names}
        for i in r.sample(IDS, r.randint(1, 5))
    }
    parts = [("".join(f"{i}:{dump(row)};" for i, row in rows.items()), False)]
    for _ in range(r.randint(3, 9)):
        i, f = r.choice(list(rows)), r.choice(names)
        parts += [(r.choice((f"?{f} of {i}=", f"{i}.{f}=", f"{f} of the {i} :")), False), (str(rows[i][f]), True)]
    yield compose(parts)


def sums(r: Random) -> Iterator[Document]:
    """Small sums within 0..99."""
    parts: list[tuple[str, bool]] = []
    for _ in range(r.randint(8, 24)):
        b = r.randint(1, 15)
        a = r.randint(0, LAST_INT - b)
        parts += [(r.choice((f"{a}+{b}=", f"add {b} to {a} =")), False), (str(a + b), True), (";", False)]
    yield compose(parts)


def alternations(r: Random) -> Iterator[Document]:
    """Short spans of two to four tokens said again and again: looking a fixed distance back, from any token."""
    pool = r.choice((_ENTITIES, _NUMBERS, _NAMES))
    ids: list[int] = []
    mask: list[int] = []
    while len(ids) < 48:
        n, times = r.choice((2, 2, 3, 4)), r.randint(3, 5)
        ids += [r.choice(pool) for _ in range(n)] * times
        mask += [0] * (n + 1) + [1] * (n * times - n - 1)
    yield ids, mask
