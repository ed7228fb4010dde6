"""Whether the operator still sees the cluster: lists succeed, and watches tell what lists show. Pure but for the clock
that it is given."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

SILENT_S = 45.0
"""How long a watch may owe a change that a list has shown. Our choice."""
BLIND_S = 120.0
"""How long the last complete list may be ago. Our choice."""


class Freshness:
    """Compares what lists show with what watches told."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told: dict[tuple[str, str], int] = {}
        self._owed: dict[tuple[str, str], tuple[int, float]] = {}
        self._listed = clock()
        self._begun = False

    def told(self, kind: str, uid: str, version: int, gone: bool = False) -> None:
        """A watch told of this version, or of the end of the object."""
        owed = self._owed.get((kind, uid))
        if owed is not None and (gone or owed[0] <= version):
            del self._owed[kind, uid]
        if gone:
            self._told.pop((kind, uid), None)
        else:
            self._told[kind, uid] = max(version, self._told.get((kind, uid), 0))

    def listed(self, kind: str, versions: Iterable[tuple[str, int]]) -> None:
        """A list showed these versions."""
        now = self._clock()
        for uid, version in versions:
            if version > self._told.get((kind, uid), 0):
                self._owed.setdefault((kind, uid), (version, now))

    def complete(self, alive: Container[str]) -> None:
        """All lists of one round have succeeded. An object that is not alive any more owes nothing."""
        self._listed = self._clock()
        self._begun = True
        self._owed = {key: owed for key, owed in self._owed.items() if key[1] in alive}
        self._told = {key: version for key, version in self._told.items() if key[1] in alive}

    def age(self) -> float:
        """Seconds since the last complete round."""
        return self._clock() - self._listed

    def lag(self) -> float:
        """Seconds for which a watch has owed the oldest change."""
        oldest = min((since for _, since in self._owed.values()), default=None)
        return 0.0 if oldest is None else self._clock() - oldest

    def unready(self) -> list[str]:
        """Why no lease is served now; empty while they are. Nothing is done before everything has been listed once."""
        return self.problems() or ([] if self._begun else ["the cluster has not been listed yet"])

    def problems(self) -> list[str]:
        """Why the operator should be restarted; empty while all is well."""
        found = []
        if (age := self.age()) > BLIND_S:
            found.append(f"no complete list of the cluster for {age:.0f} s")
        if (lag := self.lag()) > SILENT_S:
            kinds = ", ".join(sorted({kind for kind, _ in self._owed}))
            found.append(f"the watch of {kinds} has owed a change for {lag:.0f} s")
        return found
