"""The tools of many worlds over MCP (streamable HTTP): one path and one key per episode.

Calls of one world never meet; each goes to its dispatcher as any other.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import mcp_types as types
import uvicorn
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

_SHUTDOWN_S = 2.0


class Answered(Protocol):
    """What a dispatcher gives back: the text that the agent sees, typed errors included."""

    @property
    def content(self) -> str: ...


Dispatch = Callable[[str, dict[str, Any]], Awaitable[Answered]]
"""Runs one tool call by name and arguments. Never raises for the agent's mistakes."""


@dataclass(frozen=True)
class ToolAccess:
    """Where an agent program finds its tools."""

    url: str
    key: str
    """Bearer token; it opens this path only."""


@dataclass(frozen=True)
class _Toolbox:
    key: str
    tools: tuple[types.Tool, ...]
    dispatch: Dispatch
    one_at_a_time: asyncio.Lock


class ToolServer:
    """One per rollout process. All of it belongs in one event loop."""

    address: tuple[str, int]
    """Host and port, once started."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """`port` 0 takes a free one."""
        self._wanted = (host, port)
        self._boxes: dict[str, _Toolbox] = {}
        server: Server[Any] = Server("world", on_list_tools=self._list, on_call_tool=self._call)
        self._manager = StreamableHTTPSessionManager(server, json_response=True, stateless=True)

    async def start(self) -> None:
        """Listen. Raises OSError."""
        listener = socket.create_server(self._wanted)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address = listener.getsockname()[:2]
        config = uvicorn.Config(
            self._answer,
            log_level="warning",
            access_log=False,
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=int(_SHUTDOWN_S),
        )
        self._server = uvicorn.Server(config)
        running = asyncio.Event()
        self._task = asyncio.create_task(self._run(listener, running))
        await running.wait()

    async def stop(self) -> None:
        """Stop listening; calls in flight are dropped."""
        self._server.should_exit = True
        await self._task

    @contextmanager
    def serve(self, episode_id: str, tools: Sequence[dict[str, Any]], dispatch: Dispatch) -> Iterator[ToolAccess]:
        """Offer tools, given as OpenAI schemas, to whoever holds the key. Raises ValueError for an id in use."""
        if episode_id in self._boxes:
            raise ValueError(f"tools of episode {episode_id} are served already; give each attempt its own id")
        key = secrets.token_hex(16)
        self._boxes[episode_id] = _Toolbox(key, tuple(_tool(t["function"]) for t in tools), dispatch, asyncio.Lock())
        host, port = self.address
        try:
            yield ToolAccess(f"http://{host}:{port}/episodes/{episode_id}/mcp", key)
        finally:
            del self._boxes[episode_id]

    async def _run(self, listener: socket.socket, running: asyncio.Event) -> None:
        async with self._manager.run():
            running.set()
            await self._server.serve(sockets=[listener])

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check path and key, then let MCP read the request."""
        request = Request(scope)
        box = self._boxes.get(_episode_of(request))
        if box is None:
            await PlainTextResponse("no tools are served here", 404)(scope, receive, send)
        elif not secrets.compare_digest(
            request.headers.get("authorization", "").encode(), f"Bearer {box.key}".encode()
        ):
            await PlainTextResponse("the key does not open these tools", 401)(scope, receive, send)
        else:
            await self._manager.handle_request(scope, receive, send)

    def _box(self, ctx: ServerRequestContext[Any, Request]) -> _Toolbox:
        assert ctx.request is not None
        return self._boxes[_episode_of(ctx.request)]

    async def _list(
        self, ctx: ServerRequestContext[Any, Request], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=list(self._box(ctx).tools))

    async def _call(
        self, ctx: ServerRequestContext[Any, Request], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        """A typed error is ordinary content: clients take `isError` for a fault of the server and stop calling it."""
        box = self._box(ctx)
        async with box.one_at_a_time:
            said = await box.dispatch(params.name, params.arguments or {})
        return types.CallToolResult(content=[types.TextContent(type="text", text=said.content)])


def _episode_of(request: Request) -> str:
    parts = request.url.path.split("/")
    return parts[2] if len(parts) == 4 and parts[1] == "episodes" and parts[3] == "mcp" else ""


def _tool(function: dict[str, Any]) -> types.Tool:
    return types.Tool(name=function["name"], description=function["description"], input_schema=function["parameters"])
