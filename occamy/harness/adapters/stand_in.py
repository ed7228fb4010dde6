"""Serves a composition as an agent service: what an adapter of kind `service` drives while the real one is away."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx2
from aiohttp import web
from pydantic import ValidationError

from occamy.harness.adapters.service import RunAnswer, RunRequest
from occamy.harness.agent import ComposedHarness
from occamy.harness.assignment import Assignment, Observation
from occamy.harness.client import open_http

_HTTP = web.AppKey("http", aiohttp.ClientSession)
_TOOL_SECONDS = 120.0


@dataclass(frozen=True)
class RemoteAnswer:
    """A tool's answer over MCP."""

    content: str

    @property
    def error(self) -> str | None:
        """The typed error that the content spells, if it does."""
        try:
            said = json.loads(self.content)
        except ValueError:
            return None
        error = said.get("error") if isinstance(said, dict) and len(said) == 1 else None
        return error if isinstance(error, str) else None

    @property
    def ok(self) -> bool:
        """False for a typed error."""
        return self.error is None


class RemoteTools:
    """The tools of an episode, over MCP without a session: one request per call."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {key}", "Accept": "application/json, text/event-stream"}
        self._http = httpx2.Client(headers=headers, timeout=_TOOL_SECONDS)
        self._ids = itertools.count(1)

    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI schemas of all tools. Raises httpx2.HTTPError."""
        return [
            {
                "type": "function",
                "function": {"name": t["name"], "description": t["description"], "parameters": t["inputSchema"]},
            }
            for t in self._ask("tools/list", {})["tools"]
        ]

    def call(self, name: str, arguments: str) -> Observation:
        """Run one call. Raises httpx2.HTTPError."""
        said = self._ask("tools/call", {"name": name, "arguments": json.loads(arguments)})
        return RemoteAnswer(said["content"][0]["text"])

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        body = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}
        answer = self._http.post(self._url, json=body).raise_for_status()
        result: dict[str, Any] = answer.json()["result"]
        return result


def build_service(harness: ComposedHarness) -> web.Application:
    """The service as an application: ``POST /runs`` plays one episode and answers when it has ended."""

    async def runs(request: web.Request) -> web.Response:
        try:
            asked = RunRequest.model_validate_json(await request.read())
        except ValidationError as e:
            return web.json_response({"error": str(e)}, status=400)
        answer = await _play(harness, asked, request.app[_HTTP])
        return web.json_response(answer.model_dump(mode="json"))

    async def connections(app: web.Application) -> Any:
        app[_HTTP] = open_http()
        yield
        await app[_HTTP].close()

    app = web.Application()
    app.router.add_post("/runs", runs)
    app.cleanup_ctx.append(connections)
    return app


async def serve(harness: ComposedHarness, port: int, started: Callable[[str], None]) -> None:
    """Serve on loopback until cancelled; `started` is told the URL."""
    runner = web.AppRunner(build_service(harness), access_log=None)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", port))
    try:
        await web.SockSite(runner, listener).start()
        started("http://{}:{}".format(*listener.getsockname()))
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def _play(harness: ComposedHarness, asked: RunRequest, http: aiohttp.ClientSession) -> RunAnswer:
    tools = RemoteTools(asked.tools_url, asked.tools_key)
    model = asked.model
    try:
        run = await harness.run(
            Assignment(
                request=asked.request,
                tools=await asyncio.to_thread(tools.schemas),
                dispatch=tools.call,
                budget=asked.budget,
                base_url=f"{model.base}/root/v1",
                api_key=model.key,
                model=model.name,
                temperature=model.temperature,
                max_new_tokens=model.max_new_tokens,
                http=http,
                context_limit=model.context_limit,
            )
        )
    finally:
        tools.close()
    return RunAnswer(outcome=run.outcome, answer=run.answer, error=run.error)
