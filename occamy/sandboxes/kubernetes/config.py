"""Configuration of the Kubernetes sandbox backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from occamy.contracts.record import Record
from occamy.sandboxes.config import Limits
from occamy.sandboxes.protocol import Isolation

POD_LIMITS = Limits(memory_bytes=1536 << 20, reserved_bytes=8 << 30, workspace_bytes=1 << 30)
"""Below the pool template's defaults, so that a command meets its own limit before the pod meets the node's. The pod's
counts what is filled, so that more may be reserved: as much as on this machine, which OpenClaw needs."""


class KubernetesSandboxConfig(Record):
    """Where leases are made, and how their pods are reached."""

    backend: Literal["kubernetes"] = "kubernetes"
    """Pods of the sandbox operator."""
    namespace: str
    """The tenant's namespace, with its pools."""
    kubeconfig: Path | None = None
    """Credentials; None takes the pod's service account, else what KUBECONFIG or ~/.kube/config say."""
    context: str | None = None
    """Context of that kubeconfig; None takes its current one."""
    run: str = Field(default="rollout", min_length=1, max_length=256)
    """Run id under which `kubectl get` shows the leases."""
    pool: str | None = None
    """Pool to lease from, whatever pool is asked for; None takes the one that is asked for."""
    launch: Literal["any", "warm", "cold"] = "any"
    """Whether a lease may wait for a new pod when no warm one is there."""
    isolation: Isolation = Isolation.container
    """Level that the pools' template demands of its pods, which a tenant cannot read: their administrator tells."""
    minimum_isolation: Isolation = Isolation.container
    """Weakest level that the recipe accepts; leasing is refused below it. Our choice."""
    route: Literal["auto", "agent", "exec"] = "auto"
    """How pods are reached: at the address of their agent, through pods/exec, or the first that answers."""
    connect_seconds: float = Field(default=3.0, gt=0)
    """How long an agent's address may take to answer before pods/exec is used instead. Our choice."""
    bind_seconds: float = Field(default=120.0, gt=0)
    """How long a lease may wait for its pod, and before that for an API server that is away. Our choice."""
    heartbeat_seconds: int | None = Field(default=120, ge=5, le=3600)
    """A lease whose holder was not heard of for so long is taken away; None leaves that to its deadline. Our choice;
    clocks of holder and operator may differ by a part of it only."""
    python: str = "python3"
    """Python of the pool's image, for agent programs that bring none."""
    programs: str = Field(default="/opt/harnesses", pattern="^/")
    """Folder of the pool's image with a folder for each agent program, as in the image occamy-rollout."""
    api_seconds: float = Field(default=15.0, gt=0)
    """For one call to the API server. Our choice."""
    release_seconds: float = Field(default=5.0, gt=0)
    """How long a release waits for the API server, which goes on in the background after. Our choice."""
    min_free_bytes: int = Field(default=16 << 20, ge=0)
    """Free disk of the node below which nothing runs and failures count as infrastructure's, bytes. Our choice."""
    limits: Limits = POD_LIMITS
    """Resource limits of each command; the kernel's own count of processes is the node's (podPidsLimit)."""

    @field_validator("limits", mode="before")
    @classmethod
    def _others_stay(cls, given: Any) -> Any:
        """Naming one limit leaves the others as they are for pods."""
        return {**POD_LIMITS.model_dump(), **given} if isinstance(given, dict) else given
