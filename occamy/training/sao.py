"""SAO with CompactionRL's segments: what each policy token is worth, by a critic and one rollout per task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from occamy.training.advantages import adaptive_lambda, explained_variance, normalised, run_advantages, value_targets
from occamy.training.losses import LossOutput, sao_loss
from occamy.training.packing import Packed
from occamy.training.rl_batch import AdmittedBatch, Experience, Row
from occamy.training.rl_config import SaoConfig
from occamy.training.rl_packs import pack_rows, signals_of, sums_over_ranks, union_over_ranks

if TYPE_CHECKING:
    from occamy.training.critic import Critic
    from occamy.training.device import Place
    from occamy.training.model import PolicyModel

Values = Mapping[tuple[str, str, int], NDArray[np.float32]]
"""Key of a sequence -> critic values [policy tokens] of the states before each policy token."""


def target_rows(batch: AdmittedBatch, config: SaoConfig) -> list[Row]:
    """One row per segment with signal ``target``: the return that the critic regresses on (λ_critic = 1)."""
    rows = []
    for e in batch.experiences:
        targets = value_targets(e.record.reward, _policy_masks(e), gamma=config.gamma)
        rows += [Row(s, {"target": t.astype(np.float32)}) for s, t in zip(e.sequences, targets, strict=True)]
    return rows


def sao_rows(batch: AdmittedBatch, values: Values, config: SaoConfig) -> tuple[list[Row], dict[str, float]]:
    """One row per segment with signal ``advantage`` (GAE over policy tokens, corrected across segments); figures."""
    sequences = [s for e in batch.experiences for s in e.sequences]
    plain = [a for e in batch.experiences for a in _advantages(e, values, config)]
    masks = [np.ones(len(a), bool) for a in plain]
    final = normalised(plain, masks) if config.normalise_advantages else plain
    rows = [Row(s, {"advantage": a.astype(np.float32)}) for s, a in zip(sequences, final, strict=True)]
    flat = np.concatenate(plain) if plain else np.zeros(1)
    return rows, {"advantage_mean": float(flat.mean()), "advantage_std": float(flat.std())}


def value_metrics(targets: list[Row], values: Values) -> dict[str, float]:
    """Explained variance of the values against the returns, over policy tokens, before the critic learns from them."""
    if not targets:
        return {"explained_variance": 0.0, "value_mean": 0.0}
    v = np.concatenate([values[row.key] for row in targets])
    t = np.concatenate([row.signals["target"] for row in targets])
    return {"explained_variance": explained_variance(v, t), "value_mean": float(v.mean())}


def _advantages(experience: Experience, values: Values, config: SaoConfig) -> list[NDArray[np.float64]]:
    own = [values[s.key] for s in experience.sequences]
    return run_advantages(
        experience.record.reward, own, _policy_masks(experience), gamma=config.gamma, lam=_lambdas(experience, config)
    )


def _lambdas(experience: Experience, config: SaoConfig) -> list[float]:
    """λ of each segment."""
    run = experience.policy_tokens
    lengths = [s.policy_tokens if config.lambda_scope == "segment" else run for s in experience.sequences]
    fixed = config.lambda_fixed
    return [adaptive_lambda(config.lambda_alpha, n) if fixed is None else fixed for n in lengths]


def _policy_masks(experience: Experience) -> list[NDArray[np.bool_]]:
    """Time runs over policy tokens only: observations are off the axis, so every step is a policy token."""
    return [np.ones(s.policy_tokens, bool) for s in experience.sequences]


class Sao:
    """SAO as the worker runs it; see `rl_policy.Algorithm`."""

    def __init__(self, config: SaoConfig, policy: PolicyModel, critic: Critic, place: Place) -> None:
        self._config = config
        self._policy = policy
        self._critic = critic
        self._place = place

    def rows(self, batch: AdmittedBatch, step: int) -> tuple[list[Row], dict[str, float]]:
        """Value the batch, teach the critic its returns, and return advantages; none in the value-only steps.

        Advantages use the values from before the critic saw this batch's returns.
        """
        targets = target_rows(batch, self._config)
        if not targets:
            return [], {}
        packed = pack_rows(targets, self._config.pack_tokens, self._place)
        values = self._values(packed)
        figures = value_metrics(targets, values)
        by_pack = [signals_of(targets, pack)["target"] for pack in packed.packs]
        learned = self._critic.learn(packed.packs, by_pack, packed.targets, step)
        figures |= sums_over_ranks({name: float(value) for name, value in learned.items()})
        rows, about = sao_rows(batch, values, self._config)
        return ([] if step <= self._config.critic.value_only_steps else rows), figures | about

    def _values(self, packed: Packed) -> dict[tuple[str, str, int], NDArray[np.float32]]:
        """Values of all sequences of the global batch."""
        own: dict[tuple[str, str, int], NDArray[np.float32]] = {}
        for pack, flat in zip(packed.packs, self._critic.values(self._policy, packed.packs), strict=True):
            ends = np.cumsum([s.policy_tokens for s in pack.sequences])
            parts = np.split(flat.float().cpu().numpy(), ends[:-1])
            own |= {s.key: v for s, v in zip(pack.sequences, parts, strict=True)}
        return union_over_ranks(own)

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        """All policy tokens of the rows."""
        return {"tokens": float(sum(row.sequence.policy_tokens for row in rows))}

    def silent(self, row: Row) -> bool:
        """Whether all advantages of a row are zero."""
        return not row.signals["advantage"].any()

    def loss(
        self, scores: Tensor, behaviour: Tensor, signals: dict[str, Tensor], totals: dict[str, float]
    ) -> LossOutput:
        """SAO's gated loss on the policy tokens of one pack, all [m]."""
        everywhere = torch.ones_like(scores, dtype=torch.bool)
        low, high = self._config.gate.low, self._config.gate.high
        return sao_loss(
            scores, behaviour, signals["advantage"], everywhere, tokens=totals["tokens"], low=low, high=high
        )

    def state_dict(self) -> dict[str, Any]:
        """The critic."""
        return self._critic.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the critic."""
        self._critic.load_state_dict(state)
