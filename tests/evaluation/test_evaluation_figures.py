"""Figures from records: prices, cost, the Pareto plane, what counts and what stands beside the score."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from occamy.contracts.episode import EpisodeRecord, Outcome, QuarantineReason
from occamy.evaluation.cost import episode_cost, price_sensitivity
from occamy.evaluation.pareto import Point, aggregate_scores, front, knee
from occamy.evaluation.prices import PriceSnapshot, load_prices
from occamy.evaluation.summary import difference, figures, pareto

PRICES = PriceSnapshot(name="test", date="2026-09-01", source="test", input=2.0, cached=0.5, output=10.0)  # type: ignore[arg-type]
BOOT = {"resamples": 200, "seed": 0}


def episode(task: str = "t1", trial: int = 0, success: bool = True, **changes: Any) -> EpisodeRecord:
    """A scored episode of 1,000 prompt tokens (400 cached) and 100 sampled ones, unless changed."""
    base: dict[str, Any] = {
        "episode_id": f"{task}-{trial}",
        "task_id": task,
        "task_digest": f"sha256:{task}",
        "pool": "long",
        "split": "test",
        "trial": trial,
        "seed": 1,
        "sampled_by": "policy",
        "outcome": Outcome.completed,
        "score": 1.0 if success else 0.0,
        "reward": 1.0 if success else 0.0,
        "success": success,
        "steps": 4,
        "tool_calls": 3,
        "failed_calls": 1,
        "segments": 1,
        "input_tokens": 1000,
        "cached_tokens": 400,
        "output_tokens": 100,
        "wall_seconds": 2.0,
        "harness_digest": "sha256:h",
        "final_fingerprint": "sha256:f",
        "model": "base",
        "version_min": 0,
        "version_max": 0,
    }
    return EpisodeRecord(**(base | changes))


def test_cost_by_hand_counts_cached_tokens_once() -> None:
    # 600 fresh × 2 + 400 cached × 0.5 + 100 sampled × 10 = 1200 + 200 + 1000 = 2400 per million
    assert episode_cost(episode(), PRICES) == pytest.approx(2400e-6)
    with pytest.raises(ValueError, match="1200 cached of 1000"):
        episode_cost(episode(cached_tokens=1200), PRICES)


def test_price_sensitivity_by_hand() -> None:
    got = price_sensitivity([episode()], PRICES)
    assert got["input"] == (pytest.approx(1800e-6), pytest.approx(3000e-6))
    assert got["cached"] == (pytest.approx(2300e-6), pytest.approx(2500e-6))
    assert got["output"] == (pytest.approx(1900e-6), pytest.approx(2900e-6))


def test_shipped_snapshot_says_that_it_is_an_example() -> None:
    prices = load_prices("2026-09")
    assert str(prices.date) == "2026-09-01"
    assert "example" in prices.source
    assert prices.cached < prices.input < prices.output
    with pytest.raises(ValueError, match=r"no price snapshot '2026-9'; .*2026-09"):
        load_prices("2026-9")


def test_figures_by_hand() -> None:
    records = [episode("t1", i, success=i < 2) for i in range(3)] + [episode("t2", i) for i in range(3)]
    got = figures("base", "long", records, PRICES, **BOOT)
    assert (got.tasks, got.episodes, got.infra_failed, got.quarantined) == (2, 6, 0, 0)
    assert got.success.mean == pytest.approx((2 / 3 + 1) / 2)
    assert got.pass_hat_3 is not None and got.pass_hat_3.mean == pytest.approx((0 + 1) / 2)
    assert got.gap == pytest.approx(5 / 6 - 1 / 2)
    assert (got.input_tokens, got.cached_tokens, got.output_tokens, got.steps) == (1000, 400, 100, 4)
    assert got.cost.mean == pytest.approx(2400e-6)
    assert got.success.low <= got.success.mean <= got.success.high


def test_infrastructure_failures_stand_beside_the_score() -> None:
    broken = {"success": False, "outcome": Outcome.infra_failed, "quarantine": QuarantineReason.infra_failed}
    drifted = {"quarantine": QuarantineReason.state_drift}
    records = [episode("t1", 0), episode("t1", 1, **broken), episode("t1", 2, **drifted), episode("t2", 0, **broken)]
    got = figures("base", "long", records, PRICES, **BOOT)
    assert (got.tasks, got.episodes, got.infra_failed, got.quarantined) == (1, 1, 2, 1)
    assert got.success.mean == 1.0
    assert (got.pass_hat_3, got.pass_hat_3_undefined, got.gap) == (None, 1, None)
    with pytest.raises(ValueError, match="base has no scored episode in pool 'short'"):
        figures("base", "short", records, PRICES, **BOOT)


def test_timeouts_are_failures_inside_the_score() -> None:
    records = [episode("t1", 0), episode("t1", 1, success=False, outcome=Outcome.timed_out)]
    got = figures("base", "mixed", records, PRICES, **BOOT)
    assert (got.success.mean, got.timeouts) == (0.5, 0.5)


def test_difference_pairs_by_task_and_trial_whatever_the_order() -> None:
    ours = [episode("t1", 0), episode("t1", 1), episode("t2", 0)]
    theirs = [episode("t2", 0, False), episode("t1", 1, True), episode("t1", 0, False), episode("t9", 0)]
    got = difference("sao", "base", "mixed", ours, theirs, **BOOT)
    assert (got.tasks, got.won, got.lost) == (2, 2, 0)
    assert got.success.mean == pytest.approx((0.5 + 1.0) / 2)
    with pytest.raises(ValueError, match="share no scored trial"):
        difference("sao", "base", "short", ours, theirs, **BOOT)


def test_aggregate_scores_by_hand() -> None:
    table = {"a": {"x": 10.0, "y": 0.2}, "b": {"x": 30.0, "y": 0.2}, "c": {"x": 20.0, "y": 0.2}}
    # x: 0, 1, 1/2; y tells nothing: 1/2 each
    assert aggregate_scores(table) == pytest.approx({"a": 0.25, "b": 0.75, "c": 0.5})
    with pytest.raises(ValueError, match="b was not run on y"):
        aggregate_scores({"a": {"x": 1, "y": 1}, "b": {"x": 1}})


def test_front_and_knee_by_hand() -> None:
    points = [
        Point("cheap", 1.0, 0.0),
        Point("knee", 10.0, 0.9),
        Point("flat", 100.0, 0.95),
        Point("dear", 1000.0, 1.0),
        Point("bad", 20.0, 0.5),
    ]
    best = front(points)
    assert [p.name for p in best] == ["cheap", "knee", "flat", "dear"]
    found = knee(best)  # above the chord by 0.9 − 1/3 against 0.95 − 2/3
    assert found is not None and found.name == "knee"


def test_knee_needs_a_bend() -> None:
    a, b, c = Point("a", 1.0, 0.0), Point("b", 10.0, 0.4), Point("c", 100.0, 1.0)
    assert knee([a, c]) is None
    assert knee([a, b, c]) is None  # below the chord: 0.4 against 1/2
    with pytest.raises(ValueError, match="a costs 0"):
        knee([Point("a", 0.0, 1.0)])


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_front_is_exactly_what_nothing_dominates(pairs: list[tuple[int, int]]) -> None:
    points = [Point(str(i), float(c), float(s)) for i, (c, s) in enumerate(pairs)]
    best = front(points)
    assert best
    for p in points:
        beaten = any(q.cost <= p.cost and q.score >= p.score and (q.cost, q.score) != (p.cost, p.score) for q in points)
        assert (p in best) != beaten
    assert all(a.cost <= b.cost and a.score <= b.score for a, b in itertools.pairwise(best))


def test_pareto_places_every_candidate_once() -> None:
    rows = []
    for name, wins, tokens in (("base", 1, 100), ("soup", 2, 200), ("sao", 3, 150)):
        for pool in ("long", "short"):
            records = [episode(f"{pool}1", i, success=i < wins, pool=pool, output_tokens=tokens) for i in range(3)]
            rows.append(figures(name, pool, records, PRICES, **BOOT))  # type: ignore[arg-type]
    placed = {p.candidate: p for p in pareto(rows)}
    assert {n: p.score for n, p in placed.items()} == pytest.approx({"base": 0.0, "soup": 0.5, "sao": 1.0})
    assert {n for n, p in placed.items() if p.on_front} == {"base", "sao"}
    assert placed["sao"].cost == pytest.approx((1400 + 1500) / 1e6)
    assert math.isclose(placed["base"].cost, 2400e-6)
