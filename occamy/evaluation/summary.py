"""From episode records to figures: one row per candidate and pool, tested differences, the Pareto plane."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from occamy.contracts.episode import EpisodeRecord, Outcome
from occamy.contracts.evaluation import EvaluationPool, Interval, PairedDifference, ParetoPoint, PoolFigures
from occamy.evaluation.cost import episode_cost
from occamy.evaluation.pareto import Point, aggregate_scores, front, knee
from occamy.evaluation.prices import PriceSnapshot
from occamy.evaluation.statistics import bootstrap_mean, defined, paired_difference, pass_hat_k

Records = Sequence[EpisodeRecord]


def scored(records: Iterable[EpisodeRecord]) -> list[EpisodeRecord]:
    """Episodes that count: neither an infrastructure failure nor quarantined."""
    return [r for r in records if r.quarantine is None and r.outcome is not Outcome.infra_failed]


def in_pool(records: Iterable[EpisodeRecord], pool: EvaluationPool) -> list[EpisodeRecord]:
    """Episodes of a pool; mixed is all of them."""
    return [r for r in records if pool in ("mixed", r.pool)]


def figures(
    candidate: str,
    pool: EvaluationPool,
    records: Records,
    prices: PriceSnapshot,
    *,
    resamples: int,
    seed: int,
    level: float = 0.95,
) -> PoolFigures:
    """Figures of one candidate on one pool, from all its records.

    Raises ValueError naming both when no episode of the pool was scored.
    """
    pooled = in_pool(records, pool)
    kept = scored(pooled)
    if not kept:
        raise ValueError(
            f"{candidate} has no scored episode in pool {pool!r} ({len(pooled)} failed for infrastructure reasons or "
            "were quarantined); read their errors and evaluate again"
        )
    tasks = by_task(kept)

    def interval(values: Sequence[float]) -> Interval:
        return bootstrap_mean(values, resamples=resamples, seed=seed, level=level)

    hats = [pass_hat_k(len(rs), sum(r.success for r in rs), 3) for rs in tasks.values()]
    rates = [_mean(r.success for r in rs) for rs in tasks.values()]
    repeatable, undefined = defined(hats)
    gaps = [rate - hat for rate, hat in zip(rates, hats, strict=True) if hat is not None]
    infra = sum(r.outcome is Outcome.infra_failed for r in pooled)
    return PoolFigures(
        candidate=candidate,
        pool=pool,
        tasks=len(tasks),
        episodes=len(kept),
        infra_failed=infra,
        quarantined=len(pooled) - len(kept) - infra,
        success=interval(rates),
        partial=interval([_mean(r.score for r in rs) for rs in tasks.values()]),
        pass_hat_3=interval(repeatable) if repeatable else None,
        pass_hat_3_undefined=undefined,
        gap=_mean(gaps) if gaps else None,
        input_tokens=_mean(r.input_tokens for r in kept),
        cached_tokens=_mean(r.cached_tokens for r in kept),
        output_tokens=_mean(r.output_tokens for r in kept),
        steps=_mean(r.steps for r in kept),
        tool_calls=_mean(r.tool_calls for r in kept),
        failed_calls=_mean(r.failed_calls for r in kept),
        segments=_mean(r.segments for r in kept),
        wall_seconds=_mean(r.wall_seconds for r in kept),
        timeouts=_mean(r.outcome is Outcome.timed_out for r in kept),
        cost=interval([_mean(episode_cost(r, prices) for r in rs) for rs in tasks.values()]),
    )


def difference(
    candidate: str,
    against: str,
    pool: EvaluationPool,
    ours: Records,
    theirs: Records,
    *,
    resamples: int,
    seed: int,
    level: float = 0.95,
) -> PairedDifference:
    """Tested difference in success on the tasks and trials that both have. Raises ValueError when they share none."""
    a, b = _outcomes(in_pool(ours, pool)), _outcomes(in_pool(theirs, pool))
    keys = sorted(a.keys() & b.keys())
    grid: dict[str, list[tuple[bool | None, bool | None]]] = defaultdict(list)
    for task, trial in keys:
        grid[task].append((a[task, trial], b[task, trial]))
    rows = [pairs for pairs in grid.values() if any(x is not None and y is not None for x, y in pairs)]
    if not rows:
        raise ValueError(f"{candidate} and {against} share no scored trial in pool {pool!r}; evaluate them together")
    paired = paired_difference(
        [[x for x, _ in pairs] for pairs in rows],
        [[y for _, y in pairs] for pairs in rows],
        resamples=resamples,
        seed=seed,
        level=level,
    )
    return PairedDifference(
        candidate=candidate,
        against=against,
        pool=pool,
        tasks=len(rows),
        success=paired.difference,
        won=paired.won,
        lost=paired.lost,
        p_value=paired.p_value,
    )


def pareto(rows: Sequence[PoolFigures]) -> tuple[ParetoPoint, ...]:
    """Place candidates on cost and aggregate score, with the pools as benchmarks (mixed would count them twice)."""
    single = [r for r in rows if r.pool != "mixed"]
    success: dict[str, dict[str, float]] = defaultdict(dict)
    costs: dict[str, list[float]] = defaultdict(list)
    for row in single:
        success[row.candidate][row.pool] = row.success.mean
        costs[row.candidate].append(row.cost.mean)
    scores = aggregate_scores(success)
    points = [Point(name, _mean(costs[name]), score) for name, score in scores.items()]
    best = front(points)
    bend = knee(best)
    return tuple(
        ParetoPoint(candidate=p.name, cost=p.cost, score=p.score, on_front=p in best, knee=p == bend) for p in points
    )


def by_task(records: Iterable[EpisodeRecord]) -> Mapping[str, list[EpisodeRecord]]:
    """Records grouped by task id, tasks in sorted order."""
    groups: dict[str, list[EpisodeRecord]] = defaultdict(list)
    for record in records:
        groups[record.task_id].append(record)
    return dict(sorted(groups.items()))


def _outcomes(records: Records) -> dict[tuple[str, int], bool | None]:
    kept = {r.episode_id for r in scored(records)}
    return {(r.task_id, r.trial): (r.success if r.episode_id in kept else None) for r in records}


def _mean(values: Iterable[float]) -> float:
    items = list(values)
    return sum(items) / len(items)
