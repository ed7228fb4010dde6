"""Connections through an API server: however dialling one ends, none is left open."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

from aiohttp import web

from occamy.sandboxes.kubernetes.api import Api
from occamy.sandboxes.kubernetes.tunnel import Tunnel


def test_a_dial_that_is_cancelled_at_any_step_leaves_no_connection() -> None:
    async def body() -> None:
        opened = asyncio.Event()
        ends: list[asyncio.Event] = []

        async def serve(request: web.Request) -> web.WebSocketResponse:
            """Stands for an API server, whose pods cannot run here."""
            socket, end = web.WebSocketResponse(protocols=("v4.channel.k8s.io",)), asyncio.Event()
            await socket.prepare(request)
            ends.append(end)
            opened.set()
            async for _ in socket:
                pass
            end.set()
            return socket

        app = web.Application()
        app.router.add_get("/{path:.*}", serve)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        credentials = SimpleNamespace(
            host=f"http://127.0.0.1:{runner.addresses[0][1]}",
            ssl_ca_cert=None,
            cert_file=None,
            verify_ssl=True,
            get_api_key_with_prefix=lambda _: None,
        )
        api = Api(credentials, 60.0)
        tunnel = Tunnel(api, "n", "pod-0", 8750)
        for steps in range(20):
            opened.clear()
            dial = asyncio.create_task(tunnel.dial())
            await opened.wait()
            for _ in range(steps):
                await asyncio.sleep(0)
            dial.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await dial)[1].close()
        async with asyncio.timeout(20.0):
            await asyncio.gather(*(end.wait() for end in ends))
        await api.close()
        await runner.cleanup()

    asyncio.run(body())
