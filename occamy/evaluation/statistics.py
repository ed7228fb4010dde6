"""Repeated-trial statistics: pass@k, pass^k, bootstrap intervals over tasks and paired comparisons. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from occamy.contracts.evaluation import Interval

Floats = NDArray[np.float64]


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Chance that at least one of k trials drawn from n (c of them successful) succeeds: ``1 − C(n−c,k)/C(n,k)``.

    None when n < k: undefined, never 0 or 1. Raises ValueError on counts that cannot be.
    """
    _check(n, c, k)
    return None if n < k else 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float | None:
    """pass^k, the chance that all of k trials drawn from n succeed: ``C(c,k)/C(n,k)`` (not ``(c/n)^k``).

    None when n < k: undefined, never 0 or 1. Raises ValueError on counts that cannot be.
    """
    _check(n, c, k)
    return None if n < k else math.comb(c, k) / math.comb(n, k)


def defined(values: Sequence[float | None]) -> tuple[list[float], int]:
    """Split task values into the defined ones, in order, and the number of undefined ones."""
    kept = [v for v in values if v is not None]
    return kept, len(values) - len(kept)


def bootstrap_mean(values: Sequence[float], *, resamples: int, seed: int, level: float = 0.95) -> Interval:
    """Mean of per-task values [tasks] with a percentile bootstrap interval over tasks.

    Equal inputs give equal intervals. Raises ValueError when there is no task.
    """
    if not values:
        raise ValueError("no task to average over; evaluate at least one task that has a scored episode")
    x = np.asarray(values, dtype=np.float64)
    low, high = np.quantile(_resampled_means(x, resamples, seed), [(1 - level) / 2, (1 + level) / 2])
    mean = float(x.mean())
    return Interval(mean=mean, low=min(float(low), mean), high=max(float(high), mean))


@dataclass(frozen=True)
class Paired:
    """Outcome of a paired comparison."""

    difference: Interval
    won: int
    lost: int
    p_value: float


def paired_difference(
    ours: Sequence[Sequence[bool | None]],
    theirs: Sequence[Sequence[bool | None]],
    *,
    resamples: int,
    seed: int,
    level: float = 0.95,
) -> Paired:
    """Compare two candidates on the same tasks and trial seeds, both [tasks][trials]; None is a trial without a score.

    Only pairs with both scores count. The interval resamples tasks and keeps the pairing (paired bootstrap); the
    p-value is McNemar's exact test over pairs. Raises ValueError on unequal shapes or when no pair is left.
    """
    differences: list[float] = []
    won = lost = 0
    for task, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if len(a) != len(b):
            raise ValueError(f"task {task} has {len(a)} and {len(b)} trials; compare candidates on the same trials")
        pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
        if pairs:
            won += sum(x and not y for x, y in pairs)
            lost += sum(y and not x for x, y in pairs)
            differences.append(sum(int(x) - int(y) for x, y in pairs) / len(pairs))
    interval = bootstrap_mean(differences, resamples=resamples, seed=seed, level=level)
    return Paired(interval, won, lost, mcnemar(won, lost))


def mcnemar(won: int, lost: int) -> float:
    """Exact two-sided McNemar p-value: a fair coin over the won + lost discordant pairs."""
    n = won + lost
    tail = sum(math.comb(n, i) for i in range(min(won, lost) + 1))
    return float(min(1.0, 2 * tail / 2**n))


def _resampled_means(x: Floats, resamples: int, seed: int) -> Floats:
    """Means of `resamples` draws of len(x) tasks with replacement, [resamples], in blocks that stay small."""
    rng = np.random.default_rng(seed)
    block = max(1, 1_000_000 // len(x))
    counts = [min(block, resamples - start) for start in range(0, resamples, block)]
    return np.concatenate([x[rng.integers(0, len(x), (n, len(x)))].mean(axis=1) for n in counts])


def _check(n: int, c: int, k: int) -> None:
    if k < 1 or not 0 <= c <= n:
        raise ValueError(f"n={n} trials, c={c} successes, k={k}; need 0 ≤ c ≤ n and k ≥ 1")
