"""What the operator knows of pools, leases and pods: small frozen records, parsed once from API objects."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import ValidationError

from occamy.contracts.record import digest
from operators.sandbox.models import GROUP, LeaseSpec, LeaseStatus, Phase, PoolSpec
from operators.sandbox.rules import Resource

S = TypeVar("S", bound=Resource)

POOL_LABEL = f"{GROUP}/pool"
POOL_UID_LABEL = f"{GROUP}/pool-uid"
TEMPLATE_LABEL = f"{GROUP}/template"
LEASE_UID_LABEL = f"{GROUP}/lease-uid"
NONCE_LABEL = f"{GROUP}/nonce"
LEASE_ANNOTATION = f"{GROUP}/lease"
LAUNCH_ANNOTATION = f"{GROUP}/launch"
FIRST_EXEC_ANNOTATION = f"{GROUP}/first-exec-seconds"
DEADLINE_ANNOTATION = f"{GROUP}/deadline"


def seconds(moment: str) -> float:
    """Unix time of an RFC 3339 moment. Raises ValueError."""
    return datetime.fromisoformat(moment).timestamp()


def moment(unix: float) -> str:
    """RFC 3339 in UTC, to the microsecond."""
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Pod:
    """A sandbox pod."""

    namespace: str
    name: str
    uid: str
    version: int
    """resourceVersion: what a claim compares and swaps."""
    pool_uid: str
    template: str
    """Hash of the template that it was made from."""
    nonce: str
    lease_uid: str
    """Empty while nobody holds it."""
    lease: str
    created: float
    started: float | None
    """When its node took it; active deadlines count from there."""
    limit: int | None
    """activeDeadlineSeconds."""
    deadline: float | None
    """When it must be gone, by its annotation, as far as that can be read: whoever may change pods may change it."""
    ready: bool
    ended: float | None
    """When its containers ended, for good."""
    terminating: bool
    unschedulable: bool
    ip: str
    port: int
    """Where its in-pod agent serves."""
    cold: bool
    """Created for a lease that found no warm pod."""

    @property
    def slot(self) -> int:
        """Its place in the pool: the last part of its name, -1 for a name that is not ours."""
        last = self.name.rpartition("-")[2]
        return int(last) if last.isdecimal() else -1

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Pod:
        """Read an API object."""
        meta, status = body["metadata"], body.get("status") or {}
        labels, notes = meta.get("labels") or {}, meta.get("annotations") or {}
        conditions = {c["type"]: c for c in status.get("conditions") or ()}
        scheduled, phase = conditions.get("PodScheduled", {}), status.get("phase")
        return cls(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=meta["uid"],
            version=int(meta["resourceVersion"]),
            pool_uid=labels.get(POOL_UID_LABEL, ""),
            template=labels.get(TEMPLATE_LABEL, ""),
            nonce=labels.get(NONCE_LABEL, ""),
            lease_uid=labels.get(LEASE_UID_LABEL, ""),
            lease=notes.get(LEASE_ANNOTATION, ""),
            created=seconds(meta["creationTimestamp"]),
            started=seconds(status["startTime"]) if status.get("startTime") else None,
            limit=body["spec"].get("activeDeadlineSeconds"),
            deadline=_written_moment(notes.get(DEADLINE_ANNOTATION, "")),
            ready=conditions.get("Ready", {}).get("status") == "True" and phase == "Running",
            ended=_ended(status, meta) if phase in ("Failed", "Succeeded") else None,
            terminating="deletionTimestamp" in meta,
            unschedulable=scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable",
            ip=status.get("podIP", ""),
            port=next((p["containerPort"] for c in body["spec"]["containers"] for p in c.get("ports") or ()), 0),
            cold=notes.get(LAUNCH_ANNOTATION) == "cold",
        )


def _written_moment(said: str) -> float | None:
    try:
        return seconds(said)
    except ValueError:
        return None


def _ended(status: Mapping[str, Any], meta: Mapping[str, Any]) -> float:
    ends = [c.get("state", {}).get("terminated", {}).get("finishedAt") for c in status.get("containerStatuses") or ()]
    return max((seconds(end) for end in ends if end), default=seconds(meta["creationTimestamp"]))


@dataclass(frozen=True, slots=True)
class Pool:
    """A SandboxPool."""

    namespace: str
    name: str
    uid: str
    version: int
    generation: int
    deleting: bool
    spec: PoolSpec | None
    """None when it breaks a rule."""
    problem: str
    """Which rule, in words."""
    template: str
    """Hash of everything that shapes its pods."""
    status: Mapping[str, Any]
    """As last written."""

    @property
    def key(self) -> str:
        """Namespace and UID: by it pods are found. A UID in a label of another namespace means nothing."""
        return f"{self.namespace}/{self.uid}"

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Pool:
        """Read an API object."""
        meta = body["metadata"]
        spec, problem = parse_spec(PoolSpec, body.get("spec") or {})
        return cls(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=meta["uid"],
            version=int(meta["resourceVersion"]),
            generation=meta.get("generation", 0),
            deleting="deletionTimestamp" in meta,
            spec=spec,
            problem=problem,
            template=template_hash(spec) if spec else "",
            status=body.get("status") or {},
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """A SandboxLease."""

    namespace: str
    name: str
    uid: str
    version: int
    created: float
    deleting: bool
    pool: str
    """Name of its pool, also when the specification breaks a rule."""
    spec: LeaseSpec | None
    problem: str
    terms: str
    """Digest of what may not change."""
    status: LeaseStatus
    first_exec: float | None
    """Seconds after which its holder could run a command, as that says."""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Lease:
        """Read an API object."""
        meta, raw = body["metadata"], body.get("spec") or {}
        spec, problem = parse_spec(LeaseSpec, raw)
        return cls(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=meta["uid"],
            version=int(meta["resourceVersion"]),
            created=seconds(meta["creationTimestamp"]),
            deleting="deletionTimestamp" in meta,
            pool=str(raw.get("pool", "")),
            spec=spec,
            problem=problem,
            terms=digest(spec.terms()) if spec else "",
            status=LeaseStatus.model_validate(body.get("status") or {}, extra="ignore"),
            first_exec=_duration((meta.get("annotations") or {}).get(FIRST_EXEC_ANNOTATION, "")),
        )

    @property
    def key(self) -> str:
        """Namespace and UID: by it pods are found."""
        return f"{self.namespace}/{self.uid}"

    @property
    def waiting(self) -> bool:
        """Whether it has no pod yet and may get one."""
        return self.status.phase is Phase.pending and not self.deleting

    def deadline(self) -> float:
        """Unix time at which everything is taken away. Only for a lease that keeps the rules."""
        assert self.spec is not None
        end = self.created + self.spec.ttl_seconds
        if self.spec.heartbeat_seconds is None:
            return end
        renewed = seconds(self.spec.renewed) if self.spec.renewed else self.created
        return min(end, renewed + self.spec.heartbeat_seconds)

    def latest(self) -> float:
        """Unix time after which no renewal can keep it."""
        assert self.spec is not None
        return self.created + self.spec.ttl_seconds


def _duration(said: str) -> float | None:
    """A tenant's word: at most a day, or nothing."""
    try:
        value = float(said)
    except ValueError:
        return None
    return value if 0 <= value <= 86400 else None


def template_hash(spec: PoolSpec) -> str:
    """Ten hex digits of the digest over all that shapes a pod and its policy."""
    return digest(spec.model_dump(mode="json", include={"template", "network", "backend"}))[7:17]


def parse_spec(model: type[S], raw: Mapping[str, Any]) -> tuple[S | None, str]:
    """The specification, or None and what is wrong with it, naming the fields."""
    return _parse(model, json.dumps(raw, sort_keys=True))  # type: ignore[return-value]


@functools.lru_cache(maxsize=4096)
def _parse(model: type[Resource], raw: str) -> tuple[Resource | None, str]:
    try:
        return model.model_validate_json(raw), ""
    except ValidationError as e:
        problems = [f"{'.'.join(map(str, p['loc'])) or 'spec'}: {p['msg']}" for p in e.errors()]
        return None, "; ".join(problems)[:1000]
