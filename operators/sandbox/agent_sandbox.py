"""Backend agent-sandbox: pools and leases as objects of kubernetes-sigs/agent-sandbox (extensions v1beta1), whose
controller makes the pods. Its claims always carry a shutdown time and the policy Delete.

What that API cannot express is refused: cold launches, other resources than the template's, an in-pod agent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from operators.sandbox import plan_lease as planning
from operators.sandbox.api import Api, ApiError, Conflict, Exists, NotFound, Refused, path
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


_NOTHING = LeaseObserved(pool=None)


class AgentSandbox:
    """Reads and writes the objects. `max` holds because the warm pool shrinks before a claim is made."""

    def __init__(self, api: Api, cache: Cache) -> None:
        self._api, self._cache = api, cache
        self._lock = asyncio.Lock()
        """Between reading how many claims there are and making one more."""
        self._asked: set[str] = set()
        """UIDs of leases that have a claim, also before their status tells."""

    async def keep_pool(self, pool: Pool) -> PoolStatus:
        """Write template and warm pool, and read how it stands."""
        assert pool.spec is not None
        leased = self._leased(pool)
        try:
            async with self._lock:
                leased = self._leased(pool)
                replicas = max(0, min(pool.spec.warm, pool.spec.max - leased))
                await self._apply("sandboxtemplates", template(pool))
                found = await self._apply("sandboxwarmpools", warm_pool(pool, replicas))
        except (NotFound, Refused) as e:
            said = {"reason": "BackendRefused", "message": str(e)[:1000]}
            return PoolStatus(observed_generation=pool.generation, leased=leased, total=leased, **said)
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
        if lease.deleting:
            await self._drop(lease)
            return LeasePlan()
        if lease.status.phase.final:
            return planning.plan_lease(lease, _NOTHING, now)
        if ending := planning.over(lease, now):
            return await self._end(lease, now, *ending)
        if lease.status.phase is Phase.bound:
            pod = await self._get("pods", lease.namespace, lease.status.pod or "")
            if not _is_of(await self._claim_named(lease), lease) or not _lives(pod, lease.status.pod_uid):
                lost = f"pod {lease.status.pod} or claim {lease.name} is gone"
                return await self._end(lease, now, Phase.failed, "PodLost", lost)
            return LeasePlan(wake=min(lease.deadline(), now + 10 * POLL_S))
        try:
            return await self._start(lease, pool, now)
        except (NotFound, Refused) as e:
            waiting = planning.wait(lease, "BackendRefused", str(e), now)
            return replace(waiting, wake=min(lease.deadline(), now + 10 * POLL_S))

    def forget(self, uid: str) -> None:
        """The lease holds nothing any more."""
        self._asked.discard(uid)

    async def _start(self, lease: Lease, pool: Pool, now: float) -> LeasePlan:
        """A claim for the lease, and its sandbox once there is one."""
        assert lease.spec is not None
        found = await self._claim_named(lease)
        if found is None:
            if problem := planning.refused(lease.spec, pool) or refused(lease.spec):
                return planning.finish(lease, _NOTHING, now, Phase.failed, *problem)
            if not await self._claim(lease, pool):
                return planning.wait(lease, "AtMax", f"pool {lease.pool} has as many pods as its max allows", now)
        elif not _is_of(found, lease):
            whose = f"claim {lease.name} is of another lease, or on its way out"
            taken = planning.wait(lease, "NameTaken", whose, now)
            return replace(taken, wake=now + POLL_S)
        elif status := await self._bound(lease, found, now):
            return LeasePlan(status=status, wake=min(lease.deadline(), now + 10 * POLL_S))
        waiting = planning.wait(lease, "Starting", f"claim {lease.name} has no sandbox yet", now)
        return LeasePlan(status=waiting.status, wake=now + POLL_S)

    async def _end(self, lease: Lease, now: float, phase: Phase, reason: str, words: str) -> LeasePlan:
        await self._drop(lease)
        return planning.finish(lease, _NOTHING, now, phase, reason, words)

    async def _claim(self, lease: Lease, pool: Pool) -> bool:
        """Make room, then the claim. False at the maximum."""
        assert pool.spec is not None
        async with self._lock:
            leased = self._leased(pool, but=lease)
            if leased >= pool.spec.max:
                return False
            room = pool.spec.max - leased - 1
            await self._apply("sandboxwarmpools", warm_pool(pool, max(0, min(pool.spec.warm, room))))
            self._asked.add(lease.uid)
            try:
                await self._api.call("POST", path("sandboxclaims", lease.namespace), claim(lease))
            except Exists:
                pass
            except ApiError:
                self.forget(lease.uid)
                raise
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
        if sandbox is None or pod is None or not _lives(pod, pod["metadata"]["uid"]):
            return None
        launch = "warm" if meta.get("labels", {}).get(LAUNCH_LABEL) == "warm" else "cold"
        identity = {"pod": pod["metadata"]["name"], "pod_uid": pod["metadata"]["uid"], "launch": launch}
        words = {"phase": Phase.bound, "reason": None, "message": None, "bound_at": moment(now)}
        return lease.status.model_copy(update={**planning.accepted(lease, now), **words, **identity})

    def _leased(self, pool: Pool, but: Lease | None = None) -> int:
        leases = self._cache.leases.where("pool", f"{pool.namespace}/{pool.name}")
        others = [lease for lease in leases if but is None or lease.uid != but.uid]
        return sum(holding(lease) or lease.uid in self._asked for lease in others)

    async def _apply(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create, or bring to this specification."""
        meta = body["metadata"]
        found = await self._get(kind, meta["namespace"], meta["name"])
        if found is None:
            return await self._api.call("POST", path(kind, meta["namespace"]), body)
        same = found["spec"] | body["spec"] == found["spec"] and found["metadata"].get("labels") == meta["labels"]
        if same:
            return found
        changes = {name: _change(found["spec"].get(name), wanted) for name, wanted in body["spec"].items()}
        patch = {"metadata": {"labels": meta["labels"]}, "spec": changes}
        return await self._api.call("PATCH", path(kind, meta["namespace"], meta["name"]), patch)

    async def _drop(self, lease: Lease) -> None:
        """Delete the claim of this lease, never that of a namesake."""
        found = await self._claim_named(lease)
        if found is not None and _is_of(found, lease):
            where = path("sandboxclaims", lease.namespace, lease.name)
            with contextlib.suppress(NotFound, Conflict):
                await self._api.call("DELETE", where, {"preconditions": {"uid": found["metadata"]["uid"]}})
        self.forget(lease.uid)

    async def _claim_named(self, lease: Lease) -> dict[str, Any] | None:
        return await self._get("sandboxclaims", lease.namespace, lease.name)

    async def _get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        try:
            return await self._api.call("GET", path(kind, namespace, name))
        except NotFound:
            return None


def _is_of(claim: Mapping[str, Any] | None, lease: Lease) -> bool:
    """Whether a claim is this lease's and stays: names are given again, UIDs are not."""
    meta = claim["metadata"] if claim else {}
    return meta.get("labels", {}).get(LEASE_UID_LABEL) == lease.uid and "deletionTimestamp" not in meta


def _lives(pod: Mapping[str, Any] | None, uid: str | None) -> bool:
    """Whether it is the pod that was meant, and neither ends nor has ended."""
    if pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]:
        return False
    return pod.get("status", {}).get("phase") not in ("Failed", "Succeeded")


def _change(found: Any, wanted: Any) -> Any:
    """The merge patch from one to the other, with what is wanted no more."""
    if not isinstance(found, dict) or not isinstance(wanted, dict):
        return wanted
    gone = dict.fromkeys(found.keys() - wanted.keys())
    return gone | {name: _change(found.get(name), value) for name, value in wanted.items()}


def _meta(pool: Pool) -> dict[str, Any]:
    return {
        "name": pool.name,
        "namespace": pool.namespace,
        "labels": {POOL_LABEL: pool.name, POOL_UID_LABEL: pool.uid, TEMPLATE_LABEL: pool.template},
        "ownerReferences": [owner("SandboxPool", pool.name, pool.uid)],
    }
