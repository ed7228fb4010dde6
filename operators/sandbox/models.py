"""SandboxPool, SandboxLease and SandboxSnapshot: the one source of their schema, documentation and validation."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from operators.sandbox.rules import Resource, Rule, frozen
from operators.sandbox.template import EnvVar, Label, Network, Resources, Template

GROUP = "occamy.dev"
VERSION = "v1alpha1"

Count = Annotated[int, Field(ge=0)]
Moment = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339 in UTC."""
Name = Annotated[str, Field(min_length=1, max_length=253)]
Id = Annotated[str, Field(max_length=256)]
Reason = Annotated[str, Field(max_length=64)]
Message = Annotated[str, Field(max_length=1024)]


def _is_moment(value: str) -> str:
    """Stricter than API servers, which take hours and years that there are not."""
    if datetime.fromisoformat(value).tzinfo is None:
        raise ValueError(f"{value!r} has no time zone; end it with Z")
    return value


class Backend(StrEnum):
    """Who makes the pods of a pool."""

    pods = "pods"
    """This operator."""
    agent_sandbox = "agent-sandbox"
    """The controller of kubernetes-sigs/agent-sandbox."""


class Launch(StrEnum):
    """How a lease may get its pod."""

    any = "any"
    """A warm pod when one is there, else a new one."""
    warm = "warm"
    """A warm pod only."""
    cold = "cold"
    """A new pod only."""


class Phase(StrEnum):
    """Where a lease stands. The last three are final."""

    pending = "Pending"
    bound = "Bound"
    expired = "Expired"
    released = "Released"
    failed = "Failed"

    @property
    def final(self) -> bool:
        """Whether the lease holds no pod any more and never will."""
        return self in (Phase.expired, Phase.released, Phase.failed)


class PoolSpec(Resource):
    """What a pool should be."""

    template: Template
    warm: Annotated[int, Field(ge=0, le=1000)] = 0
    """Target of pods that serve and nobody holds. The scale subresource sets it."""
    max: Annotated[int, Field(ge=1, le=1000)]
    """Hard cap on pods: warm, leased, starting and terminating together."""
    network: Network
    backend: Backend = Backend.pods
    max_lease_seconds: Annotated[int, Field(ge=10, le=86400)] = 14400
    """Longest ttlSeconds of a lease. Our choice."""
    batch: Annotated[int, Field(ge=1, le=100)] = 10
    """Pods created or replaced per reconcile. Our choice."""
    start_seconds: Annotated[int, Field(ge=10, le=3600)] = 600
    """How long a pod may take to serve before it is replaced. Our choice."""
    idle_seconds: Annotated[int, Field(ge=60, le=604800)] = 21600
    """Age at which a pod that nobody leased is replaced. Our choice."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("self.warm <= self.max", "warm may not exceed max", lambda s: s.warm <= s.max),
        Rule(
            "self.backend == 'pods' || (has(self.template.command) && size(self.template.command) > 0)",
            "backend agent-sandbox runs no in-pod agent; give template.command, which keeps the container running",
            lambda s: s.backend is Backend.pods or bool(s.template.command),
        ),
        Rule(
            "self.backend == 'pods' || !has(self.network.clients) || size(self.network.clients) == 0",
            "backend agent-sandbox is reached by pods/exec alone; leave network.clients away",
            lambda s: s.backend is Backend.pods or not s.network.clients,
        ),
    )
    transitions: ClassVar[tuple[dict[str, str], ...]] = (frozen("backend"),)


class PoolStatus(Resource):
    """What a pool is."""

    observed_generation: Count | None = None
    replicas: Count = 0
    """Pods that nobody holds, for the scale subresource."""
    ready: Count = 0
    """Pods that serve and nobody holds."""
    leased: Count = 0
    total: Count = 0
    """All pods, terminating ones included."""
    selector: Annotated[str, Field(max_length=256)] | None = None
    """Selects the pods that nobody holds, for the scale subresource."""
    template_hash: Annotated[str, Field(max_length=16)] | None = None
    reason: Reason | None = None
    """Why the pool is not at its target: Refused, Unschedulable, QuotaExceeded, AtMax."""
    message: Message | None = None


class Owner(Resource):
    """For whom a lease is held."""

    run: Annotated[str, Field(min_length=1, max_length=256)]
    task: Id = ""
    episode: Id = ""


class Overrides(Resource):
    """What a lease wants otherwise than its pool's template. A running pod cannot honour any of it."""

    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = ()
    """Added to the template's variables, or in place of those of the same name."""
    resources: Resources | None = None


class LeaseSpec(Resource):
    """A sandbox for one episode, until it is released or its time is up."""

    pool: Annotated[Label, Field(min_length=1)]
    owner: Owner
    ttl_seconds: Annotated[int, Field(ge=10, le=86400)]
    """Seconds from the creation of the lease after which everything is taken away."""
    heartbeat_seconds: Annotated[int, Field(ge=5, le=3600)] | None = None
    """When given, the lease also ends that long after `renewed`."""
    renewed: Annotated[Moment, AfterValidator(_is_moment)] | None = None
    """When its holder last said that it lives."""
    launch: Launch = Launch.any
    overrides: Overrides | None = None
    released: bool = False
    """Ends the lease and keeps its record for a while; deleting the lease ends it as well."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.overrides) || self.launch != 'warm'",
            "a warm pod runs already and cannot honour overrides; use launch any or cold, or leave overrides away",
            lambda s: s.overrides is None or s.launch is not Launch.warm,
        ),
        Rule(
            "!has(self.renewed) || has(self.heartbeatSeconds)",
            "renewed means nothing without heartbeatSeconds",
            lambda s: s.renewed is None or s.heartbeat_seconds is not None,
        ),
    )
    transitions: ClassVar[tuple[dict[str, str], ...]] = (
        frozen("pool"),
        frozen("owner"),
        frozen("ttlSeconds"),
        frozen("launch"),
        frozen("overrides", optional=True),
        {"rule": "!oldSelf.released || self.released", "message": "a released lease stays released"},
    )

    def terms(self) -> dict[str, object]:
        """The part of the specification that cannot be changed once it is accepted."""
        return self.model_dump(mode="json", include={"pool", "owner", "ttl_seconds", "launch", "overrides"})


class LeaseStatus(Resource):
    """What a lease got."""

    phase: Phase = Phase.pending
    reason: Reason | None = None
    message: Message | None = None
    pod: Name | None = None
    pod_uid: Annotated[str, Field(max_length=64)] | None = None
    """Identity of the pod; a later pod of the same name is another sandbox."""
    endpoint: Annotated[str, Field(max_length=128)] | None = None
    """Address of the in-pod agent, http://HOST:PORT."""
    token_secret: Name | None = None
    """Secret in this namespace whose key `token` the in-pod agent asks for."""
    launch: Annotated[str, Field(json_schema_extra={"enum": ["warm", "cold"]})] | None = None
    accepted: Annotated[str, Field(max_length=80)] | None = None
    """Digest of the terms that were accepted."""
    accepted_at: Moment | None = None
    bound_at: Moment | None = None
    ended_at: Moment | None = None
    expires: Moment | None = None


class SnapshotSpec(Resource):
    """Where the exported workspace of a lease is kept, and what it must hash to."""

    lease: Name
    lease_uid: Annotated[str, Field(min_length=1, max_length=64)]
    uri: Annotated[str, Field(max_length=1024, pattern=r"^(s3|file)://.+$")]
    fingerprint: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]

    transitions: ClassVar[tuple[dict[str, str], ...]] = (
        {"rule": "self == oldSelf", "message": "a snapshot cannot be changed"},
    )


class SnapshotStatus(Resource):
    """Whether the record can be relied on."""

    phase: Annotated[str, Field(json_schema_extra={"enum": ["Sealed", "Refused"]})] | None = None
    sealed: Annotated[str, Field(max_length=80)] | None = None
    """Digest of the specification as first seen."""
    message: Message | None = None
