"""Draws against hand-computed values; independence from the batch; SGLang's log-prob convention."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from occamy.engines.local.sampling import SamplingParams, SamplingTable, draw, truncate, uniform

LOGITS = torch.tensor([0.0, 1.0, 2.0]).repeat(4, 1)


def params(temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, seed: int = 0) -> SamplingParams:
    return SamplingParams(temperature, top_p, top_k, 8, frozenset(), seed)


def table(*rows: SamplingParams) -> SamplingTable:
    made = SamplingTable(len(rows))
    for row, one in enumerate(rows):
        made.set(row, one)
    return made


def test_draw_inverts_the_cumulated_distribution() -> None:
    probs = torch.tensor([[0.125, 0.0, 0.375, 0.5, 0.0]]).repeat(5, 1)
    uniforms = torch.tensor([0.0, 0.1249, 0.125, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(probs, uniforms).tolist() == [0, 0, 2, 3, 3]


def test_truncate_keeps_the_smallest_set_that_reaches_top_p_and_at_most_k() -> None:
    probs = torch.tensor([[0.1, 0.5, 0.25, 0.15]]).repeat(4, 1)
    kept = truncate(probs, torch.tensor([0.6, 1.0, 0.01, 0.5]), torch.tensor([-1, 3, 1, -1]))
    assert torch.equal(kept > 0, torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 0, 0]]).bool())
    assert kept[0, 1] == 0.5


def test_logprob_is_of_the_temperature_scaled_distribution_before_truncation() -> None:
    rows = table(params(temperature=2.0, top_k=1), params(temperature=0.0), params(temperature=0.5, top_p=0.01))
    ids, logprobs, _ = rows.sample(LOGITS[:3], np.arange(3), np.arange(3))
    assert ids == [2, 2, 2]
    for logprob, scaled in zip(logprobs, ([0, 0.5, 1], [0, 1, 2], [0, 2, 4]), strict=True):
        assert math.isclose(logprob, scaled[2] - math.log(sum(map(math.exp, scaled))), abs_tol=1e-6)


def test_frequencies_follow_the_distribution() -> None:
    n = 20000
    rows = table(params(seed=5))
    ids, _, _ = rows.sample(LOGITS[:1].expand(n, 3), np.zeros(n, dtype=np.int64), np.arange(n))
    share = np.bincount(ids, minlength=3) / n
    expected = np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum()  # [0.090, 0.245, 0.665]
    assert np.abs(share - expected).max() < 4 * math.sqrt(0.25 / n)


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    grid = np.stack([uniform(np.full(2000, s, dtype=np.uint64), np.arange(2000)) for s in range(4)])
    assert np.abs(np.corrcoef(grid) - np.eye(4)).max() < 0.1
    assert abs(np.corrcoef(grid[0, 1:], grid[0, :-1])[0, 1]) < 0.1
    assert len(np.unique(grid)) == grid.size and grid.min() >= 0 and grid.max() < 1


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 5000)), min_size=1, max_size=6))
def test_a_draw_does_not_depend_on_the_rest_of_the_batch(keys: list[tuple[int, int]]) -> None:
    logits = torch.linspace(-1, 1, 7)[None]
    rows = table(*(params(temperature=0.7, top_p=0.9, seed=seed) for seed, _ in keys))
    positions = np.array([position for _, position in keys])
    together, _, _ = rows.sample(logits.expand(len(keys), 7), np.arange(len(keys)), positions)
    alone = [rows.sample(logits, np.array([i]), positions[i : i + 1])[0][0] for i in range(len(keys))]
    assert together == alone


def test_not_finite_logits_give_a_nan_logprob_in_their_own_row_only() -> None:
    logits = LOGITS[:2].clone()
    logits[0, 1] = torch.nan
    _, logprobs, _ = table(params(), params()).sample(logits, np.arange(2), np.arange(2))
    assert math.isnan(logprobs[0]) and math.isfinite(logprobs[1])
