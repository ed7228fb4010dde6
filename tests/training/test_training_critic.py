from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from occamy.training.config import OptimiserConfig
from occamy.training.packing import Pack, pack_batch
from occamy.training.rl_config import CriticConfig
from occamy.training.views import TrainingSequence

CONFIG = CriticConfig(
    updates=3, minibatch_tokens=16, head_width=16, optimiser=OptimiserConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0)
)


@pytest.fixture(scope="module")
def base(trainer: Any, make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("qwen3_moe", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def packs(base: Path) -> tuple[Pack, ...]:
    """Twelve sequences of 3 policy tokens in several packs."""
    sequences = []
    for i in range(12):
        tokens = np.array([i, 40, 1, 2, 3], np.int32)
        mask = np.array([0, 0, 1, 1, 1], bool)
        zeros = np.zeros(5, np.float32)
        sequences.append(
            TrainingSequence(tokens, mask, zeros, zeros.astype(np.int32), f"e{i:02d}", "t", 0, 1, 3, 0, 0.0, False, 1)
        )
    return pack_batch(sequences, 20).packs


def build(kind: str, base: Path, policy: Any) -> Any:
    from occamy.training.critic import SeparateCritic, SharedDetachedCritic
    from occamy.training.model import load_hf

    if kind == "separate":
        return SeparateCritic(load_hf(base), CONFIG, batches=40)
    return SharedDetachedCritic(policy, CONFIG, batches=40, seed=1)


def returns(packs: tuple[Pack, ...]) -> list[torch.Tensor]:
    """1 for the first six episodes, 0 for the rest."""
    return [
        pack.gather([np.full(3, float(s.episode_id < "e06"), np.float32) for s in pack.sequences]) for pack in packs
    ]


@pytest.mark.parametrize("kind", ["separate", "shared_detached"])
def test_values_start_at_zero_approach_the_returns_and_leave_the_policy_alone(
    kind: str, base: Path, packs: tuple[Pack, ...]
) -> None:
    from occamy.training.model import load_hf

    policy = load_hf(base)
    before = {name: p.clone() for name, p in policy.named_parameters()}
    critic, targets = build(kind, base, policy), returns(packs)
    assert all(not v.any() for v in critic.values(policy, packs))
    first = critic.learn(packs, targets, 36, 1)["loss_critic"]
    for batch in range(2, 21):
        critic.values(policy, packs)
        last = critic.learn(packs, targets, 36, batch)["loss_critic"]
    assert last < 0.2 * first
    good = [v[t == 1].mean() - v[t == 0].mean() for v, t in zip(critic.values(policy, packs), targets) if t.std() > 0]
    assert min(good) > 0.5
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in policy.named_parameters())


@pytest.mark.parametrize("kind", ["separate", "shared_detached"])
def test_a_restored_critic_goes_on_bit_for_bit(kind: str, base: Path, packs: tuple[Pack, ...]) -> None:
    from occamy.training.model import load_hf

    policy = load_hf(base)
    one, targets = build(kind, base, policy), returns(packs)
    one.values(policy, packs)
    one.learn(packs, targets, 36, 1)
    saved = copy.deepcopy(one.state_dict())
    two = build(kind, base, policy)
    two.load_state_dict(saved)
    for critic in (one, two):
        critic.values(policy, packs)
        critic.learn(packs, targets, 36, 2)
    assert all(torch.equal(a, b) for a, b in zip(one.values(policy, packs), two.values(policy, packs)))


def test_the_detached_head_asks_for_values_first(base: Path, packs: tuple[Pack, ...]) -> None:
    from occamy.training.model import load_hf

    critic = build("shared_detached", base, load_hf(base))
    with pytest.raises(RuntimeError, match=r"call values\(\) first"):
        critic.learn(packs, returns(packs), 36, 1)
