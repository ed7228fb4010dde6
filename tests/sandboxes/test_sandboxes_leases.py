"""Leases of the Kubernetes backend against an API server whose answers come when the test says."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.client import Configuration

from occamy.sandboxes.kubernetes.api import Api
from occamy.sandboxes.kubernetes.leases import Leases

PATIENCE_S = 60.0
OBJECT = {"apiVersion": "v1"}


class Server:
    """Ends the first watch as too old, and holds the list that follows until told."""

    def __init__(self) -> None:
        self.lists = self.watches = 0
        self.made, self.listing, self.listed, self.watched_again = (asyncio.Event() for _ in range(4))

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            return web.json_response(OBJECT | {"metadata": {"uid": "u"}})
        if request.method != "GET":
            return web.json_response(OBJECT)
        if "watch" in request.query:
            return await self._watch()
        self.lists += 1
        if self.lists == 2:
            self.listing.set()
            await self.listed.wait()
        return web.json_response(OBJECT | {"metadata": {"resourceVersion": "1"}, "items": []})

    async def _watch(self) -> web.Response:
        self.watches += 1
        if self.watches == 1:
            await self.made.wait()
            return web.json_response({"message": "too old resource version"}, status=410)
        self.watched_again.set()
        return web.Response()


def test_a_lease_that_is_released_while_all_are_listed_does_not_end_the_watch() -> None:
    """Without the watch, every other lease of the rollout would wait for its pod in vain."""

    async def scene() -> None:
        server = Server()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        async with TestServer(app) as http, asyncio.timeout(PATIENCE_S):
            config = Configuration()
            config.host = f"http://127.0.0.1:{http.port}"
            api = Api(config, PATIENCE_S)
            leases = Leases(api, "ns", None)
            held = await leases.create({"pool": "p"}, 0.0)
            server.made.set()
            await server.listing.wait()
            await leases.release(held, PATIENCE_S)
            server.listed.set()
            await server.watched_again.wait()
            await leases.close(PATIENCE_S)
            await api.close()

    asyncio.run(scene())
