"""Configuration of rollouts and demonstrations."""

from __future__ import annotations

from pydantic import Field

from occamy.contracts.record import Record
from occamy.contracts.task import Pool
from occamy.sandboxes.config import LocalSandboxConfig


class RolloutConfig(Record):
    """How episodes are run."""

    harness: str = "react"
    """Shipped composition by name, or path of a composition file."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """Sampling temperature; reinforcement learning needs 1. Our choice."""
    max_new_tokens: int = Field(default=48, ge=1)
    """Most tokens sampled per turn. Our choice for the nano model, whose calls take 6 to 20."""
    concurrency: int = Field(default=64, ge=1)
    """Episodes in flight; the engine batches their turns. Our choice for two cores."""
    engine_threads: int = Field(default=1, ge=1)
    """Threads of a local engine that a stage starts for itself. Our choice: the other core runs the harness."""
    context_limit: int = Field(default=1024, ge=64)
    """Prompt plus answer, tokens, beyond which the proxy refuses a call. The nano model's positions."""
    hold_seconds: float = Field(default=60.0, gt=0)
    """How long the proxy holds a call while the engine is down or updating, seconds; then the episode fails on
    infrastructure. Our choice, below the wall budget of tasks."""
    answer_seconds: float = Field(default=60.0, gt=0)
    """How long the engine may work on one answer, seconds; then the episode fails on infrastructure. Our choice, below
    the wall budget of tasks."""
    reward_needs_completion: bool = True
    """True: R(e) is the score of a completed episode and 0 otherwise. False: the score in any scored outcome."""
    infra_failure_limit: int = Field(default=64, ge=1)
    """Infrastructure failures in a row after which a session stops instead of burning through its jobs. Our choice."""
    sandbox: LocalSandboxConfig = LocalSandboxConfig()
    """Where agents act."""


class DemonstrationConfig(Record):
    """How the scripted oracle demonstrates."""

    pool: Pool | None = None
    """Tasks of this pool only; None takes all."""
    limit: int | None = Field(default=None, ge=1)
    """At most so many tasks, in order of their ids; None takes all."""
    trials: int = Field(default=1, ge=1)
    """Demonstrations per task; they differ in their redundant reads."""
    wasteful: float = Field(default=0.5, ge=0, le=1)
    """Chance that an update is preceded by a redundant read of its record (half of it: followed by one), so that
    learning to be efficient keeps room above imitation. Our choice, from the nano prototype."""
    rollout: RolloutConfig = RolloutConfig()
    """Harness, limits and sandbox of the demonstrations."""
