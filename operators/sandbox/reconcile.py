"""Carries plans out: one pool or one lease at a time, as often as anything about it changes."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NamedTuple

from operators.sandbox import metrics
from operators.sandbox.agent_sandbox import POLL_S, AgentSandbox
from operators.sandbox.api import Api, ApiError, Conflict, NotFound, Unclear, path
from operators.sandbox.cache import Cache
from operators.sandbox.events import Events
from operators.sandbox.models import Backend, LeaseStatus, Phase, PoolStatus
from operators.sandbox.plan_lease import LeasePlan, plan_lease
from operators.sandbox.plan_pool import plan_pool
from operators.sandbox.pods import Pods
from operators.sandbox.queue import Queue
from operators.sandbox.views import Lease, Pod, Pool

log = logging.getLogger(__name__)

_WORKERS = {"pool": 4, "lease": 4}
"""Apart, so that claims never wait behind the filling of pools; and few, so that the first of many claims at once is
bound long before the last rather than all of them at the end. Our choice."""
_SETTLE_S = 0.2
"""Pods change in bursts: a pool is planned once for all that happens in this time, and refilled after the claims that
emptied it rather than among them. Our choice."""


class Key(NamedTuple):
    """What a worker takes from the queue."""

    kind: str
    """pool or lease."""
    namespace: str
    name: str


class Reconciler:
    """The workers, and the wishes that events put into their queue."""

    def __init__(self, api: Api, cache: Cache, pods: Pods, events: Events) -> None:
        self.api, self.cache, self.pods, self.events = api, cache, pods, events
        self._queues: dict[str, Queue[Key]] = {kind: Queue() for kind in _WORKERS}
        self._agent_sandbox = AgentSandbox(api, cache)
        self.seen: dict[str, float] = {}
        """When each lease was first seen, by UID: claim latency counts from there."""
        self._untold: dict[str, str] = {}
        """How each lease was launched that was bound here and whose holder has not said when it was served, by UID."""
        self._unclear: set[str] = set()
        """UIDs of leases whose last claim got no answer."""

    async def work(self) -> None:
        """Run the workers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for kind, count in _WORKERS.items():
                for _ in range(count):
                    group.create_task(self._worker(self._queues[kind]))

    def close(self) -> None:
        """Cancel what is planned for later."""
        for queue in self._queues.values():
            queue.close()

    def pool_changed(self, pool: Pool) -> None:
        """Something about the pool itself is new."""
        self._queues["pool"].add(Key("pool", pool.namespace, pool.name))
        self._wake_leases(pool.namespace, pool.name)

    def lease_changed(self, lease: Lease) -> None:
        """Something about the lease is new."""
        self.seen.setdefault(lease.uid, time.time())
        self._served(lease)
        self._queues["lease"].add(Key("lease", lease.namespace, lease.name))

    def pool_gone(self, pool: Pool) -> None:
        """The pool exists no more."""
        self.pods.forget_pool(pool.uid)
        metrics.forget_pool(pool)
        self._queues["pool"].add(Key("pool", pool.namespace, pool.name))

    def pod_gone(self, pod: Pod) -> None:
        """The pod exists no more."""
        self.pods.forget(pod.uid)
        self.pod_changed(pod)

    def lease_gone(self, lease: Lease) -> None:
        """The lease exists no more."""
        self.pods.forget_lease(lease.uid)
        self._agent_sandbox.forget(lease.uid)
        self.seen.pop(lease.uid, None)
        self._untold.pop(lease.uid, None)
        self._unclear.discard(lease.uid)
        self._queues["lease"].add(Key("lease", lease.namespace, lease.name))
        self._queues["pool"].add(Key("pool", lease.namespace, lease.pool))

    def pod_changed(self, pod: Pod) -> None:
        """Something about a pod is new, or it is gone."""
        pool = self.cache.pools.get(pod.pool_uid)
        if pod.lease_uid:
            self._queues["lease"].add(Key("lease", pod.namespace, pod.lease))
        if pool is not None:
            self._queues["pool"].add_after(Key("pool", pool.namespace, pool.name), _SETTLE_S)
            if not pod.lease_uid or self.cache.pods.get(pod.uid) is None:
                self._wake_leases(pool.namespace, pool.name)

    def _wake_leases(self, namespace: str, pool: str) -> None:
        """Leases that wait for a pod, oldest first."""
        waiting = self.cache.leases.where("waiting", f"{namespace}/{pool}")
        for lease in sorted(waiting, key=lambda lease: (lease.created, lease.uid)):
            self._queues["lease"].add(Key("lease", lease.namespace, lease.name))

    async def _worker(self, queue: Queue[Key]) -> None:
        while True:
            key = await queue.get()
            about = {"kind": key.kind, "namespace": key.namespace, "object": key.name}
            try:
                await (self._pool(key) if key.kind == "pool" else self._lease(key))
                queue.forget(key)
            except (ApiError, Unclear) as e:
                metrics.ERRORS.labels(key.kind, type(e).__name__).inc()
                delay = queue.retry(key, getattr(e, "retry_s", None) or 0.0)
                log.warning("reconcile failed", extra={**about, "error": str(e), "retry_s": round(delay, 2)})
            except Exception as e:  # one object's fault must not end the workers; it is counted and seen
                metrics.ERRORS.labels(key.kind, type(e).__name__).inc()
                queue.retry(key, 1.0)
                log.exception("reconcile failed", extra=about)
            finally:
                queue.done(key)

    async def _pool(self, key: Key) -> None:
        pool = self.cache.pools.named(key.namespace, key.name)
        if pool is None or pool.deleting:
            self._queues[key.kind].cancel(key)
            return
        if pool.spec is not None and pool.spec.backend is Backend.agent_sandbox:
            await self._pool_status(pool, await self._agent_sandbox.keep_pool(pool))
            self._queues[key.kind].add_after(key, 10 * POLL_S)
            return
        now = time.time()
        plan = plan_pool(pool, self.pods.observe(pool, now), now)
        unfurnished = [
            p for p in self.cache.pods.where("pool", pool.key)
            if not p.ready and not p.terminating and p.ended is None and p.uid not in self.pods.furnished
        ]  # fmt: skip
        outcomes = await asyncio.gather(
            *(self.pods.create(pool, slot, None, now) for slot in plan.create),
            *(self.pods.delete(deletion, unchanged=True) for deletion in plan.delete),
            *(self.pods.furnish(pool, pod) for pod in unfurnished),
            return_exceptions=True,
        )
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if plan.create or plan.delete:
            now = time.time()
            plan = plan_pool(pool, self.pods.observe(pool, now), now)
            if (plan.create or plan.delete) and not failed:
                self._queues[key.kind].add(key)
        await self._pool_status(pool, plan.status)
        if plan.wake is not None:
            self._queues[key.kind].add_after(key, plan.wake - now)
        if failed:
            raise failed[0]

    async def _pool_status(self, pool: Pool, status: PoolStatus) -> None:
        metrics.observe_pool(pool, self.cache.pods.where("pool", pool.key))
        wire, known = status.wire(), dict(pool.status)
        if wire == known:
            return
        gone = {name: None for name in known if name not in wire}
        body = {"metadata": {"uid": pool.uid}, "status": wire | gone}
        try:
            where = path("sandboxpools", pool.namespace, pool.name, "status")
            answer = await self.api.call("PATCH", where, body)
        except (NotFound, Conflict):
            return
        self.cache.pools.put(Pool.parse(answer))
        if status.reason and status.reason != known.get("reason"):
            self.events.post("SandboxPool", pool, status.reason, status.message or "", warning=True)

    async def _lease(self, key: Key) -> None:
        """Plan and act until there is nothing to do but wait."""
        while (lease := self.cache.leases.named(key.namespace, key.name)) is not None:
            if lease.uid in self._unclear:
                await self.pods.verify(lease)
                self._unclear.discard(lease.uid)
            pool = self.cache.pools.named(lease.namespace, lease.pool)
            now = time.time()
            if pool is not None and pool.spec is not None and pool.spec.backend is Backend.agent_sandbox:
                plan = await self._agent_sandbox.plan(lease, pool, now)
            else:
                plan = plan_lease(lease, self.pods.observe_lease(lease, pool, now), now)
            if not await self._act(lease, pool, plan, now):
                if plan.wake is not None:
                    self._queues[key.kind].add_after(key, plan.wake - now)
                return
        self._queues[key.kind].cancel(key)

    async def _act(self, lease: Lease, pool: Pool | None, plan: LeasePlan, now: float) -> bool:
        """Carry one plan out. True when the lease should be planned again at once."""
        for deletion in plan.delete:
            await self.pods.delete(deletion, unchanged=False)
        if plan.claim:
            try:
                await self.pods.claim(lease, plan.claim, now)
            except Unclear:
                self._unclear.add(lease.uid)
                raise
            return True
        if plan.create is not None:
            assert pool is not None
            try:
                await self.pods.create(pool, plan.create, lease, now)
            except Unclear:
                self._unclear.add(lease.uid)
                raise
            return True
        if plan.remove:
            await self._remove(lease)
            return False
        return plan.status is not None and await self._lease_status(lease, plan.status)

    async def _remove(self, lease: Lease) -> None:
        where = path("sandboxleases", lease.namespace, lease.name)
        try:
            await self.api.call("DELETE", where, {"preconditions": {"uid": lease.uid}})
        except (NotFound, Conflict):
            return

    async def _lease_status(self, lease: Lease, status: LeaseStatus) -> bool:
        """Write a status, unless it is there already. True when the lease has changed meanwhile: plan again."""
        if status == lease.status:
            return False
        wire = status.wire()
        gone = {name: None for name in lease.status.wire() if name not in wire}
        body = {"metadata": {"uid": lease.uid, "resourceVersion": str(lease.version)}, "status": wire | gone}
        try:
            where = path("sandboxleases", lease.namespace, lease.name, "status")
            self.cache.leases.put(Lease.parse(await self.api.call("PATCH", where, body)))
        except NotFound:
            return False
        except Conflict:
            return await self._reread(lease)
        if status.phase is not lease.status.phase:
            self._moved(lease, status)
        return False

    def _served(self, lease: Lease) -> None:
        """Count, once, what a holder says of its first command."""
        if lease.first_exec is not None and (launch := self._untold.pop(lease.uid, None)):
            metrics.FIRST_EXEC_SECONDS.labels(lease.namespace, lease.pool, launch).observe(lease.first_exec)

    async def _reread(self, lease: Lease) -> bool:
        try:
            body = await self.api.call("GET", path("sandboxleases", lease.namespace, lease.name))
        except NotFound:
            return False
        found = Lease.parse(body)
        self.cache.leases.put(found)
        return found.uid == lease.uid

    def _moved(self, lease: Lease, status: LeaseStatus) -> None:
        """A lease has entered another phase: count it, log it, post an event."""
        words = status.message or (f"pod {status.pod}, {status.launch}" if status.phase is Phase.bound else "")
        if status.phase is Phase.bound:
            waited = time.time() - self.seen.get(lease.uid, lease.created)
            metrics.CLAIM_SECONDS.labels(lease.namespace, lease.pool, status.launch).observe(waited)
            self._untold[lease.uid] = str(status.launch)
            self._served(self.cache.leases.get(lease.uid) or lease)
        log.info(
            "lease moved",
            extra={
                "namespace": lease.namespace,
                "lease": lease.name,
                "phase": str(status.phase),
                "reason": status.reason,
                "pod": status.pod,
                "run": lease.spec.owner.run if lease.spec else None,
            },
        )
        warning = status.phase in (Phase.failed, Phase.expired)
        self.events.post("SandboxLease", lease, status.reason or str(status.phase), words, warning=warning)
