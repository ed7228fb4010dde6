"""RL losses, in torch: HDPO's two clipped surrogates, SAO's double-sided gate, the critic's regression.

Each is a pure function of [n] token arrays and of *global* token counts, so that micro-batches and ranks add up to
the loss of the whole batch. Every loss returns its metrics as sums over the local masked tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossOutput:
    """A scalar loss and, detached, sums over this micro-batch's policy tokens to be added up and divided by counts."""

    loss: Tensor
    sums: dict[str, Tensor]


def clipped_surrogate(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, *, tokens: float, clip: float
) -> Tensor:
    """L_clip = − Σ_mask min(ρ A, clip(ρ, 1−ε, 1+ε) A) / tokens, with ρ = exp(log π_θ − log π_behaviour). All [n]."""
    ratio = _log_ratio(logprobs, behaviour, mask).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -torch.where(mask, gain, 0.0).sum() / max(tokens, 1.0)


def hdpo_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    accuracy: Tensor,
    efficiency: Tensor,
    mask: Tensor,
    in_stratum: Tensor,
    *,
    accuracy_tokens: float,
    efficiency_tokens: float,
    w_acc: float = 1.0,
    w_eff: float = 0.15,
    clip: float = 0.2,
) -> LossOutput:
    """HDPO (arXiv 2604.08545): w_acc · L_clip(A_acc; policy tokens) + w_eff · L_clip(A_eff; tokens of Q).

    All tensors [n]; `mask` marks policy tokens, `in_stratum` those of episodes in Q. Each surrogate has its own global
    normaliser: `accuracy_tokens` policy tokens and `efficiency_tokens` of them in Q, over all ranks and micro-batches.
    """
    within = mask & in_stratum
    loss_acc = clipped_surrogate(logprobs, behaviour, accuracy, mask, tokens=accuracy_tokens, clip=clip)
    loss_eff = clipped_surrogate(logprobs, behaviour, efficiency, within, tokens=efficiency_tokens, clip=clip)
    with torch.no_grad():
        ratio = _log_ratio(logprobs, behaviour, mask).exp()
        cut = ((ratio > 1 + clip) & (accuracy > 0)) | ((ratio < 1 - clip) & (accuracy < 0))
        sums = _shared_sums(logprobs, behaviour, mask) | {
            "cut": (cut & mask).sum().float(),
            "loss_accuracy": loss_acc.detach(),
            "loss_efficiency": loss_eff.detach(),
        }
    return LossOutput(w_acc * loss_acc + w_eff * loss_eff, sums)


def gate(ratio: Tensor, low: float, high: float) -> Tensor:
    """SAO's direct double-sided gate: f(ρ) = ρ if 1 − low < ρ < 1 + high else 0, whatever the advantage's sign."""
    return torch.where((ratio > 1 - low) & (ratio < 1 + high), ratio, 0.0)


def sao_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tokens: float,
    low: float,
    high: float,
) -> LossOutput:
    """SAO (arXiv 2607.07508): L = − Σ_mask sg(f(ρ)) · Â · log π_θ / tokens. All tensors [n].

    `behaviour` is the log-prob that the sampler recorded (no old-policy pass); `tokens` counts the policy tokens of
    the global batch. The gate is a constant: no gradient flows through ρ.
    """
    with torch.no_grad():
        ratio = _log_ratio(logprobs, behaviour, mask).exp()
        weight = gate(ratio, low, high)
        sums = _shared_sums(logprobs, behaviour, mask) | {"cut": ((weight == 0) & mask).sum().float()}
    gain = weight * advantages * torch.where(mask, logprobs, 0.0)
    loss = -torch.where(mask, gain, 0.0).sum() / max(tokens, 1.0)
    return LossOutput(loss, sums | {"loss": loss.detach()})


def critic_loss(values: Tensor, targets: Tensor, mask: Tensor, *, tokens: float) -> LossOutput:
    """Mean squared error Σ_mask (V − target)² / tokens. All tensors [n]; `tokens` is global."""
    loss = torch.where(mask, (values.float() - targets) ** 2, 0.0).sum() / max(tokens, 1.0)
    return LossOutput(loss, {"loss_critic": loss.detach()})


def _log_ratio(logprobs: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logprobs - behaviour, 0.0)


def _shared_sums(logprobs: Tensor, behaviour: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """KL(behaviour ‖ θ) by the low-variance estimator ρ − 1 − log ρ, and the token count."""
    log_ratio = _log_ratio(logprobs, behaviour, mask)
    kl = log_ratio.exp() - 1 - log_ratio
    return {"kl": torch.where(mask, kl, 0.0).sum(), "tokens": mask.sum().float()}
