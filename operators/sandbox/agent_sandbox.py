"""Backend agent-sandbox: pools and leases as objects of kubernetes-sigs/agent-sandbox (extensions v1beta1), whose
controller makes the pods. Its claims always carry a shutdown time and the policy Delete.

What that API cannot express is refused: cold launches, other resources than the template's, an in-pod agent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from operators.sandbox import plan_lease as planning
from operators.sandbox.api import Api, Conflict, Exists, NotFound, path
from operators.sandbox.cache import Cache
from operators.sandbox.models import Launch, LeaseSpec, LeaseStatus, Overrides, Phase, PoolStatus
from operators.sandbox.plan_lease import LeaseObserved, LeasePlan
from operators.sandbox.resources import CONTAINER, GRACE_S, egress, ingress, owner, pod_spec
from operators.sandbox.views import LEASE_UID_LABEL, POOL_LABEL, POOL_UID_LABEL, TEMPLATE_LABEL, Lease, Pool, moment

POLL_S = 1.0
"""Between looks at objects that are not watched, since their kinds may not be installed. Our choice."""
API_VERSION = "extensions.agents.x-k8s.io/v1beta1"
POD_NAME_ANNOTATION = "agents.x-k8s.io/pod-name"
LAUNCH_LABEL = "agents.x-k8s.io/launch-type"


def template(pool: Pool) -> dict[str, Any]:
    """The SandboxTemplate of a pool: the same hardened pod and the same default-deny policy."""
    assert pool.spec is not None
    spec = pool.spec
    pod = pod_spec(spec.template, spec.network, Overrides())
    pod["activeDeadlineSeconds"] = spec.start_seconds + spec.idle_seconds + spec.max_lease_seconds + GRACE_S
    labels = {POOL_LABEL: pool.name, POOL_UID_LABEL: pool.uid, TEMPLATE_LABEL: pool.template}
    body = {
        "podTemplate": {"metadata": {"labels": labels}, "spec": pod},
        "networkPolicyManagement": "Managed",
        "networkPolicy": {
            "ingress": ingress(spec.network, spec.template.port),
            "egress": egress(spec.network),
        },
        "envVarsInjectionPolicy": "Overrides",
    }
    return {"apiVersion": API_VERSION, "kind": "SandboxTemplate", "metadata": _meta(pool), "spec": body}


def warm_pool(pool: Pool, replicas: int) -> dict[str, Any]:
    """The SandboxWarmPool of a pool."""
    body = {
        "replicas": replicas,
        "sandboxTemplateRef": {"name": pool.name},
        "updateStrategy": {"type": "Recreate"},
    }
    return {"apiVersion": API_VERSION, "kind": "SandboxWarmPool", "metadata": _meta(pool), "spec": body}


def claim(lease: Lease) -> dict[str, Any]:
    """The SandboxClaim of a lease. Given variables, the controller starts a new sandbox rather than take a warm one."""
    assert lease.spec is not None
    overrides = lease.spec.overrides or Overrides()
    body: dict[str, Any] = {
        "warmPoolRef": {"name": lease.pool},
        "lifecycle": {"shutdownTime": moment(lease.latest())[:19] + "Z", "shutdownPolicy": "Delete"},
        "additionalPodMetadata": {"labels": {LEASE_UID_LABEL: lease.uid}},
    }
    if overrides.env:
        body["env"] = [{"name": e.name, "value": e.value, "containerName": CONTAINER} for e in overrides.env]
    meta = {
        "name": lease.name,
        "namespace": lease.namespace,
        "labels": {LEASE_UID_LABEL: lease.uid},
        "ownerReferences": [owner("SandboxLease", lease.name, lease.uid)],
    }
    return {"apiVersion": API_VERSION, "kind": "SandboxClaim", "metadata": meta, "spec": body}


def refused(spec: LeaseSpec) -> tuple[str, str] | None:
    """Reason and words when that API cannot express what the lease asks for."""
    if spec.launch is Launch.cold:
        return "LaunchRefused", "backend agent-sandbox decides itself between warm and cold; use launch any or warm"
    if spec.overrides is not None and spec.overrides.resources is not None:
        return "OverrideRefused", "backend agent-sandbox gives every sandbox the resources of its template"
    return None


def holding(lease: Lease) -> bool:
    """Whether the lease has a claim, as far as its status tells."""
    status = lease.status
    return not lease.deleting and (status.phase is Phase.bound or (status.reason == "Starting"))


class AgentSandbox:
    """Reads and writes the objects. `max` holds because the warm pool shrinks before a claim is made."""

    def __init__(self, api: Api, cache: Cache) -> None:
        self._api, self._cache = api, cache
        self._lock = asyncio.Lock()
        """Between reading how many claims there are and making one more."""

    async def keep_pool(self, pool: Pool) -> PoolStatus:
        """Write template and warm pool, and read how it stands."""
        assert pool.spec is not None
        async with self._lock:
            leased = self._leased(pool)
            replicas = max(0, min(pool.spec.warm, pool.spec.max - leased))
            await self._apply("sandboxtemplates", template(pool))
            found = await self._apply("sandboxwarmpools", warm_pool(pool, replicas))
        status = found.get("status") or {}
        return PoolStatus(
            observed_generation=pool.generation,
            replicas=status.get("replicas", 0),
            ready=status.get("readyReplicas", 0),
            leased=leased,
            total=status.get("replicas", 0) + leased,
            selector=status.get("selector") or None,
            template_hash=pool.template,
            reason="AtMax" if replicas < pool.spec.warm else None,
        )

    async def plan(self, lease: Lease, pool: Pool, now: float) -> LeasePlan:
        """Bind a lease to what its claim got; take the claim away when the lease is over."""
        nothing = LeaseObserved(pool=None)
        if lease.deleting:
            return LeasePlan()
        if lease.status.phase.final:
            return planning.plan_lease(lease, nothing, now)
        if ending := planning.over(lease, now):
            await self._drop(lease)
            return planning.finish(lease, nothing, now, *ending)
        assert lease.spec is not None
        if problem := planning.refused(lease.spec, pool) or refused(lease.spec):
            return planning.finish(lease, nothing, now, Phase.failed, *problem)
        found = await self._get("sandboxclaims", lease.namespace, lease.name)
        if lease.status.phase is Phase.bound:
            if found is None:
                return planning.finish(lease, nothing, now, Phase.failed, "PodLost", f"claim {lease.name} is gone")
            return LeasePlan(wake=min(lease.deadline(), now + 10 * POLL_S))
        if found is None and not await self._claim(lease, pool):
            return planning.wait(lease, "AtMax", f"pool {lease.pool} has as many pods as its max allows", now)
        if found and (status := await self._bound(lease, found, now)):
            return LeasePlan(status=status, wake=min(lease.deadline(), now + 10 * POLL_S))
        waiting = planning.wait(lease, "Starting", f"claim {lease.name} has no sandbox yet", now)
        return LeasePlan(status=waiting.status, wake=now + POLL_S)

    async def _claim(self, lease: Lease, pool: Pool) -> bool:
        """Make room, then the claim. False at the maximum."""
        assert pool.spec is not None
        async with self._lock:
            leased = self._leased(pool, but=lease)
            if leased >= pool.spec.max:
                return False
            room = pool.spec.max - leased - 1
            await self._apply("sandboxwarmpools", warm_pool(pool, max(0, min(pool.spec.warm, room))))
            with contextlib.suppress(Exists):
                await self._api.call("POST", path("sandboxclaims", lease.namespace), claim(lease))
            return True

    async def _bound(self, lease: Lease, found: Mapping[str, Any], now: float) -> LeaseStatus | None:
        """The status of a lease whose sandbox is ready, with the pod's identity."""
        status = found.get("status") or {}
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
        name = (status.get("sandbox") or {}).get("name")
        if not ready or not name:
            return None
        sandbox = await self._get("sandboxes", lease.namespace, name)
        meta = (sandbox or {}).get("metadata", {})
        pod = await self._get("pods", lease.namespace, meta.get("annotations", {}).get(POD_NAME_ANNOTATION, name))
        if sandbox is None or pod is None:
            return None
        launch = "warm" if meta.get("labels", {}).get(LAUNCH_LABEL) == "warm" else "cold"
        identity = {"pod": pod["metadata"]["name"], "pod_uid": pod["metadata"]["uid"], "launch": launch}
        words = {"phase": Phase.bound, "reason": None, "message": None, "bound_at": moment(now)}
        return lease.status.model_copy(update={**planning.accepted(lease, now), **words, **identity})

    def _leased(self, pool: Pool, but: Lease | None = None) -> int:
        leases = self._cache.leases.where("pool", f"{pool.namespace}/{pool.name}")
        return sum(holding(lease) and lease is not but for lease in leases)

    async def _apply(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create, or bring to this specification."""
        meta = body["metadata"]
        found = await self._get(kind, meta["namespace"], meta["name"])
        if found is None:
            return await self._api.call("POST", path(kind, meta["namespace"]), body)
        same = found["spec"] | body["spec"] == found["spec"] and found["metadata"].get("labels") == meta["labels"]
        if same:
            return found
        patch = {"metadata": {"labels": meta["labels"]}, "spec": body["spec"]}
        return await self._api.call("PATCH", path(kind, meta["namespace"], meta["name"]), patch)

    async def _drop(self, lease: Lease) -> None:
        try:
            await self._api.call("DELETE", path("sandboxclaims", lease.namespace, lease.name))
        except (NotFound, Conflict):
            return

    async def _get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        try:
            return await self._api.call("GET", path(kind, namespace, name))
        except NotFound:
            return None


def _meta(pool: Pool) -> dict[str, Any]:
    return {
        "name": pool.name,
        "namespace": pool.namespace,
        "labels": {POOL_LABEL: pool.name, POOL_UID_LABEL: pool.uid, TEMPLATE_LABEL: pool.template},
        "ownerReferences": [owner("SandboxPool", pool.name, pool.uid)],
    }
