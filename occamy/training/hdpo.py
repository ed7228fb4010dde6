"""HDPO: what each policy token of a batch is worth, as group-relative accuracy and efficiency signals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from occamy.training.advantages import GroupAdvantages, hdpo_group, strata_by_edges, strata_by_success
from occamy.training.losses import LossOutput, hdpo_loss
from occamy.training.rl_batch import AdmittedBatch, Experience, Row
from occamy.training.rl_config import HdpoConfig


def hdpo_rows(batch: AdmittedBatch, config: HdpoConfig) -> tuple[list[Row], dict[str, float]]:
    """One row per segment with signals ``accuracy``, ``efficiency`` and ``in_stratum``, and figures about the groups.

    A group is the admitted episodes of one task; an episode counts once in it, however many segments it has.
    """
    rows, groups = [], []
    by_task = sorted(batch.experiences, key=lambda e: e.record.task_id)
    for _, members in groupby(by_task, key=lambda e: e.record.task_id):
        experiences = list(members)
        group = _group(experiences, config)
        groups.append(group)
        for member, experience in enumerate(experiences):
            rows += [Row(s, _signals(group, member, s.policy_tokens)) for s in experience.sequences]
    metrics = {
        "groups": float(len(groups)),
        "groups_with_accuracy": float(sum(g.accuracy.any() for g in groups)),
        "groups_with_efficiency": float(sum(g.efficiency.any() for g in groups)),
    }
    return rows, metrics


def _group(members: list[Experience], config: HdpoConfig) -> GroupAdvantages:
    records = [e.record for e in members]
    rewards, success = [r.reward for r in records], [r.success for r in records]
    costs = {
        "turns": [float(r.steps) for r in records],
        "tool_calls": [float(r.tool_calls) for r in records],
        "tokens": [float(e.policy_tokens) for e in members],
    }[config.cost]
    strata = strata_by_edges(rewards, config.strata) if config.strata else strata_by_success(success)
    valid = [True] * len(members)
    return hdpo_group(rewards, costs, strata, valid, preset=config.efficiency, std_epsilon=config.std_epsilon)


def _signals(group: GroupAdvantages, member: int, tokens: int) -> dict[str, NDArray[np.float32]]:
    values = {"accuracy": group.accuracy, "efficiency": group.efficiency, "in_stratum": group.in_stratum}
    return {name: np.full(tokens, value[member], np.float32) for name, value in values.items()}


class Hdpo:
    """HDPO as the worker runs it; see `rl_policy.Algorithm`."""

    def __init__(self, config: HdpoConfig) -> None:
        self._config = config

    def rows(self, batch: AdmittedBatch, step: int) -> tuple[list[Row], dict[str, float]]:
        """See `hdpo_rows`."""
        return hdpo_rows(batch, self._config)

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        """All policy tokens of the rows, and those of episodes in Q: each surrogate has its own normaliser."""
        return {
            "tokens": float(sum(row.sequence.policy_tokens for row in rows)),
            "stratum_tokens": float(sum(row.signals["in_stratum"].sum() for row in rows)),
        }

    def silent(self, row: Row) -> bool:
        """Whether both advantages of a row are zero."""
        return not row.signals["accuracy"].any() and not row.signals["efficiency"].any()

    def loss(
        self, scores: Tensor, behaviour: Tensor, signals: dict[str, Tensor], totals: dict[str, float]
    ) -> LossOutput:
        """HDPO's loss on the policy tokens of one pack, all [m]."""
        return hdpo_loss(
            scores,
            behaviour,
            signals["accuracy"],
            signals["efficiency"],
            torch.ones_like(scores, dtype=torch.bool),
            signals["in_stratum"].bool(),
            accuracy_tokens=totals["tokens"],
            efficiency_tokens=totals["stratum_tokens"],
            w_acc=self._config.w_acc,
            w_eff=self._config.w_eff,
            clip=self._config.clip,
        )

    def state_dict(self) -> dict[str, Any]:
        """HDPO keeps nothing between batches."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """HDPO keeps nothing between batches."""
