"""The plane of cost and quality: aggregate scores, the non-dominated set and its knee."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A candidate's cost (USD per task, above 0) and score (higher is better)."""

    name: str
    cost: float
    score: float


def aggregate_scores(table: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Mean over benchmarks of the min–max normalised score: candidate -> value in [0, 1].

    `table` is candidate -> benchmark -> score. A benchmark on which all candidates are equal tells nothing and counts
    0.5 for each (our choice). Raises ValueError naming a candidate and benchmark that was not run: a gap is not zero.
    """
    benchmarks = sorted({b for row in table.values() for b in row})
    for candidate, row in table.items():
        if gaps := [b for b in benchmarks if b not in row]:
            raise ValueError(f"{candidate} was not run on {', '.join(gaps)}; leave the benchmark out for all or run it")
    totals = dict.fromkeys(table, 0.0)
    for benchmark in benchmarks:
        values = [row[benchmark] for row in table.values()]
        low, spread = min(values), max(values) - min(values)
        for candidate, row in table.items():
            totals[candidate] += (row[benchmark] - low) / spread if spread > 0 else 0.5
    return {candidate: total / max(1, len(benchmarks)) for candidate, total in totals.items()}


def front(points: Sequence[Point]) -> list[Point]:
    """Non-dominated points by rising cost: none is at least as cheap and good, and better on one. Twins both stay."""
    kept = [p for p in points if not any(_dominates(q, p) for q in points)]
    return sorted(kept, key=lambda p: (p.cost, p.score, p.name))


def knee(points: Sequence[Point]) -> Point | None:
    """The point of a front furthest above the chord between its ends, on log cost with both axes scaled to [0, 1].

    None with fewer than three points, or when none lies above the chord. Raises ValueError on a cost of 0 or less.
    """
    if bad := [p for p in points if p.cost <= 0]:
        raise ValueError(f"{bad[0].name} costs {bad[0].cost}; log cost needs a cost above 0, check the price snapshot")
    if len(points) < 3:
        return None
    ordered = sorted(points, key=lambda p: p.cost)
    x0, x1 = math.log(ordered[0].cost), math.log(ordered[-1].cost)
    y0, y1 = ordered[0].score, ordered[-1].score
    if x1 == x0 or y1 == y0:
        return None
    # Scaled so that the chord runs from (0, 0) to (1, 1), the distance is (y − x) / √2.
    above = [((p.score - y0) / (y1 - y0) - (math.log(p.cost) - x0) / (x1 - x0), p) for p in ordered[1:-1]]
    best, point = max(above, key=lambda pair: pair[0])
    return point if best > 0 else None


def _dominates(a: Point, b: Point) -> bool:
    return a.cost <= b.cost and a.score >= b.score and (a.cost < b.cost or a.score > b.score)
