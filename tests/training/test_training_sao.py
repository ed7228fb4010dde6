from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from occamy.contracts.episode import EpisodeRecord
from occamy.training.rl_batch import AdmittedBatch, Experience
from occamy.training.rl_config import CriticConfig, SaoConfig
from occamy.training.sao import sao_rows, target_rows, value_metrics
from occamy.training.views import TrainingSequence

LAST = {"lambda_fixed": 0.5}


@pytest.fixture
def experience(make_record: Callable[..., EpisodeRecord]) -> Callable[..., Experience]:
    """An admitted episode whose segments have these policy masks."""

    def make(name: str, *masks: list[int], reward: float = 1.0) -> Experience:
        record = make_record(name, sampled_by="policy", reward=reward)
        flags = [np.array(mask, bool) for mask in masks]
        sequences = tuple(
            TrainingSequence(
                tokens=np.zeros(len(mask), np.int32),
                mask=mask,
                logprobs=np.zeros(len(mask), np.float32),
                versions=np.zeros(len(mask), np.int32),
                episode_id=name,
                task_id=record.task_id,
                segment=index,
                n_segments=len(flags),
                policy_tokens_run=sum(int(m.sum()) for m in flags),
                policy_tokens_later=sum(int(m.sum()) for m in flags[index + 1 :]),
                reward=reward,
                success=True,
                steps=1,
            )
            for index, mask in enumerate(flags)
        )
        return Experience(record, sequences)

    return make


def advantages(batch: AdmittedBatch, values: dict[Any, Any], **config: Any) -> list[list[float]]:
    rows, _ = sao_rows(batch, {k: np.array(v, np.float32) for k, v in values.items()}, SaoConfig(**config))
    return [row.signals["advantage"].tolist() for row in rows]


def test_time_runs_over_policy_tokens_and_the_reward_sits_on_the_last_one(
    experience: Callable[..., Experience],
) -> None:
    batch = AdmittedBatch((experience("e", [0, 1, 1, 0, 0, 1, 1, 0]),), {})
    got = advantages(batch, {("e", "root", 0): [0.1, 0.2, 0.3, 0.4]}, lambda_fixed=1.0)
    assert got[0] == pytest.approx([0.9, 0.8, 0.7, 0.6])


def test_segments_are_corrected_by_the_policy_tokens_after_them(experience: Callable[..., Experience]) -> None:
    whole = AdmittedBatch((experience("e", [0, 1, 1, 1, 1, 1]),), {})
    split = AdmittedBatch((experience("e", [0, 1, 1], [0, 0, 1], [0, 1, 1]),), {})
    zeros = {("e", "root", 0): [0, 0], ("e", "root", 1): [0], ("e", "root", 2): [0, 0]}
    expected = [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0]
    assert advantages(whole, {("e", "root", 0): [0] * 5}, **LAST)[0] == pytest.approx(expected)
    assert [a for part in advantages(split, zeros, **LAST) for a in part] == pytest.approx(expected)


@pytest.mark.parametrize(("scope", "lam"), [("run", 1 - 1 / 6), ("segment", 1 - 1 / 3)])
def test_adaptive_lambda_takes_the_length_of_the_run_or_of_the_segment(
    experience: Callable[..., Experience], scope: str, lam: float
) -> None:
    batch = AdmittedBatch((experience("e", [0, 1, 1], [0, 1, 1]),), {})
    got = advantages(batch, {("e", "root", 0): [0, 0], ("e", "root", 1): [0, 0]}, lambda_scope=scope)
    assert got[1] == pytest.approx([lam, 1.0])
    assert got[0] == pytest.approx([lam**3, lam**2])


def test_critic_learns_the_return_of_every_segment(experience: Callable[..., Experience]) -> None:
    batch = AdmittedBatch((experience("a", [0, 1, 1], [0, 1], reward=0.5), experience("b", [0, 1], reward=1.0)), {})
    rows = target_rows(batch, SaoConfig())
    assert [row.signals["target"].tolist() for row in rows] == [[0.5, 0.5], [0.5], [1.0]]
    good = {row.key: row.signals["target"] for row in rows}
    flat = {row.key: np.full_like(row.signals["target"], 0.6) for row in rows}
    assert value_metrics(rows, good)["explained_variance"] == pytest.approx(1.0)
    assert value_metrics(rows, flat) == pytest.approx({"explained_variance": 0.0, "value_mean": 0.6})


def test_advantages_are_plain_unless_normalisation_is_asked_for(experience: Callable[..., Experience]) -> None:
    batch = AdmittedBatch((experience("a", [0, 1], reward=1.0), experience("b", [0, 1], reward=0.0)), {})
    values = {("a", "root", 0): [0.25], ("b", "root", 0): [0.25]}
    assert advantages(batch, values) == [[0.75], [-0.25]]
    scaled = advantages(batch, values, normalise_advantages=True)
    assert scaled == [[pytest.approx(1.0, abs=0.01)], [pytest.approx(-1.0, abs=0.01)]]


def test_value_only_steps_must_leave_some_for_the_policy() -> None:
    with pytest.raises(ValidationError, match="leaves none of 50 steps"):
        SaoConfig(steps=50, critic=CriticConfig(value_only_steps=50))
