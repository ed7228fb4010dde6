"""Lists everything now and then: fills the cache, repairs what watches missed, and reaps what nothing owns any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from operators.sandbox import metrics
from operators.sandbox.api import Api, ApiError, Unclear, path
from operators.sandbox.cache import Item, Shelf
from operators.sandbox.health import Freshness
from operators.sandbox.models import Backend
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
        """Pods before leases before pools: an owner that is missing from the later list is gone."""
        cache, reconciler = self._reconciler.cache, self._reconciler
        for scope in self._scopes:
            pods = await self._refill("pods", cache.pods, Pod.parse, scope, {"labelSelector": POOL_LABEL})
            leases = await self._refill("sandboxleases", cache.leases, Lease.parse, scope)
            pools = await self._refill("sandboxpools", cache.pools, Pool.parse, scope)
            for pod in pods:
                reconciler.pod_changed(pod)
            for lease in leases:
                reconciler.lease_changed(lease)
            for pool in pools:
                reconciler.pool_changed(pool)
            await self._deny(scope)
            for body in (await self._list("sandboxsnapshots", scope))["items"]:
                await judge_snapshot(self._api, body)
        self._freshness.complete(cache.uids())
        await self._reap()

    async def _refill(
        self,
        kind: str,
        shelf: Shelf[T],
        parse: Callable[[Mapping[str, Any]], T],
        scope: str | None,
        query: Mapping[str, str] | None = None,
    ) -> list[T]:
        answer = await self._list(kind, scope, query)
        items = [parse(body) for body in answer["items"]]
        self._freshness.listed(kind, [(item.uid, item.version) for item in items])
        version = int(answer["metadata"]["resourceVersion"])
        return shelf.replace(items, version, lambda item: scope is None or item.namespace == scope)

    async def _deny(self, scope: str | None) -> None:
        """Every pod that runs has its network policy, whoever may have taken it away."""
        answer = await self._list("networkpolicies", scope, {"labelSelector": NONCE_LABEL})
        covered = {body["metadata"]["labels"][NONCE_LABEL] for body in answer["items"]}
        cache, pods = self._reconciler.cache, self._reconciler.pods
        for pod in list(cache.pods):
            pool = cache.pools.get(pod.pool_uid)
            if pod.nonce in covered or pod.terminating or (scope and pod.namespace != scope):
                continue
            if pool is not None and pool.spec is not None and pool.spec.backend is Backend.pods:
                await pods.deny(pool, pod)

    async def _reap(self) -> None:
        cache, pods = self._reconciler.cache, self._reconciler.pods
        leases = {lease.uid for lease in cache.leases}
        pools = {pool.uid for pool in cache.pools}
        for pod in list(cache.pods):
            reason = orphaned(pod, leases, pools, time.time())
            if reason is None or pod.uid in pods.deleting:
                continue
            await pods.delete(Deletion(pod, reason), unchanged=not pod.lease_uid)
            metrics.REAPED.labels(reason).inc()

    async def _list(self, kind: str, scope: str | None, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        return await self._api.call("GET", path(kind, scope), query=query)
