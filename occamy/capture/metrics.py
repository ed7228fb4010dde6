"""What a proxy counts, in Prometheus' text format (version 0.0.4). Written and read on the event loop only."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds in seconds (our choice: half a decade each)."""


class Metrics:
    """Counts of one proxy process."""

    def __init__(self) -> None:
        self.held = 0
        """Calls that wait for an engine that is down or updated, or for their paused episode."""
        self.in_flight = 0
        """Calls between request and answer."""
        self._calls: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._buckets = [0] * (len(_BUCKETS) + 1)
        self._seconds = 0.0

    def answered(self, prefix: str, prompt: int, cached: int, sampled: int, seconds: float) -> None:
        """Count an answered call of a prefix class, its tokens and its time from request to answer."""
        self._calls[prefix] += 1
        self._tokens.update(prompt=prompt, cached=cached, sampled=sampled)
        self._buckets[bisect_left(_BUCKETS, seconds)] += 1
        self._seconds += seconds

    def refused(self, code: str) -> None:
        """Count an answer in error format."""
        self._refused[code] += 1

    def text(self, open_episodes: int) -> str:
        """Return all of it as text."""
        return "".join(
            [
                _family("calls_total", "counter", "Answered calls by prefix class.", _labelled("class", self._calls)),
                _family("refused_total", "counter", "Error answers by code.", _labelled("code", self._refused)),
                _family("tokens_total", "counter", "Tokens of answered calls.", _labelled("kind", self._tokens)),
                _family("call_seconds", "histogram", "From request to answer.", self._histogram()),
                _family("held_calls", "gauge", "Calls that wait for engine or resume.", [("", self.held)]),
                _family("calls_in_flight", "gauge", "Calls not yet answered.", [("", self.in_flight)]),
                _family("open_episodes", "gauge", "Episodes in memory.", [("", open_episodes)]),
            ]
        )

    def _histogram(self) -> list[tuple[str, float]]:
        rows: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip((*map(str, _BUCKETS), "+Inf"), self._buckets, strict=True):
            below += count
            rows.append((f'_bucket{{le="{bound}"}}', below))
        return [*rows, ("_sum", self._seconds), ("_count", below)]


def add_up(texts: Iterable[str]) -> str:
    """Return the metrics of several proxies as if they were one: equal samples are summed."""
    families: dict[str, dict[str, float]] = {}
    for text in texts:
        for line in text.splitlines():
            if line.startswith("# HELP"):
                head = line
            elif line.startswith("# TYPE"):
                samples = families.setdefault(f"{head}\n{line}\n", {})
            else:
                name, value = line.rsplit(" ", 1)
                samples[name] = samples.get(name, 0.0) + float(value)
    return "".join(
        head + "".join(f"{name} {value}\n" for name, value in samples.items()) for head, samples in families.items()
    )


def _labelled(label: str, counts: Counter[str]) -> list[tuple[str, float]]:
    return [(f'{{{label}="{value}"}}', count) for value, count in sorted(counts.items())]


def _family(name: str, kind: str, meaning: str, rows: list[tuple[str, float]]) -> str:
    full = f"occamy_capture_{name}"
    samples = "".join(f"{full}{suffix} {value}\n" for suffix, value in rows)
    return f"# HELP {full} {meaning}\n# TYPE {full} {kind}\n{samples}"
