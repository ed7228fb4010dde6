from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from occamy.contracts.episode import EpisodeRecord
from occamy.training.hdpo import Hdpo, hdpo_rows
from occamy.training.rl_batch import AdmittedBatch, Experience
from occamy.training.rl_config import HdpoConfig
from occamy.training.views import TrainingSequence


@pytest.fixture
def experience(make_record: Callable[..., EpisodeRecord]) -> Callable[..., Experience]:
    """An admitted episode with the given policy tokens in each of its segments."""

    def make(name: str, tokens: tuple[int, ...] = (2,), **facts: Any) -> Experience:
        record = make_record(name, sampled_by="policy", **{"success": facts.get("reward", 1.0) == 1.0} | facts)
        sequences = []
        for index, n in enumerate(tokens):
            mask = np.array([False] + [True] * n)
            sequences.append(
                TrainingSequence(
                    tokens=np.arange(n + 1, dtype=np.int32),
                    mask=mask,
                    logprobs=np.zeros(n + 1, np.float32),
                    versions=np.zeros(n + 1, np.int32),
                    episode_id=name,
                    task_id=record.task_id,
                    segment=index,
                    n_segments=len(tokens),
                    policy_tokens_run=sum(tokens),
                    policy_tokens_later=sum(tokens[index + 1 :]),
                    reward=record.reward,
                    success=record.success,
                    steps=record.steps,
                )
            )
        return Experience(record, tuple(sequences))

    return make


def batch(*experiences: Experience) -> AdmittedBatch:
    return AdmittedBatch(experiences, {})


def test_signals_follow_the_groups_whatever_the_order_of_the_batch(experience: Callable[..., Experience]) -> None:
    rows, metrics = hdpo_rows(
        batch(
            experience("a0", task_id="a", reward=1.0, steps=4),
            experience("b0", task_id="b", reward=0.5),
            experience("a1", task_id="a", reward=1.0, steps=8),
            experience("b1", task_id="b", reward=0.5),
            experience("a2", (1, 3), task_id="a", reward=0.0, steps=2),
            experience("a3", task_id="a", reward=0.0, steps=6),
        ),
        HdpoConfig(),
    )
    by_key = {row.key: row.signals for row in rows}
    magnitude = 0.5 / (np.sqrt(1 / 3) + 1e-6)  # episode a2 counts once, though it has two segments
    for key, accuracy, efficiency in [
        (("a0", "root", 0), magnitude, 1 / 3),
        (("a1", "root", 0), magnitude, -1 / 3),
        (("a2", "root", 0), -magnitude, 0),
        (("a2", "root", 1), -magnitude, 0),
        (("b0", "root", 0), 0, 0),
    ]:
        np.testing.assert_allclose(by_key[key]["accuracy"], accuracy, rtol=1e-6)
        np.testing.assert_allclose(by_key[key]["efficiency"], efficiency, rtol=1e-6)
    assert len(by_key["a2", "root", 1]["accuracy"]) == 3
    assert metrics == {"groups": 2, "groups_with_accuracy": 1, "groups_with_efficiency": 1}


def test_normalisers_count_all_policy_tokens_and_those_of_the_stratum(experience: Callable[..., Experience]) -> None:
    algorithm = Hdpo(HdpoConfig())
    rows, _ = algorithm.rows(
        batch(
            experience("a0", (5,), task_id="a", reward=1.0),
            experience("a1", (2, 2), task_id="a", reward=0.0),
            experience("b0", (7,), task_id="b", reward=0.5),
        ),
        step=1,
    )
    assert algorithm.totals(rows) == {"tokens": 16, "stratum_tokens": 5}
    assert [row.key for row in rows if algorithm.silent(row)] == [("b0", "root", 0)]


@pytest.mark.parametrize(("cost", "efficient"), [("turns", "a0"), ("tool_calls", "a1"), ("tokens", "a2")])
def test_cost_may_be_turns_calls_or_tokens(experience: Callable[..., Experience], cost: str, efficient: str) -> None:
    rows, _ = hdpo_rows(
        batch(
            experience("a0", (8,), task_id="a", steps=2, tool_calls=9),
            experience("a1", (8,), task_id="a", steps=5, tool_calls=1),
            experience("a2", (1, 1), task_id="a", steps=5, tool_calls=9),
        ),
        HdpoConfig.model_validate({"cost": cost}),
    )
    assert max(rows, key=lambda row: row.signals["efficiency"][0]).key[0] == efficient


def test_loss_weighs_both_surrogates(experience: Callable[..., Experience]) -> None:
    algorithm = Hdpo(HdpoConfig(w_acc=2.0, w_eff=0.5))
    signals = {
        "accuracy": torch.tensor([1.0, 1.0]),
        "efficiency": torch.tensor([0.0, 4.0]),
        "in_stratum": torch.tensor([0.0, 1.0]),
    }
    zeros = torch.zeros(2)
    out = algorithm.loss(zeros, zeros, signals, {"tokens": 4.0, "stratum_tokens": 2.0})
    assert out.loss.item() == pytest.approx(2.0 * -(1 + 1) / 4 + 0.5 * -4 / 2)


def test_a_lag_beyond_the_staleness_cap_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_lag 3 exceeds max_staleness 2"):
        HdpoConfig(max_lag=3, max_staleness=2)
    with pytest.raises(ValidationError, match="mix is empty"):
        HdpoConfig(mix={})


def test_batch_of_nothing_gives_no_rows(experience: Callable[..., Experience]) -> None:
    assert hdpo_rows(batch(), HdpoConfig())[0] == []
    lone = replace(experience("a0"), sequences=experience("a0").sequences)
    rows, _ = hdpo_rows(batch(lone), HdpoConfig())
    assert not rows[0].signals["accuracy"].any()
