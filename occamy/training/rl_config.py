"""The HDPO and SAO sections of a recipe. Defaults are the published presets; small models state theirs in a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from occamy.contracts.record import Record
from occamy.contracts.task import Pool
from occamy.training.config import OptimiserConfig

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def _constant(lr: float) -> OptimiserConfig:
    """The published presets name a rate and no schedule: constant after the warm-up (our choice)."""
    return OptimiserConfig(lr=lr, min_lr=lr)


class RlConfig(Record):
    """What both RL stages have in common."""

    steps: int = Field(ge=1)
    """Batches to train on; every one makes a weight version."""
    mix: dict[Pool, Positive]
    """Task pools to draw from and their shares of a batch; shares are relative to their sum."""
    optimiser: OptimiserConfig
    """Policy optimiser; its steps are optimiser steps (batches that train the policy, times `minibatches`)."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps per batch, over disjoint parts of its episodes (our choice; 1 is strictly one step per batch)."""
    aux_loss_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the experts' load-balancing loss; 0 switches it off (our choice)."""
    pack_tokens: int = Field(default=8192, ge=1)
    """Longest pack of one forward pass, tokens (our choice)."""
    max_lag: int = Field(default=1, ge=0)
    """Batches sampled ahead of the trained weights, so that rollout and training overlap (our choice); 0 alternates."""
    max_staleness: int = Field(default=4, ge=0)
    """Versions by which an episode's oldest token may trail the weights; older episodes are dropped (our choice)."""
    save_every: int = Field(default=5, ge=1)
    """Steps between resumable trainer states (our choice)."""
    infra_retries: int = Field(default=2, ge=0)
    """Fresh attempts at an episode that failed for infrastructure reasons (our choice)."""
    processes: int = Field(default=1, ge=1)
    """Data-parallel trainer processes on this machine (our choice)."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per trainer process; more than one may change the last bits of the result (our choice)."""
    dead_steps: int = Field(default=3, ge=1)
    """First batches without one valid episode after which the stage gives up (our choice)."""

    @model_validator(mode="after")
    def _lag_fits(self) -> RlConfig:
        if not self.mix:
            raise ValueError("mix is empty; name at least one pool, such as {long: 1.0}")
        if self.max_lag > self.max_staleness:
            raise ValueError(
                f"max_lag {self.max_lag} exceeds max_staleness {self.max_staleness}: every batch would be dropped; "
                "raise max_staleness"
            )
        return self


class HdpoConfig(RlConfig):
    """Hierarchical decoupled policy optimisation (arXiv 2604.08545): the long-horizon expert."""

    steps: int = Field(default=100, ge=1)
    """Batches to train on (our choice)."""
    mix: dict[Pool, Positive] = Field(default={"long": 1.0})
    """Task pools and shares; the Marathon expert sees long-horizon tasks."""
    optimiser: OptimiserConfig = _constant(1e-6)
    """Policy optimiser; lr 1e-6 from HDPO."""
    tasks_per_step: int = Field(default=8, ge=1)
    """Groups in a batch (our choice: 128 episodes with groups of 16)."""
    group: int = Field(default=16, ge=2)
    """G, episodes per task (HDPO)."""
    w_acc: float = Field(default=1.0, ge=0)
    """Weight of the accuracy surrogate (HDPO)."""
    w_eff: float = Field(default=0.15, ge=0)
    """Weight of the efficiency surrogate (HDPO)."""
    clip: Positive = 0.2
    """ε of both clipped surrogates (HDPO)."""
    efficiency: Literal["raw", "standardised"] = "raw"
    """A_eff = R_eff, or standardised inside Q as HDPO's code does."""
    cost: Literal["turns", "tool_calls", "tokens"] = "turns"
    """What an episode's steps S count."""
    strata: tuple[float, ...] = ()
    """Reward edges of finer strata; empty: correct episodes (score at the pass threshold) form the one stratum."""
    std_epsilon: Positive = 1e-6
    """Added to the standard deviations (HDPO)."""


class GateConfig(Record):
    """SAO's double-sided gate: tokens whose ratio leaves (1 − low, 1 + high) give no gradient."""

    low: Positive = 0.3
    """ε_l (SAO, reasoning preset; coding 0.8)."""
    high: Positive = 5.0
    """ε_h (SAO, reasoning preset; coding 3.0)."""


class CriticConfig(Record):
    """The value function."""

    trunk: Literal["separate", "shared_detached"] = "separate"
    """separate: an own copy of the policy checkpoint with a scalar head (SAO); shared_detached: a small network on the
    policy's hidden states, which it does not train (our choice for small models: no second forward and backward)."""
    optimiser: OptimiserConfig = _constant(3e-6)
    """Critic optimiser; lr 3e-6 from the paper."""
    updates: int = Field(default=2, ge=1)
    """K, passes over the batch's returns per policy update (SAO: 2)."""
    value_only_steps: int = Field(default=50, ge=0)
    """First steps that train the critic alone (CompactionRL; SAO: 10)."""
    head_width: int = Field(default=128, ge=1)
    """Hidden width of the shared_detached network (our choice)."""
    minibatch_tokens: int = Field(default=2048, ge=1)
    """Policy tokens per regression step of the shared_detached network (our choice)."""


class SaoConfig(RlConfig):
    """Single-rollout asynchronous optimisation (arXiv 2607.07508) with CompactionRL's segments (arXiv 2607.05378)."""

    steps: int = Field(default=100, ge=1)
    """Batches to train on (paper)."""
    mix: dict[Pool, Positive] = Field(default={"long": 1.0, "short": 1.0})
    """Task pools and shares: the co-work mix, half and half (our choice)."""
    optimiser: OptimiserConfig = _constant(2e-6)
    """Policy optimiser; lr 2e-6 from the paper."""
    batch: int = Field(default=128, ge=1)
    """Episodes in a batch, one per task (paper)."""
    gamma: Share = 1.0
    """Discount γ per policy token (SAO)."""
    lambda_alpha: Positive = 1.5
    """α of the length-adaptive λ = 1 − 1/(α·l) (VAPO, SAO)."""
    lambda_scope: Literal["run", "segment"] = "run"
    """Length l: policy tokens of the whole run (our reading of λ_τ) or of each segment."""
    lambda_fixed: Share | None = None
    """A fixed λ in place of the adaptive one (our choice for short episodes)."""
    gate: GateConfig = GateConfig()
    """Double-sided importance gate."""
    critic: CriticConfig = CriticConfig()
    """Value function."""
    normalise_advantages: bool = False
    """Centre and scale advantages over the batch's policy tokens (our choice for small models)."""

    @model_validator(mode="after")
    def _policy_learns(self) -> SaoConfig:
        if self.critic.value_only_steps >= self.steps:
            raise ValueError(
                f"critic.value_only_steps {self.critic.value_only_steps} leaves none of {self.steps} steps for the "
                "policy; lower it"
            )
        return self
