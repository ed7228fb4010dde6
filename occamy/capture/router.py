"""One address in front of several proxies: every episode has its proxy, chosen by its id alone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping

import aiohttp
from aiohttp import web
from yarl import URL

from occamy.capture.answer import DONE, event
from occamy.capture.metrics import CONTENT_TYPE, add_up
from occamy.capture.proxy import MAX_BODY
from occamy.capture.request import ApiError

_RETRY_SECONDS = 0.1
_NO_LIMIT = aiohttp.ClientTimeout(total=None)
_PROBE = aiohttp.ClientTimeout(total=3.0)
"""For questions to all proxies, of which one may be down."""
_HOP = {"host", "connection", "keep-alive", "content-length", "transfer-encoding", "expect", "upgrade", "te"}
"""Headers of one connection, not of the message (RFC 9110)."""


def owner(episode_id: str, names: Mapping[str, str]) -> str:
    """Return the proxy of an episode: the highest of the hashes of id and name (rendezvous hashing)."""
    return max(names, key=lambda name: hashlib.blake2b(f"{name}/{episode_id}".encode()).digest())


class Router:
    """Forwards each request to the proxy of its episode. A proxy that died is waited for: its store is durable."""

    def __init__(self, proxies: Mapping[str, str], hold_seconds: float) -> None:
        """`proxies`: name -> URL. The names decide who has which episode, so they must outlive a restart."""
        self._proxies, self._hold = dict(proxies), hold_seconds

    def app(self) -> web.Application:
        """Return the aiohttp application.

        Serve it with `handler_cancellation`: a client that leaves then ends its call here, in the proxy and in the
        engine.
        """
        app = web.Application(client_max_size=MAX_BODY)
        app.cleanup_ctx.append(self._sessions)
        app.router.add_route("*", "/episodes/{episode}/{tail:.*}", self._forward)
        app.router.add_route("*", "/admin/episodes/{episode}{tail:(/.*)?}", self._forward)
        app.router.add_get("/admin/episodes", self._list)
        app.router.add_post("/admin/{act:pause|resume}", self._everywhere)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        return app

    async def _sessions(self, app: web.Application) -> AsyncIterator[None]:
        """A pool for calls; admin requests get a fresh connection each, so that one lost was lost under way."""
        calls = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(connector=calls, timeout=_NO_LIMIT, auto_decompress=False) as self._calls,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), timeout=_NO_LIMIT) as self._rest,
        ):
            yield

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on, and again while its proxy is down and nothing was answered."""
        episode_id = request.match_info["episode"]
        url = URL(self._proxies[owner(episode_id, self._proxies)] + request.raw_path, encoded=True)
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is larger than {MAX_BODY} bytes", "request_too_large")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        is_call = request.path.startswith("/episodes/")
        deadline = time.monotonic() + self._hold
        while True:
            try:
                async with (self._calls if is_call else self._rest).request(
                    request.method, url, data=body, headers=headers, allow_redirects=False
                ) as answer:
                    if answer.content_length is None:
                        return await _pass_stream(request, answer)
                    return web.Response(
                        body=await answer.read(), status=answer.status, headers={"Content-Type": answer.content_type}
                    )
            except aiohttp.ClientError as e:
                if time.monotonic() > deadline or not (is_call or isinstance(e, aiohttp.ClientConnectorError)):
                    return _error(503, f"the proxy of episode {episode_id} does not answer: {e!r}", "proxy_unavailable")
            await asyncio.sleep(_RETRY_SECONDS)

    async def _list(self, request: web.Request) -> web.Response:
        """GET /admin/episodes of all proxies."""
        episodes: list[str] = []
        for status, body in await self._ask_all("GET", "/admin/episodes", request):
            if status != 200:
                return _passed_on(status, body)
            episodes += json.loads(body)["episodes"]
        return web.json_response({"episodes": episodes})

    async def _everywhere(self, request: web.Request) -> web.Response:
        """Pause or resume all proxies. If one cannot pause, none stays paused."""
        answers = await self._ask_all("POST", request.path, request, timeout=_NO_LIMIT)
        failed = next((answer for answer in answers if answer[0] != 200), None)
        if failed is not None and request.match_info["act"] == "pause":
            await self._ask_all("POST", "/admin/resume", request)
        return _passed_on(*(failed or answers[0]))

    async def _metrics(self, request: web.Request) -> web.Response:
        """The sum of the metrics of those that answer."""
        answers = await self._ask_all("GET", "/metrics", request)
        text = add_up(body.decode() for status, body in answers if status == 200)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _healthz(self, request: web.Request) -> web.Response:
        down = [
            name
            for name, (status, _) in zip(self._proxies, await self._ask_all("GET", "/healthz", request), strict=True)
            if status != 200
        ]
        return web.json_response({"status": "degraded" if down else "ok", "down": down}, status=503 if down else 200)

    async def _ask_all(
        self, method: str, path: str, request: web.Request, timeout: aiohttp.ClientTimeout = _PROBE
    ) -> list[tuple[int, bytes]]:
        """Status and body of each proxy's answer; 503 of one that gives none."""
        headers = {"Authorization": request.headers.get("Authorization", "")}

        async def ask(url: str) -> tuple[int, bytes]:
            try:
                async with self._rest.request(method, url + path, headers=headers, timeout=timeout) as answer:
                    return answer.status, await answer.read()
            except (aiohttp.ClientError, TimeoutError) as e:
                return 503, ApiError(503, f"{url} does not answer: {e!r}", "proxy_unavailable").body()

        return await asyncio.gather(*map(ask, self._proxies.values()))


async def _pass_stream(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pass on a stream that has begun; if its proxy dies, its end is told as an error event."""
    response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
    await response.prepare(request)
    try:
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except aiohttp.ClientError as e:
        lost = ApiError(503, f"the proxy died while it answered: {e!r}", "proxy_unavailable")
        await response.write(event(lost.body()) + DONE)
    await response.write_eof()
    return response


def _passed_on(status: int, body: bytes) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _error(status: int, message: str, code: str) -> web.Response:
    return _passed_on(status, ApiError(status, message, code).body())
