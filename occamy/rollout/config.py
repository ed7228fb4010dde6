"""Configuration of rollouts and demonstrations."""

from __future__ import annotations

import os
from ipaddress import IPv4Address
from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from occamy.contracts.record import Record
from occamy.contracts.task import Pool
from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig


def backend(section: Any) -> str:
    """Which backend a section is for: the local one, unless it says so."""
    return str(section.get("backend", "local") if isinstance(section, dict) else getattr(section, "backend", section))


SandboxConfig = Annotated[
    Annotated[LocalSandboxConfig, Tag("local")] | Annotated[KubernetesSandboxConfig, Tag("kubernetes")],
    Discriminator(backend),
]
"""One backend's section; its key ``backend`` tells which."""


class ServersConfig(Record):
    """Where a rollout serves: its recording proxy to agents that are programs, and their tools.

    Programs in pods have to reach both, so they are then served at an address of this machine or pod that the network
    rule of their pool opens. Each episode has its own keys to both.
    """

    host: str = "127.0.0.1"
    """IPv4 address to listen at, and to give to programs. ``$NAME`` takes it from the environment of the process that
    serves: ``$POD_IP`` where the pod's own address is put there."""
    proxy_port: int = Field(default=0, ge=0, le=65535)
    """Port of the recording proxy; 0 takes a free one, which no pool's network rule could name."""
    tools_port: int = Field(default=0, ge=0, le=65535)
    """Port of the tool server; 0 takes a free one."""

    @field_validator("host")
    @classmethod
    def _one_address(cls, host: str) -> str:
        if not host.startswith("$") and not _callable(host):
            raise ValueError(f"{host!r} is no IPv4 address that can be called; give the one that sandboxes reach")
        return host

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.proxy_port == self.tools_port != 0:
            raise ValueError(f"proxy_port and tools_port are both {self.proxy_port}; each server needs its own")
        return self

    def address(self) -> str:
        """The address itself. Raises ValueError when the environment has none."""
        if not self.host.startswith("$"):
            return self.host
        found = os.environ.get(self.host[1:], "")
        try:
            return self._one_address(found)
        except ValueError as e:
            raise ValueError(f"rollout.servers.host is {self.host}, and {self.host[1:]} is {found!r}: {e}") from e


def _callable(host: str) -> bool:
    try:
        return not IPv4Address(host).is_unspecified
    except ValueError:
        return False


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
    sandbox: SandboxConfig = LocalSandboxConfig()
    """Where agents act."""
    servers: ServersConfig = ServersConfig()
    """Where agents that are programs reach model and tools."""


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
