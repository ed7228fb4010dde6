from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from occamy.training.losses import critic_loss, gate, hdpo_loss, sao_loss

LN = math.log


def _hdpo(logprobs: Tensor, **over: object) -> dict[str, Tensor]:
    args: dict[str, object] = {
        "behaviour": torch.zeros(3),
        "accuracy": torch.tensor([1.0, 1.0, -2.0]),
        "efficiency": torch.tensor([0.5, -0.5, 9.0]),
        "mask": torch.tensor([True, True, True]),
        "in_stratum": torch.tensor([True, True, False]),
        "accuracy_tokens": 3,
        "efficiency_tokens": 2,
    } | over
    out = hdpo_loss(logprobs, **args)  # type: ignore[arg-type]
    return {"loss": out.loss, **out.sums}


def test_hdpo_surrogates_have_their_own_normalisers() -> None:
    out = _hdpo(torch.tensor([LN(1.1), 0.0, 0.0]))
    # accuracy: -(1.1 + 1 - 2) / 3 = -.0333; efficiency over Q alone: -(.55 - .5) / 2 = -.025
    assert out["loss_accuracy"].item() == pytest.approx(-0.1 / 3, abs=1e-6)
    assert out["loss_efficiency"].item() == pytest.approx(-0.025, abs=1e-6)
    assert out["loss"].item() == pytest.approx(-0.1 / 3 - 0.15 * 0.025, abs=1e-6)


def test_hdpo_clips_only_gains() -> None:
    logprobs = torch.tensor([LN(1.5), LN(0.5), LN(1.5)], requires_grad=True)
    out = _hdpo(logprobs, efficiency=torch.zeros(3))
    # min(1.5, 1.2) = 1.2; min(.5, .8) = .5; min(1.5 * -2, 1.2 * -2) = -3
    assert out["loss"].item() == pytest.approx(-(1.2 + 0.5 - 3.0) / 3, abs=1e-6)
    assert out["cut"].item() == 1
    out["loss"].backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -0.5 / 3, 3.0 / 3]))


def test_hdpo_efficiency_reaches_no_token_outside_q() -> None:
    logprobs = torch.zeros(3, requires_grad=True)
    _hdpo(logprobs, accuracy=torch.zeros(3))["loss"].backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, 0.15 * torch.tensor([-0.25, 0.25, 0.0]))


def test_gate_is_double_sided_and_open_at_its_edges() -> None:
    ratios = torch.tensor([0.69, 0.71, 1.0, 5.9, 6.1])
    assert gate(ratios, 0.3, 5.0).tolist() == pytest.approx([0.0, 0.71, 1.0, 5.9, 0.0])
    assert gate(torch.tensor([0.5, 1.5]), 0.5, 0.5).tolist() == [0.0, 0.0]


def test_sao_loss_stops_the_gradient_of_the_gate_for_both_signs() -> None:
    logprobs = torch.tensor([LN(0.5), LN(0.9), LN(0.9), LN(0.5)], requires_grad=True)
    behaviour = torch.tensor([0.0, 0.0, 0.0, 0.0])
    advantages = torch.tensor([1.0, 2.0, -2.0, -1.0])
    out = sao_loss(logprobs, behaviour, advantages, torch.ones(4, dtype=torch.bool), tokens=4, low=0.3, high=5.0)
    assert out.loss.item() == pytest.approx(0.0, abs=1e-7)
    assert out.sums["cut"].item() == 2  # ratio .5 leaves the gate, whatever the sign
    out.loss.backward()
    assert logprobs.grad is not None  # d/dlogp = -sg(f) * A / 4
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -0.9 * 2 / 4, 0.9 * 2 / 4, 0.0]))


def test_padding_changes_neither_loss_nor_gradient() -> None:
    """R3: whatever stands on padding, advantage 10 or 0, ratio beyond float range."""
    results = []
    for junk_advantage, junk_logprob in ((0.0, 0.0), (10.0, 500.0)):
        logprobs = torch.tensor([-0.1, -0.2, junk_logprob], requires_grad=True)
        mask = torch.tensor([True, True, False])
        advantages = torch.tensor([1.0, -1.0, junk_advantage])
        behaviour = torch.tensor([-0.1, -0.3, 0.0])
        sao = sao_loss(logprobs, behaviour, advantages, mask, tokens=2, low=0.3, high=5.0)
        hdpo = hdpo_loss(
            logprobs, behaviour, advantages, advantages, mask, mask, accuracy_tokens=2, efficiency_tokens=2
        )
        value = critic_loss(logprobs, advantages, mask, tokens=2)
        (sao.loss + hdpo.loss + value.loss).backward()
        assert logprobs.grad is not None
        results.append([sao.loss, hdpo.loss, value.loss, sao.sums["kl"], logprobs.grad])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and torch.isfinite(a).all()


def test_micro_batches_with_global_counts_add_up_to_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, behaviour, advantages = (torch.randn(10, generator=generator) * 0.1 for _ in range(3))
    mask = torch.ones(10, dtype=torch.bool)
    whole = sao_loss(logprobs, behaviour, advantages, mask, tokens=10, low=0.3, high=5.0)
    parts = [
        sao_loss(logprobs[i], behaviour[i], advantages[i], mask[i], tokens=10, low=0.3, high=5.0)
        for i in (slice(0, 3), slice(3, 10))
    ]
    torch.testing.assert_close(whole.loss, parts[0].loss + parts[1].loss)
    torch.testing.assert_close(whole.sums["kl"], parts[0].sums["kl"] + parts[1].sums["kl"])


def test_kl_estimate_is_exact_for_a_known_ratio() -> None:
    out = sao_loss(
        torch.tensor([LN(2.0)]), torch.zeros(1), torch.ones(1), torch.tensor([True]), tokens=1, low=0.3, high=5.0
    )
    assert out.sums["kl"].item() == pytest.approx(2 - 1 - LN(2.0), abs=1e-6)


def test_critic_loss_is_the_mean_square_over_policy_tokens() -> None:
    values = torch.tensor([0.5, 1.0, 77.0], requires_grad=True)
    out = critic_loss(values, torch.tensor([1.0, 1.0, 0.0]), torch.tensor([True, True, False]), tokens=2)
    assert out.loss.item() == pytest.approx(0.125)
    out.loss.backward()
    assert values.grad is not None and values.grad.tolist() == [-0.5, 0.0, 0.0]
