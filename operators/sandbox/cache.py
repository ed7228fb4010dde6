"""What the operator last saw, by kind, with the indexes that planning reads. Never goes back in time.

Three sources write here: watches, lists, and the answers to the operator's own writes (so that it reads what it
wrote). An older version of an object never replaces a newer one, and what is gone stays gone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from operators.sandbox.views import Lease, Pod, Pool

_TOMBSTONE_S = 600.0
"""How long late events about an object that is gone are recognised. Our choice."""


class Item(Protocol):
    """What a shelf holds."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def version(self) -> int: ...


T = TypeVar("T", bound=Item)


class Shelf(Generic[T]):
    """All objects of one kind by UID, by name, and by each named index."""

    def __init__(self, **indexes: Callable[[T], str]) -> None:
        self._items: dict[str, T] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._keys = indexes
        self._indexes: dict[str, dict[str, dict[str, T]]] = {name: defaultdict(dict) for name in indexes}
        self._gone: dict[str, float] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def get(self, uid: str) -> T | None:
        """The object with this UID."""
        return self._items.get(uid)

    def named(self, namespace: str, name: str) -> T | None:
        """The object that has this name now."""
        uid = self._names.get((namespace, name))
        return self._items.get(uid) if uid else None

    def where(self, index: str, value: str) -> tuple[T, ...]:
        """Objects whose index has this value."""
        return tuple(self._indexes[index].get(value, {}).values())

    def put(self, item: T) -> bool:
        """Take an object's state; False when it is older than, or the same as, what is known."""
        if item.uid in self._gone:
            return False
        known = self._items.get(item.uid)
        if known is not None:
            if known.version >= item.version:
                return False
            self._unindex(known)
        self._items[item.uid] = item
        namesake = self.named(item.namespace, item.name)
        if namesake is None or namesake.version <= item.version:
            self._names[item.namespace, item.name] = item.uid
        for name, key in self._keys.items():
            self._indexes[name][key(item)][item.uid] = item
        return True

    def drop(self, uid: str) -> T | None:
        """The object is gone for good. Returns what was known of it."""
        now = time.monotonic()
        self._gone[uid] = now
        while self._gone and now - next(iter(self._gone.values())) > _TOMBSTONE_S:
            del self._gone[next(iter(self._gone))]
        known = self._items.pop(uid, None)
        if known is not None:
            self._unindex(known)
            if self._names.get((known.namespace, known.name)) == uid:
                del self._names[known.namespace, known.name]
        return known

    def replace(
        self, items: Iterable[T], version: int, covers: Callable[[T], bool] = lambda _: True
    ) -> tuple[list[T], list[T]]:
        """Take a consistent list made at `version`. What it lacks and is not newer is gone. Returns what changed, and
        what is gone."""
        listed = {item.uid: item for item in items}
        changed = [item for item in listed.values() if self.put(item)]
        lost = [i.uid for i in self._items.values() if i.uid not in listed and i.version <= version and covers(i)]
        return changed, [item for uid in lost if (item := self.drop(uid)) is not None]

    def _unindex(self, item: T) -> None:
        for name, key in self._keys.items():
            index = self._indexes[name]
            held = index[key(item)]
            held.pop(item.uid, None)
            if not held:
                del index[key(item)]


class Cache:
    """The three kinds that the operator watches."""

    def __init__(self) -> None:
        self.pools: Shelf[Pool] = Shelf()
        self.leases: Shelf[Lease] = Shelf(
            pool=lambda lease: f"{lease.namespace}/{lease.pool}",
            waiting=lambda lease: f"{lease.namespace}/{lease.pool}" if lease.waiting else "",
        )
        self.pods: Shelf[Pod] = Shelf(
            pool=lambda pod: f"{pod.namespace}/{pod.pool_uid}",
            lease=lambda pod: f"{pod.namespace}/{pod.lease_uid}",
            idle=_idle,
        )

    def uids(self) -> set[str]:
        """Of everything."""
        return {item.uid for shelf in (self.pools, self.leases, self.pods) for item in shelf}


def _idle(pod: Pod) -> str:
    serves = pod.ready and not pod.lease_uid and not pod.terminating
    return f"{pod.namespace}/{pod.pool_uid}" if serves else ""
