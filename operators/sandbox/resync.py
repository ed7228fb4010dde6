"""Lists everything now and then: fills the cache, repairs what watches missed, and reaps what nothing owns any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from operators.sandbox import metrics
from operators.sandbox.api import Api, ApiError, Unclear, path
from operators.sandbox.cache import Item, Shelf
from operators.sandbox.health import Freshness
from operators.sandbox.plan_pool import Deletion
from operators.sandbox.reconcile import Reconciler
from operators.sandbox.resources import GRACE_S
from operators.sandbox.snapshots import judge_snapshot
from operators.sandbox.views import NONCE_LABEL, POOL_LABEL, Lease, Pod, Pool

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Item)


def orphaned(pod: Pod, leases: Iterable[str], pools: Iterable[str], now: float) -> str | None:
    """Why a pod must be reaped: its lease or its pool is gone, or its deadline has passed. Pure.

    `leases` and `pools` are the UIDs that exist, read after the pod was.
    """
    if pod.terminating:
        return None
    if pod.lease_uid:
        if pod.lease_uid not in leases:
            return "LeaseGone"
        return "PastDeadline" if pod.deadline is not None and now > pod.deadline + GRACE_S else None
    return None if pod.pool_uid in pools else "PoolGone"


class Resync:
    """One round after another."""

    def __init__(self, api: Api, reconciler: Reconciler, freshness: Freshness, namespaces: Sequence[str]) -> None:
        self._api, self._reconciler, self._freshness = api, reconciler, freshness
        self._scopes: tuple[str | None, ...] = tuple(namespaces) or (None,)

    async def run(self, period_s: float) -> None:
        """Rounds until cancelled."""
        while True:
            await asyncio.sleep(period_s)
            try:
                await self.once()
            except (ApiError, Unclear) as e:
                metrics.ERRORS.labels("resync", type(e).__name__).inc()
                log.warning("resync failed", extra={"error": str(e)})

    async def first(self) -> None:
        """The round without which nothing may be created; tried until it succeeds."""
        while True:
            try:
                return await self.once()
            except (ApiError, Unclear) as e:
                log.warning("the cluster cannot be listed yet", extra={"error": str(e)})
                await asyncio.sleep(1)

    async def once(self) -> None:
        """Pods before leases before pools: an owner that is missing from the later list is gone.

        Only lists make a round fail. What one repair meets is the affair of one object, and of nobody else.
        """
        cache, reconciler = self._reconciler.cache, self._reconciler
        covered: set[tuple[str, str]] = set()
        snapshots: list[Mapping[str, Any]] = []
        for scope in self._scopes:
            pods, lost_pods = await self._refill("pods", cache.pods, Pod.parse, scope, {"labelSelector": POOL_LABEL})
            leases, lost_leases = await self._refill("sandboxleases", cache.leases, Lease.parse, scope)
            _, lost_pools = await self._refill("sandboxpools", cache.pools, Pool.parse, scope)
            for pod in pods:
                reconciler.pod_changed(pod)
            for lease in leases:
                reconciler.lease_changed(lease)
            for pod in lost_pods:
                reconciler.pod_gone(pod)
            for lease in lost_leases:
                reconciler.lease_gone(lease)
            for pool in lost_pools:
                reconciler.pool_gone(pool)
            policies = (await self._list("networkpolicies", scope, {"labelSelector": NONCE_LABEL}))["items"]
            covered |= {(p["metadata"]["namespace"], p["metadata"]["labels"][NONCE_LABEL]) for p in policies}
            snapshots += (await self._list("sandboxsnapshots", scope))["items"]
        for pool in cache.pools:
            reconciler.pool_changed(pool)
        self._freshness.complete(cache.uids())
        repairs = [*self._reap(), *self._deny(covered), *(judge_snapshot(self._api, body) for body in snapshots)]
        await asyncio.gather(*map(self._repair, repairs))

    async def _repair(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (ApiError, Unclear) as e:
            metrics.ERRORS.labels("resync", type(e).__name__).inc()
            log.warning("repair failed", extra={"error": str(e)})

    async def _refill(
        self,
        kind: str,
        shelf: Shelf[T],
        parse: Callable[[Mapping[str, Any]], T],
        scope: str | None,
        query: Mapping[str, str] | None = None,
    ) -> tuple[list[T], list[T]]:
        answer = await self._list(kind, scope, query)
        items = [parse(body) for body in answer["items"]]
        self._freshness.listed(kind, [(item.uid, item.version) for item in items])
        version = int(answer["metadata"]["resourceVersion"])
        return shelf.replace(items, version, lambda item: scope is None or item.namespace == scope)

    def _deny(self, covered: Container[tuple[str, str]]) -> Iterator[Coroutine[Any, Any, None]]:
        """Every pod that runs has its network policy, whoever may have taken it away."""
        cache, pods = self._reconciler.cache, self._reconciler.pods
        for pod in list(cache.pods):
            if pod.nonce and (pod.namespace, pod.nonce) not in covered and not pod.terminating:
                yield pods.deny(cache.pools.get(pod.pool_uid), pod)

    def _reap(self) -> Iterator[Coroutine[Any, Any, None]]:
        """What nothing owns any more goes."""
        cache, pods = self._reconciler.cache, self._reconciler.pods
        leases = {lease.uid for lease in cache.leases}
        pools = {pool.uid for pool in cache.pools}
        for pod in list(cache.pods):
            reason = orphaned(pod, leases, pools, time.time())
            if reason is not None and pod.uid not in pods.deleting:
                yield self._reap_one(pod, reason)

    async def _reap_one(self, pod: Pod, reason: str) -> None:
        await self._reconciler.pods.delete(Deletion(pod, reason), unchanged=not pod.lease_uid)
        metrics.REAPED.labels(reason).inc()

    async def _list(self, kind: str, scope: str | None, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        return await self._api.call("GET", path(kind, scope), query=query)
