"""Best-fit-decreasing, packs and batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from occamy.training.packing import admit, best_fit_decreasing, pack, pack_batch
from occamy.training.views import TrainingSequence


def sequence(tokens: list[int], mask: list[int]) -> TrainingSequence:
    return TrainingSequence(
        tokens=np.array(tokens, np.int32),
        mask=np.array(mask, bool),
        logprobs=-np.arange(len(tokens), dtype=np.float32),
        versions=np.zeros(len(tokens), np.int32),
        episode_id="e",
        task_id="t",
        segment=0,
        n_segments=1,
        policy_tokens_run=sum(mask),
        policy_tokens_later=0,
        reward=1.0,
        success=True,
        steps=1,
    )


def test_prompt_of_one_and_response_of_four_make_four_targets() -> None:
    row = pack([sequence([9, 1, 2, 3, 4], [0, 1, 1, 1, 1])])
    assert row.source.tolist() == [0, 1, 2, 3]
    assert row.target.tolist() == [1, 2, 3, 4]


def test_positions_restart_and_boundaries_are_the_packers_own() -> None:
    # Token 3 closes every role, as in ChatML; only the packer knows that there are two documents.
    row = pack([sequence([7, 3, 8, 3], [0, 0, 1, 1]), sequence([5, 3], [0, 1])])
    assert row.tokens.tolist() == [7, 3, 8, 3, 5, 3]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert row.boundaries.tolist() == [0, 4, 6]
    assert row.source.tolist() == [1, 2, 4]
    assert row.target.tolist() == [8, 3, 3]
    assert row.document.tolist() == [0, 0, 1]


def test_values_and_behaviour_follow_the_order_of_the_targets() -> None:
    row = pack([sequence([7, 3, 8], [0, 0, 1]), sequence([5, 3], [0, 1])])
    assert row.behaviour().tolist() == [-2.0, -1.0]
    assert torch.equal(row.gather([np.array([0.5]), np.array([0.25])]), torch.tensor([0.5, 0.25], dtype=torch.float64))
    with pytest.raises(ValueError, match="document 1 has 1 targets, but 2 values"):
        row.gather([np.array([0.5]), np.array([0.25, 1.0])])


def test_best_fit_takes_the_fullest_bin_that_still_fits() -> None:
    # 6 opens bin 0, 5 opens bin 1; 4 fits bin 0 exactly (best) although bin 1 has room too; 3 and 2 fill bin 1.
    assert best_fit_decreasing([2, 6, 4, 5, 3], 10) == [[1, 2], [3, 4, 0]]
    with pytest.raises(ValueError, match="sequence 0 has 11 tokens, a pack takes 10"):
        best_fit_decreasing([11], 10)


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 50))
def test_every_sequence_is_in_exactly_one_bin_and_no_bin_overflows(lengths: list[int], size: int) -> None:
    bins = best_fit_decreasing(lengths, size)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= size for b in bins)
    # No two bins could have been one: best fit would have put the second's first item into the first.
    assert len(bins) <= 2 * -(-sum(lengths) // size) + 1


def test_what_cannot_train_is_counted_and_never_cut() -> None:
    fits, long, silent = sequence([1, 2], [0, 1]), sequence([1] * 5, [0, 1, 1, 1, 1]), sequence([1, 2, 3], [0, 0, 0])
    kept, rejected = admit([fits, long, silent], max_length=4)
    assert kept == [fits]
    assert rejected == {"no_target": 1, "too_long": 1}


@given(st.lists(st.integers(2, 12), min_size=1, max_size=20), st.integers(1, 4))
def test_ranks_share_the_same_packs_and_no_target_is_lost(lengths: list[int], world: int) -> None:
    batch = [sequence(list(range(n)), [0] + [1] * (n - 1)) for n in lengths]
    alone = pack_batch(batch, 16)
    shares = [pack_batch(batch, 16, rank=r, world=world) for r in range(world)]
    assert sum(len(p.target) for share in shares for p in share.packs) == alone.targets == sum(lengths) - len(lengths)
    assert {s.targets for s in shares} == {alone.targets}
    rows = sorted(p.tokens.tolist() for share in shares for p in share.packs)
    assert rows == sorted(p.tokens.tolist() for p in alone.packs)
