"""kopf's part: it watches, and every event goes into the cache and the queue. No decision is made here.

Only low-level event handlers are used. They write nothing to the objects, so that there is no annotation to outgrow
its limit and no finalizer: kopf's timers and daemons would add one, and deleting must work with the operator down.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import kopf

from operators.sandbox.api import Api, connection
from operators.sandbox.health import Freshness
from operators.sandbox.models import GROUP, VERSION
from operators.sandbox.reconcile import Reconciler
from operators.sandbox.snapshots import judge_snapshot
from operators.sandbox.views import POOL_LABEL, Lease, Pod, Pool


class Nothing(kopf.DiffBaseStorage):
    """What kopf compares objects with to find out what changed. It has no handler here that would ask; without this it
    copies every object of every event for it, a fifth of the operator's CPU."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Nothing is kept on the objects."""


def make_registry(api: Api, reconciler: Reconciler, freshness: Freshness) -> kopf.OperatorRegistry:
    """Handlers of the four kinds that are watched."""
    registry = kopf.OperatorRegistry()
    cache = reconciler.cache

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return connection()

    @kopf.on.event(GROUP, VERSION, "sandboxpools", registry=registry)
    async def pool(event: Any, **_: Any) -> None:
        seen, gone = Pool.parse(event["object"]), event["type"] == "DELETED"
        freshness.told("sandboxpools", seen.uid, seen.version, gone)
        if not gone and cache.pools.put(seen):
            reconciler.pool_changed(seen)
        elif gone and cache.pools.drop(seen.uid):
            reconciler.pool_gone(seen)

    @kopf.on.event(GROUP, VERSION, "sandboxleases", registry=registry)
    async def lease(event: Any, **_: Any) -> None:
        seen, gone = Lease.parse(event["object"]), event["type"] == "DELETED"
        freshness.told("sandboxleases", seen.uid, seen.version, gone)
        if not gone and cache.leases.put(seen):
            reconciler.lease_changed(seen)
        elif gone and cache.leases.drop(seen.uid):
            reconciler.lease_gone(seen)

    @kopf.on.event("", "v1", "pods", labels={POOL_LABEL: kopf.PRESENT}, registry=registry)
    async def pod(event: Any, **_: Any) -> None:
        seen, gone = Pod.parse(event["object"]), event["type"] == "DELETED"
        freshness.told("pods", seen.uid, seen.version, gone)
        if not gone and cache.pods.put(seen):
            reconciler.pod_changed(seen)
        elif gone:
            cache.pods.drop(seen.uid)
            reconciler.pod_gone(seen)

    @kopf.on.event(GROUP, VERSION, "sandboxsnapshots", registry=registry)
    async def snapshot(event: Any, **_: Any) -> None:
        if event["type"] != "DELETED":
            await judge_snapshot(api, event["object"])

    return registry


def make_settings() -> kopf.OperatorSettings:
    """How kopf behaves: no events of its own, bounded work, and no giving up while the API server is away."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # transitions are posted by the operator itself
    settings.scanning.disabled = True  # needs no right to list CRDs and namespaces
    settings.peering.standalone = True  # one replica, Recreate
    settings.watching.label_selectors["", "v1", "pods"] = POOL_LABEL
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = 90
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = [0.2, 0.5, 1, 2, *[5] * 720]
    settings.queueing.error_delays = [0.5, 1, 2, 5]
    settings.persistence.diffbase_storage = Nothing()
    settings.persistence.finalizer = f"{GROUP}/unused"
    return settings
