"""A queue of keys to reconcile: each key waits once, and is worked on by one worker at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 10.0


class Queue(Generic[K]):
    """For one event loop; not for threads."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._dirty: set[K] = set()
        self._working: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}

    def add(self, key: K) -> None:
        """Have the key worked on, again if somebody is at it."""
        if key not in self._dirty:
            self._dirty.add(key)
            if key not in self._working:
                self._ready.put_nowait(key)

    def add_after(self, key: K, seconds: float) -> None:
        """Have it worked on later; the earliest of several moments counts."""
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, seconds)
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= at:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(at, self._due, key)

    def retry(self, key: K, at_least: float = 0.0) -> float:
        """Have a key that failed worked on again, later each time. Returns in how many seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = max(at_least, min(_LAST_RETRY_S, _FIRST_RETRY_S * 2.0 ** (failures - 1)))
        self.add_after(key, delay)
        return delay

    def cancel(self, key: K) -> None:
        """Nothing is left to do for the key: what was planned for later is not."""
        if timer := self._timers.pop(key, None):
            timer.cancel()

    def forget(self, key: K) -> None:
        """It succeeded: the next failure counts as the first."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """Wait for a key; call `done` with it afterwards."""
        key = await self._ready.get()
        self._dirty.discard(key)
        self._working.add(key)
        return key

    def done(self, key: K) -> None:
        """The worker has finished with the key."""
        self._working.discard(key)
        if key in self._dirty:
            self._ready.put_nowait(key)

    def close(self) -> None:
        """Cancel what is planned for later."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)
