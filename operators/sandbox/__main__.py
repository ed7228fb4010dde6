"""Runs the operator: `python -m operators.sandbox [--namespace NAME ...]`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Sequence
from random import SystemRandom

import kopf
import uvloop
from aiohttp import web

from operators.sandbox.api import Api
from operators.sandbox.cache import Cache
from operators.sandbox.events import Events
from operators.sandbox.handlers import make_registry, make_settings
from operators.sandbox.health import Freshness
from operators.sandbox.pods import Pods
from operators.sandbox.reconcile import Reconciler
from operators.sandbox.resync import Resync
from operators.sandbox.server import make_app

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m operators.sandbox", description="Sandbox operator")
    parser.add_argument("--namespace", action="append", default=[], help="serve only this namespace; may be repeated")
    parser.add_argument("--host", default="0.0.0.0", help="address of /healthz, /readyz and /metrics")
    parser.add_argument("--port", type=int, default=8080, help="port of these, 0 for none")
    parser.add_argument("--resync-seconds", type=float, default=20.0, help="between complete lists")
    parser.add_argument("--debug", action="store_true", help="log what kopf does as well")
    args = parser.parse_args(argv)
    kopf.configure(debug=args.debug, log_format=kopf.LogFormat.JSON)
    if not args.debug:
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # it tells of every event
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # TLS in C
        runner.run(run(args.namespace, args.host, args.port, args.resync_seconds))


async def run(namespaces: Sequence[str], host: str, port: int, resync_s: float) -> None:
    """Everything in one event loop."""
    api, cache, freshness = Api(), Cache(), Freshness(time.monotonic)
    events = Events(api)
    pods = Pods(api, cache, SystemRandom())
    reconciler = Reconciler(api, cache, pods, events)
    resync = Resync(api, reconciler, freshness, namespaces)
    runner = web.AppRunner(make_app(cache, freshness), access_log=None)
    await runner.setup()
    if port:
        await web.TCPSite(runner, host, port).start()
    watching = asyncio.create_task(_watch(make_registry(api, reconciler, freshness), namespaces))
    background = [asyncio.create_task(_act(resync, reconciler, resync_s)), asyncio.create_task(events.work())]
    try:
        done, _ = await asyncio.wait([watching, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (watching, *background):
            task.cancel()
        await asyncio.gather(watching, *background, return_exceptions=True)
        reconciler.close()
        await runner.cleanup()
        await api.close()


async def _act(resync: Resync, reconciler: Reconciler, resync_s: float) -> None:
    """Nothing is done before everything has been listed once."""
    await resync.first()
    async with asyncio.TaskGroup() as group:
        group.create_task(resync.run(resync_s))
        group.create_task(reconciler.work())


async def _watch(registry: kopf.OperatorRegistry, namespaces: Sequence[str]) -> None:
    """kopf until it is told to stop. An API server that is starting may answer what kopf takes as fatal: try again."""
    while True:
        try:
            await kopf.operator(
                registry=registry, settings=make_settings(), clusterwide=not namespaces, namespaces=namespaces
            )
            return
        except Exception as e:  # whatever it was, the operator is of no use without its watches
            log.warning("watching failed, starting it again", extra={"error": f"{type(e).__name__}: {e}"})
            await asyncio.sleep(1)


if __name__ == "__main__":
    main()
