"""A server between a tenant and the API server, which gives faults of its own in place of answers, or on their way."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from kubernetes.client.exceptions import ApiException

from occamy.sandboxes.kubernetes.api import Api, find_credentials
from occamy.sandboxes.kubernetes.leases import Leases

from .cluster import eventually
from .daemons import PATIENCE_S
from .pod_processes import tenant
from .sandbox_world import World, call

SPEC = {"pool": "cowork", "owner": {"run": "r", "episode": "e"}, "ttlSeconds": 600}
CONTENDED = {
    "kind": "Status",
    "apiVersion": "v1",
    "status": "Failure",
    "reason": "Conflict",
    "message": 'Operation cannot be fulfilled on resourcequotas "sandboxes": the object has been modified',
    "code": 409,
}
"""An API server's answer to whoever makes something that it could not count: others changed the quota each time."""
EXPIRED = {"kind": "Status", "apiVersion": "v1", "reason": "Expired", "message": "too old", "code": 410}
STATUS = {"busy": 429, "away": 503, "stranger": 403, "unknown": 401, "absent": 404}
BODIES = {"page": "<html>Sign in</html>", "odd": "{}", "odder": "[1]"}
"""What a proxy may answer with 200."""
EVENTS = {
    "gone": json.dumps({"type": "ERROR", "object": EXPIRED}) + "\n",
    "error": '{"type": "ERROR", "object": "no"}\n',
    "strange": '{"type": "ADDED", "object": {}}\n',
    "blank": "\n",
    "half": '{"type": "MODIFIED", "obj',
    "end": "",
}
"""What a watch may bring, before its end."""


def known_tenant(world: World) -> Path:
    """Kubeconfig of a tenant whom the API server knows."""
    made = tenant(world.cluster, world.namespace)

    def known() -> bool:
        try:
            return bool(call(world.cluster.client(made), "GET", world.path("sandboxleases")))
        except ApiException:
            return False

    eventually(known)
    return made


def kind_of(request: web.Request) -> str:
    """WATCH, LIST, SECRET, or the method."""
    if request.method != "GET":
        return request.method
    if "watch" in request.query:
        return "WATCH"
    return "SECRET" if "/secrets/" in request.path else "LIST" if "labelSelector" in request.query else "GET"


@dataclass
class Between:
    """The server. Each fault is given once, to the next request of its kind."""

    faults: list[tuple[str, str]]
    """Kind of request and name of the fault: one of the above, or

    lost: the answer is kept back, and the connection closed; redirect: to a page; silent: no answer, until the client
    has gone; late: the same, and then the API server is asked all the same; deaf: a watch that says nothing.
    """
    seen: list[str] = field(default_factory=list)
    """Kinds of the requests so far."""
    url: str = ""

    def take(self, kind: str) -> str:
        """The next fault of a kind of request."""
        self.seen.append(kind)
        for index, (of, fault) in enumerate(self.faults):
            if of == kind:
                del self.faults[index]
                return fault
        return ""

    async def give(self, fault: str, request: web.Request) -> web.StreamResponse | None:
        """The answer of a fault, None where the API server gives it."""
        if fault == "contended":
            return web.json_response(CONTENDED, status=409)
        if fault in STATUS:
            return web.Response(status=STATUS[fault])
        if fault in BODIES:
            return web.Response(text=BODIES[fault], content_type="text/html")
        if fault in EVENTS:
            return web.Response(text=EVENTS[fault])
        if fault == "redirect":
            raise web.HTTPFound("/page")
        if fault == "deaf":
            answer = web.StreamResponse()
            await answer.prepare(request)
        if fault in ("silent", "late", "deaf"):
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.01)
        return web.Response() if fault in ("silent", "deaf") else None


@asynccontextmanager
async def between(credentials: Any, faults: list[tuple[str, str]]) -> AsyncIterator[Between]:
    """Such a server, at which these credentials point from now on."""
    made, real = Between(faults), credentials.host
    tls = ssl.create_default_context(cafile=credentials.ssl_ca_cert)

    async def serve(request: web.Request) -> web.StreamResponse:
        if request.path == "/page":
            return web.Response(text=BODIES["page"], content_type="text/html")
        body = await request.read()
        fault = made.take(kind_of(request))
        if (given := await made.give(fault, request)) is not None:
            return given
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        async with session.request(request.method, real + request.path_qs, data=body, headers=headers) as answer:
            if fault == "lost":
                await answer.read()
                assert request.transport is not None
                request.transport.abort()
            passed = web.StreamResponse(status=answer.status)
            if request.transport is not None:
                await passed.prepare(request)
                async for piece in answer.content.iter_any():
                    await passed.write(piece)
            return passed

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.url = credentials.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield made
        finally:
            await runner.cleanup()


@asynccontextmanager
async def through(
    kubeconfig: Path,
    namespace: str,
    faults: list[tuple[str, str]],
    *,
    seconds: float = PATIENCE_S,
    heartbeat_s: int = 120,
    changed: Callable[[Any], None] = lambda _: None,
) -> AsyncIterator[tuple[Leases, Between]]:
    """A tenant's leases through such a server; `changed` may do something to its credentials."""
    credentials = find_credentials(kubeconfig, None)
    async with between(credentials, faults) as made:
        changed(credentials)
        api = Api(credentials, seconds)
        leases = Leases(api, namespace, heartbeat_s)
        try:
            yield leases, made
        finally:
            await leases.close(PATIENCE_S)
            await api.close()
