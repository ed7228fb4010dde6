"""Pods of pools: creates, furnishes, claims and deletes them, and remembers what is under way."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from operators.sandbox import metrics, resources
from operators.sandbox.api import Api, ApiError, Conflict, Exists, NotFound, Refused, Unclear, path
from operators.sandbox.cache import Cache
from operators.sandbox.hardening import require_hardened
from operators.sandbox.plan_lease import LeaseObserved, takes_warm
from operators.sandbox.plan_pool import Deletion, Hold, Observed, claimable, free_slots
from operators.sandbox.views import LEASE_UID_LABEL, POOL_LABEL, Lease, Pod, Pool

HOLD_S = 5.0
"""How long nothing is created after the API server refused a pod. Our choice."""
OWN_HOLD_S = 30.0
"""How long a lease waits after the API server refused what it alone asked for. Our choice."""
BLOCK_S = 60.0
"""How long a slot is left alone whose name somebody else's pod has. Our choice."""
_DRAWN = 8
"""Warm pods that a claim looks at, drawn at random, before it looks at all: its cost does not grow with the pool. Our
choice."""

log = logging.getLogger(__name__)


@dataclass
class UnderWay:
    """Expectations of one pool: what was asked for and is not in the cache yet."""

    creating: dict[int, bool] = field(default_factory=dict)
    blocked: dict[int, float] = field(default_factory=dict)


class Pods:
    """All pods of all pools. One instance, one event loop: what happens between two awaits is atomic."""

    def __init__(self, api: Api, cache: Cache, random: Random) -> None:
        self.api, self.cache, self.random = api, cache, random
        self.deleting: set[str] = set()
        self.reserved: set[str] = set()
        self.furnished: set[str] = set()
        """UIDs whose policy and secret are there."""
        self._pools: dict[str, UnderWay] = defaultdict(UnderWay)
        self._holds: dict[str, Hold] = {}
        """By UID of a pool, or of a lease with overrides, whose pod is like no other of its pool."""

    def observe(self, pool: Pool, now: float) -> Observed:
        """What planning of a pool reads."""
        way = self._pools[pool.uid]
        return Observed(
            pods=self.cache.pods.where("pool", pool.key),
            creating=dict(way.creating),
            deleting=frozenset(self.deleting),
            reserved=frozenset(self.reserved),
            blocked=frozenset(slot for slot, until in way.blocked.items() if until > now),
            hold=self._holds.get(pool.uid),
        )

    def observe_lease(self, lease: Lease, pool: Pool | None, now: float) -> LeaseObserved:
        """What planning of a lease reads. Its cost does not grow with the pool while there is a pod to take."""
        own = self.cache.pods.where("lease", lease.key)
        deleting = frozenset(self.deleting)
        if pool is None or pool.spec is None or lease.spec is None or own:
            return LeaseObserved(pool=pool, own=own, deleting=deleting)
        idle = self.cache.pods.where("idle", pool.key) if takes_warm(lease.spec) else ()
        busy = self.reserved | self.deleting
        drawn = self.random.sample(idle, min(_DRAWN, len(idle)))
        candidates = [p for p in drawn if p.uid not in busy and claimable(p, pool, now)]
        candidates = candidates or [p for p in idle if p.uid not in busy and claimable(p, pool, now)]
        slots = free_slots(pool.spec, self.observe(pool, now)) if not candidates else []
        return LeaseObserved(pool, own, candidates, slots, self._holds.get(_asker(pool, lease)), deleting)

    async def create(self, pool: Pool, slot: int, lease: Lease | None, now: float) -> bool:
        """Create a pod in a slot, with its policy and its secret. False when the API server would not have it.

        Raises Unclear when nobody knows; the name makes a second attempt find the first.
        """
        way = self._pools[pool.uid]
        assert pool.spec is not None
        if slot not in free_slots(pool.spec, self.observe(pool, now)):
            return False  # taken since it was planned
        body = resources.pod(pool, slot, secrets.token_hex(8), lease, now)
        require_hardened(body)
        way.creating[slot] = lease is None
        try:
            made = Pod.parse(await self.api.call("POST", path("pods", pool.namespace), body))
            self.cache.pods.put(made)
            self._holds.pop(_asker(pool, lease), None)
        except Exists:
            await self._adopt(pool, slot, now)
            return False
        except Refused as e:
            reason = "QuotaExceeded" if "exceeded quota" in e.message else "PodRefused"
            asker = _asker(pool, lease)
            until = now + (HOLD_S if asker == pool.uid else OWN_HOLD_S)
            self._holds[asker] = Hold(reason, e.message, until)
            return False
        finally:
            way.creating.pop(slot, None)
        metrics.CREATED.labels(pool.namespace, pool.name, "warm" if lease is None else "cold").inc()
        await self.furnish(pool, made)
        return True

    async def furnish(self, pool: Pool, pod: Pod) -> None:
        """Make the policy and then the secret without which the pod cannot start. Safe to repeat."""
        await self.deny(pool, pod)
        with contextlib.suppress(Exists):
            body = resources.secret(pod, secrets.token_urlsafe(32))
            await self.api.call("POST", path("secrets", pod.namespace), body)
        self.furnished.add(pod.uid)

    async def deny(self, pool: Pool | None, pod: Pod) -> None:
        """Make the pod's network policy, unless it is there."""
        with contextlib.suppress(Exists):
            await self.api.call("POST", path("networkpolicies", pod.namespace), resources.policy(pool, pod))

    async def claim(self, lease: Lease, candidates: Sequence[Pod], now: float) -> Pod | None:
        """Swap one of the candidates, drawn at random, to the lease. None when somebody was faster, or it is gone.

        Raises Unclear when nobody knows whether it has it now.
        """
        free = [pod for pod in candidates if pod.uid not in self.reserved]
        if not free:
            return None
        target = self.random.choice(free)
        self.reserved.add(target.uid)
        try:
            where = path("pods", target.namespace, target.name)
            taken = Pod.parse(await self.api.call("PATCH", where, resources.claim_patch(target, lease, now)))
            self.cache.pods.put(taken)
            return taken
        except (Conflict, NotFound):
            metrics.CONFLICTS.labels(lease.namespace, lease.pool).inc()
            await self.refresh(target)
            return None
        finally:
            self.reserved.discard(target.uid)

    async def delete(self, deletion: Deletion, *, unchanged: bool) -> None:
        """Delete this pod, never another of its name; with `unchanged`, only if nobody has touched it since."""
        pod = deletion.pod
        conditions = {"uid": pod.uid} | ({"resourceVersion": str(pod.version)} if unchanged else {})
        self.deleting.add(pod.uid)
        try:
            await self.api.call("DELETE", path("pods", pod.namespace, pod.name), {"preconditions": conditions})
            metrics.DELETED.labels(deletion.reason).inc()
            log.info("pod deleted", extra={"namespace": pod.namespace, "pod": pod.name, "reason": deletion.reason})
        except NotFound:
            self.cache.pods.drop(pod.uid)
            self.forget(pod.uid)
        except Conflict:
            self.deleting.discard(pod.uid)
            await self.refresh(pod)
        except (ApiError, Unclear):
            self.deleting.discard(pod.uid)
            raise

    async def refresh(self, pod: Pod) -> None:
        """Read what the pod is now."""
        try:
            found = Pod.parse(await self.api.call("GET", path("pods", pod.namespace, pod.name)))
        except NotFound:
            found = None
        if found is None or found.uid != pod.uid:
            self.cache.pods.drop(pod.uid)
            self.forget(pod.uid)
        if found is not None and found.pool_uid:
            self.cache.pods.put(found)

    async def verify(self, lease: Lease) -> None:
        """After a claim without an answer: ask for every pod that carries the lease's UID."""
        query = {"labelSelector": f"{LEASE_UID_LABEL}={lease.uid}"}
        for body in (await self.api.call("GET", path("pods", lease.namespace), query=query))["items"]:
            self.cache.pods.put(Pod.parse(body))

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self.deleting.discard(uid)
        self.furnished.discard(uid)

    def forget_pool(self, uid: str) -> None:
        """The pool is gone."""
        self._pools.pop(uid, None)
        self._holds.pop(uid, None)

    def forget_lease(self, uid: str) -> None:
        """The lease is gone."""
        self._holds.pop(uid, None)

    async def _adopt(self, pool: Pool, slot: int, now: float) -> None:
        """The name is taken: by a pod of ours that an earlier attempt made, or by one that is not ours, or no more:
        people take pods out of their pool by removing its label, and no watch tells of those."""
        name = f"{pool.name}-{slot}"
        try:
            body = await self.api.call("GET", path("pods", pool.namespace, name))
        except NotFound:
            return
        found = Pod.parse(body)
        if found.pool_uid == pool.uid and POOL_LABEL in body["metadata"]["labels"]:
            self.cache.pods.put(found)
            if self.cache.pods.get(found.uid) is not None:
                return
        self._pools[pool.uid].blocked[slot] = now + BLOCK_S
        log.warning("slot taken by a foreign pod", extra={"namespace": pool.namespace, "pod": name})


def _asker(pool: Pool, lease: Lease | None) -> str:
    """Whose affair it is when the API server refuses the pod."""
    return lease.uid if lease and lease.spec and lease.spec.overrides else pool.uid
