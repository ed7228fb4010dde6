"""Serves /healthz and /readyz for the kubelet and /metrics for Prometheus."""

from __future__ import annotations

from collections import Counter

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from operators.sandbox import metrics
from operators.sandbox.cache import Cache
from operators.sandbox.health import Freshness
from operators.sandbox.models import Phase


def make_app(cache: Cache, freshness: Freshness) -> web.Application:
    """The application. /healthz answers 503 and the reasons when the operator has long not seen the cluster, /readyz
    also before it has seen it at all."""

    async def health(_: web.Request) -> web.Response:
        return answer(freshness.problems())

    async def ready(_: web.Request) -> web.Response:
        return answer(freshness.unready())

    def answer(problems: list[str]) -> web.Response:
        return web.json_response({"problems": problems}, status=503 if problems else 200)

    async def scrape(_: web.Request) -> web.Response:
        phases = Counter(lease.status.phase for lease in cache.leases)
        for phase in Phase:
            metrics.LEASES.labels(str(phase)).set(phases[phase])
        metrics.WATCH_LAG.set(freshness.lag())
        metrics.RESYNC_AGE.set(freshness.age())
        return web.Response(body=generate_latest(metrics.REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", health), web.get("/readyz", ready), web.get("/metrics", scrape)])
    return app
