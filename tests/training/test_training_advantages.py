from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from occamy.training.advantages import (
    adaptive_lambda,
    explained_variance,
    gae,
    hdpo_group,
    normalised,
    run_advantages,
    strata_by_edges,
    strata_by_success,
    terminal_rewards,
    value_targets,
)

ALL = [True] * 4


def test_hdpo_accuracy_and_efficiency_are_decoupled() -> None:
    a = hdpo_group([1, 1, 0, 0], [4, 8, 6, 2], strata_by_success([1, 1, 0, 0]), ALL)
    # mean .5, std (ddof 1) = sqrt(4 * .25 / 3) = .57735; .5 / .57735 = .8660
    np.testing.assert_allclose(a.accuracy, [0.86602, 0.86602, -0.86602, -0.86602], atol=1e-5)
    np.testing.assert_allclose(a.efficiency, [1 / 3, -1 / 3, 0, 0])  # the short wrong episode gains nothing
    assert a.in_stratum.tolist() == [True, True, False, False]


def test_hdpo_standardised_preset_divides_by_the_sample_deviation() -> None:
    a = hdpo_group([1, 1, 0, 0], [4, 8, 6, 2], strata_by_success([1, 1, 0, 0]), ALL, preset="standardised")
    # R_eff = ±1/3, std (ddof 1) = sqrt(2/9) = .4714; (1/3) / .4714 = .7071
    np.testing.assert_allclose(a.efficiency, [0.70711, -0.70711, 0, 0], atol=1e-5)


def test_invalid_episodes_leave_before_any_statistic() -> None:
    a = hdpo_group([1, 0.9, 0, 0], [4, 1, 6, 2], strata_by_success([1, 1, 0, 0]), [True, False, True, True])
    # centred [.667, -, -.333, -.333], std (ddof 1) = .57735
    np.testing.assert_allclose(a.accuracy * (0.57735027 + 1e-6), [2 / 3, 0, -1 / 3, -1 / 3], atol=1e-8)
    assert a.efficiency.tolist() == [0, 0, 0, 0]  # one valid correct episode: no stratum to compare in
    assert a.in_stratum.tolist() == [True, False, False, False]


def test_infrastructure_failure_is_no_zero() -> None:
    """R5: [1, infra, 1] has no spread among the valid ones."""
    a = hdpo_group([1, 0, 1], [5, 1, 5], strata_by_success([1, 0, 1]), [True, False, True])
    assert a.accuracy.tolist() == [0, 0, 0]


def test_groups_without_signal_contribute_nothing() -> None:
    none = hdpo_group([1, 0], [3, 3], strata_by_success([1, 0]), [False, False])
    single = hdpo_group([1, 0], [3, 3], strata_by_success([1, 0]), [True, False])
    flat = hdpo_group([0.3, 0.3, 0.3], [3, 4, 5], strata_by_success([0, 0, 0]), [True] * 3)
    for a in (none, single, flat):
        assert not a.accuracy.any() and not a.efficiency.any()


def test_all_correct_group_still_learns_efficiency() -> None:
    a = hdpo_group([1, 1], [2, 6], strata_by_success([1, 1]), [True, True])
    assert a.accuracy.tolist() == [0, 0]
    assert a.efficiency.tolist() == [0.5, -0.5]
    equal = hdpo_group([1, 1], [6, 6], strata_by_success([1, 1]), [True, True])
    assert equal.efficiency.tolist() == [0, 0]


def test_member_of_the_stratum_with_mean_cost_stays_a_member() -> None:
    a = hdpo_group([1, 1, 1], [2, 4, 6], strata_by_success([1, 1, 1]), [True] * 3)
    assert a.efficiency.tolist() == [0.5, 0.0, -0.5]
    assert a.in_stratum.tolist() == [True] * 3


def test_edges_make_finer_strata() -> None:
    assert strata_by_edges([0.2, 0.5, 0.99, 1.0], [0.5, 1.0]).tolist() == [-1, 0, 0, 1]
    a = hdpo_group([0.5, 0.5, 1, 1], [2, 6, 10, 30], strata_by_edges([0.5, 0.5, 1, 1], [0.5, 1.0]), ALL)
    assert a.efficiency.tolist() == [0.5, -0.5, 0.5, -0.5]
    with pytest.raises(ValueError, match="increasing"):
        strata_by_edges([1.0], [1.0, 0.5])


def test_std_epsilon_is_a_parameter() -> None:
    a = hdpo_group([1, 0], [1, 1], strata_by_success([1, 0]), [True, True], std_epsilon=0.1)
    np.testing.assert_allclose(a.accuracy, [0.5 / (np.sqrt(0.5) + 0.1), -0.5 / (np.sqrt(0.5) + 0.1)])


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 50), st.booleans()), min_size=1, max_size=16))
def test_hdpo_is_centred_over_valid_episodes_and_zero_elsewhere(rows: list[tuple[float, int, bool]]) -> None:
    r, s, valid = (np.array(x) for x in zip(*rows, strict=True))
    a = hdpo_group(r, s, strata_by_success(r >= 0.5), valid)
    assert abs(a.accuracy.sum()) < 1e-6 and abs(a.efficiency.sum()) < 1e-9
    assert not a.accuracy[~valid].any() and not a.efficiency[~a.in_stratum].any()


def test_gae_ignores_the_value_of_a_masked_token() -> None:
    """R1: a masked value bootstraps nothing."""
    for masked_value in (100.0, -7.0):
        a = gae([0, 1, 0], [0, 0, masked_value], [1, 1, 0], gamma=1.0, lam=0.95)
        np.testing.assert_allclose(a, [0.95, 1.0, 0.0])


def test_gae_steps_over_observations() -> None:
    a = gae([0, 0, 0, 0, 0, 1], [0.1, 0.2, 9, 9, 0.3, 0.4], [1, 1, 0, 0, 1, 1], gamma=1.0, lam=1.0)
    np.testing.assert_allclose(a, [0.9, 0.8, 0, 0, 0.7, 0.6])


def test_reward_never_lands_on_a_masked_token() -> None:
    """R2: the last token is an observation; the reward goes to the last policy token, undecayed by tool tokens."""
    assert terminal_rewards(0.5, [1, 0, 1, 0, 0]).tolist() == [0, 0, 0.5, 0, 0]
    a = gae(terminal_rewards(1.0, [1, 0, 0, 1, 0]), [0] * 5, [1, 0, 0, 1, 0], gamma=1.0, lam=0.5)
    assert a.tolist() == [0.5, 0, 0, 1.0, 0]
    with pytest.raises(ValueError, match="masked token 2"):
        gae([0, 0, 1], [0, 0, 0], [1, 1, 0], gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="without a policy token"):
        terminal_rewards(1.0, [0, 0])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.floats(0.3, 1.0), st.floats(0.1, 1.0))
def test_any_split_into_segments_gives_the_same_advantages(lengths: list[int], lam: float, reward: float) -> None:
    total = sum(lengths)
    masks = [[0] + [1] * n for n in lengths]
    got = run_advantages(reward, [np.zeros(n + 1) for n in lengths], masks, gamma=1.0, lam=lam)
    flat = np.concatenate([a[1:] for a in got])
    np.testing.assert_allclose(flat, reward * lam ** (total - 1 - np.arange(total)), rtol=1e-9)


def test_adaptive_lambda_and_the_reading_of_its_length() -> None:
    assert adaptive_lambda(1.5, 1) == pytest.approx(1 / 3)
    assert adaptive_lambda(1.5, 100) == pytest.approx(1 - 1 / 150)
    assert adaptive_lambda(0.5, 1) == 0.0
    n = 10_000  # four equal segments: factor of the first one, by run and by segment length
    assert adaptive_lambda(1.5, 4 * n) ** (3 * n) == pytest.approx(0.607, abs=1e-3)
    assert adaptive_lambda(1.5, n) ** (3 * n) == pytest.approx(0.135, abs=1e-3)
    with pytest.raises(ValueError, match="length 0"):
        adaptive_lambda(1.5, 0)


def test_segment_lambdas_use_their_own_factor() -> None:
    got = run_advantages(1.0, [[0, 0], [0]], [[1, 1], [1]], gamma=1.0, lam=[0.5, 0.25])
    assert got[0].tolist() == [0.25, 0.5]  # local [.5, 1] times .5 for one later token
    assert got[1].tolist() == [1.0]


def test_value_targets_are_the_discounted_return_of_the_run() -> None:
    plain = value_targets(0.8, [[1, 0, 1], [1]], gamma=1.0)
    assert [t.tolist() for t in plain] == [[0.8, 0, 0.8], [0.8]]
    discounted = value_targets(1.0, [[1, 0, 1], [1]], gamma=0.5)
    assert [t.tolist() for t in discounted] == [[0.25, 0, 0.5], [1.0]]


def test_explained_variance() -> None:
    assert explained_variance([0, 1], [0, 1]) == 1.0
    assert explained_variance([0.5, 0.5], [0, 1]) == 0.0
    assert explained_variance([1, 2], [3, 3]) == 0.0


def test_normalisation_counts_policy_tokens_only() -> None:
    got = normalised([np.array([1.0, 99.0]), np.array([3.0])], [[1, 0], [1]], epsilon=0.0)
    assert got[0].tolist() == [-1.0, 0.0] and got[1].tolist() == [1.0]
