"""Repeated-trial statistics against numbers worked out by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from occamy.evaluation.statistics import (
    bootstrap_mean,
    defined,
    mcnemar,
    paired_difference,
    pass_at_k,
    pass_hat_k,
)


@pytest.mark.parametrize(
    ("n", "c", "k", "at", "hat"),
    [
        (3, 2, 2, 1.0, 1 / 3),  # not (2/3)^2 = 4/9
        (4, 3, 2, 1.0, 1 / 2),
        (3, 3, 3, 1.0, 1.0),
        (3, 2, 3, 1.0, 0.0),
        (3, 0, 1, 0.0, 0.0),
        (4, 1, 2, 1 / 2, 0.0),
        (2, 2, 3, None, None),  # fewer trials than k: undefined, not 1
        (0, 0, 1, None, None),
    ],
)
def test_pass_at_k_and_pass_hat_k(n: int, c: int, k: int, at: float | None, hat: float | None) -> None:
    assert pass_at_k(n, c, k) == (at if at is None else pytest.approx(at))
    assert pass_hat_k(n, c, k) == (hat if hat is None else pytest.approx(hat))


@given(st.integers(1, 7), st.data())
def test_both_count_draws_without_replacement(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(all(d) for d in draws) / len(draws))


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="n=3 trials, c=4"):
        pass_at_k(3, 4, 1)
    with pytest.raises(ValueError, match="k=0"):
        pass_hat_k(3, 1, 0)


def test_undefined_values_are_left_out_and_counted() -> None:
    assert defined([1.0, None, 0.0, None]) == ([1.0, 0.0], 2)


def test_bootstrap_is_seeded_and_brackets_the_mean() -> None:
    values = [0.0, 1.0] * 50
    a = bootstrap_mean(values, resamples=2000, seed=3)
    assert a == bootstrap_mean(values, resamples=2000, seed=3)
    assert a.mean == 0.5
    half = 1.96 * math.sqrt(0.25 / 100)  # normal approximation of a share of 100 tasks: ±0.098
    assert a.low == pytest.approx(0.5 - half, abs=0.02)
    assert a.high == pytest.approx(0.5 + half, abs=0.02)


def test_bootstrap_of_equal_values_has_no_width() -> None:
    one = bootstrap_mean([0.25, 0.25], resamples=100, seed=0)
    assert (one.mean, one.low, one.high) == (0.25, 0.25, 0.25)
    with pytest.raises(ValueError, match="no task"):
        bootstrap_mean([], resamples=100, seed=0)


def test_more_resamples_than_a_block_are_all_drawn() -> None:
    wide = bootstrap_mean([0.0, 1.0] * 20_000, resamples=101, seed=0)  # blocks of 25 resamples
    assert wide.low < 0.5 < wide.high


@pytest.mark.parametrize(
    ("won", "lost", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (5, 0, 2 / 32), (0, 5, 2 / 32), (6, 1, 2 * (1 + 7) / 128)],
)
def test_mcnemar_by_hand(won: int, lost: int, p: float) -> None:
    assert mcnemar(won, lost) == pytest.approx(p)


def test_paired_difference_keeps_pairs_together() -> None:
    ours = [[True, True], [True, False], [False, None]]
    theirs = [[False, True], [True, False], [False, True]]
    paired = paired_difference(ours, theirs, resamples=500, seed=1)
    assert (paired.won, paired.lost) == (1, 0)
    assert paired.difference.mean == pytest.approx(
        (0.5 + 0 + 0) / 3
    )  # the trial without a score counts on neither side
    assert paired.difference.low >= 0


def test_pairing_removes_the_spread_between_tasks() -> None:
    easy_and_hard = [[True] * 3, [False] * 3] * 10
    better = [[True] * 3, [False, False, True]] * 10  # one more success on each hard task
    paired = paired_difference(better, easy_and_hard, resamples=1000, seed=1)
    assert paired.difference.mean == pytest.approx(1 / 6)
    assert paired.difference.low > 0.05
    assert paired.p_value == pytest.approx(2 / 2**10)


def test_unequal_trials_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="task 0 has 1 and 2 trials"):
        paired_difference([[True]], [[True, False]], resamples=100, seed=0)
