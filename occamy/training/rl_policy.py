"""Policy updates of an RL algorithm on the rows of a batch. Import it only after `occamy.training.device.prepare()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from occamy.training.device import Place
from occamy.training.learner import Learner
from occamy.training.losses import LossOutput
from occamy.training.model import PolicyModel
from occamy.training.rl_batch import AdmittedBatch, Row
from occamy.training.rl_config import RlConfig
from occamy.training.rl_packs import pack_rows, signals_of, sums_over_ranks


class Algorithm(Protocol):
    """What sets HDPO and SAO apart."""

    def rows(self, batch: AdmittedBatch, step: int) -> tuple[list[Row], dict[str, float]]:
        """Signals of every policy token of the batch (no rows: the policy stays), and figures to log."""

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        """Global normalisers of a (mini-)batch."""

    def silent(self, row: Row) -> bool:
        """Whether a row gives no gradient; its forward pass is saved, yet it counts in the totals."""

    def loss(
        self, scores: Tensor, behaviour: Tensor, signals: dict[str, Tensor], totals: dict[str, float]
    ) -> LossOutput:
        """Loss on the m policy tokens of one pack."""

    def state_dict(self) -> dict[str, Any]:
        """State kept between batches."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def improve(
    learner: Learner[PolicyModel],
    algorithm: Algorithm,
    rows: Sequence[Row],
    config: RlConfig,
    place: Place,
    rng: np.random.Generator,
) -> dict[str, float]:
    """Take one optimiser step per minibatch of episodes. Returns means over the policy tokens that were scored."""
    sums: dict[str, float] = {}
    norm, lr, taken = 0.0, 0.0, 0
    for part in _minibatches(rows, config.minibatches, rng):
        totals = algorithm.totals(part)
        packed = pack_rows([row for row in part if not algorithm.silent(row)], config.pack_tokens, place)
        if not packed.targets:
            continue
        learner.begin()
        for pack in packed.packs:
            scores = learner.model(pack, entropy=True)
            output = algorithm.loss(scores.logprobs, pack.behaviour(), signals_of(part, pack), totals)
            learner.backward(output.loss, aux_share=1.0 / packed.tokens)
            for name, value in (output.sums | {"entropy": scores.entropy.sum()}).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        facts = learner.finish()
        norm, lr, taken = max(norm, facts.grad_norm), facts.lr, taken + 1
    sums = sums_over_ranks(sums)
    scored = sums.pop("tokens", 0.0)
    per_token = {name: sums.pop(name, 0.0) / max(scored, 1.0) for name in ("kl", "entropy", "cut")}
    losses = {name: value / max(taken, 1) for name, value in sums.items()}
    return per_token | losses | {"tokens_scored": scored, "updates": float(taken), "grad_norm": norm, "lr": lr}


def _minibatches(rows: Sequence[Row], parts: int, rng: np.random.Generator) -> list[list[Row]]:
    """Split by episodes, so that all segments of an episode train together."""
    if not rows:
        return []
    if parts == 1:
        return [list(rows)]
    episodes = sorted({row.sequence.episode_id for row in rows})
    shuffled = [episodes[i] for i in rng.permutation(len(episodes))]
    out = []
    for names in np.array_split(np.asarray(shuffled), parts):
        chosen = set(names.tolist())
        out.append([row for row in rows if row.sequence.episode_id in chosen])
    return out
