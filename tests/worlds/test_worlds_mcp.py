"""World tools over MCP: the same dispatcher, log and errors; one key per episode; calls of one world never meet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from occamy.contracts.task import FieldSpec, WorldSpec
from occamy.worlds.mcp import ToolAccess, ToolServer
from occamy.worlds.tools import tool_names, tool_schemas
from occamy.worlds.workspace import MemoryWorkspace
from occamy.worlds.world import ToolResult, World

SPEC = WorldSpec(
    services={"crm": {"tier": FieldSpec(kind="enum", values=("gold", "iron"))}},
    records={"crm": {"A01": {"tier": "iron"}}},
    files={"notes.txt": "hi"},
)
TOOLS = tool_schemas(SPEC, tool_names(SPEC))


@asynccontextmanager
async def serving() -> AsyncIterator[ToolServer]:
    server = ToolServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def connected(access: ToolAccess) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {access.key}"}
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        Client(streamable_http_client(access.url, http_client=http)) as client,
    ):
        yield client


def calling(world: World) -> Callable[[str, dict[str, Any]], Awaitable[ToolResult]]:
    async def call(name: str, arguments: dict[str, Any]) -> ToolResult:
        return world.call(name, arguments)

    return call


async def text_of(client: Client, name: str, arguments: dict[str, Any]) -> str:
    result = await client.call_tool(name, arguments)
    assert not result.is_error
    return str(result.content[0].text)


def test_calls_over_mcp_are_calls_of_the_world() -> None:
    async def play() -> tuple[World, list[str], list[str]]:
        world = World(SPEC, MemoryWorkspace())
        async with serving() as server:
            with server.serve("e.0", TOOLS, calling(world)) as access:
                async with connected(access) as client:
                    listed = (await client.list_tools()).tools
                    assert [t.input_schema for t in listed] == [t["function"]["parameters"] for t in TOOLS]
                    answers = [
                        await text_of(client, "crm_update", {"id": "A01", "tier": "gold"}),
                        await text_of(client, "crm_get", {"id": "B07"}),
                        await text_of(client, "crm_get", {"nonsense": 1}),
                        await text_of(client, "file_read", {"path": "notes.txt"}),
                    ]
        return world, [t.name for t in listed], answers

    world, listed, answers = asyncio.run(play())
    assert listed == list(tool_names(SPEC))
    assert answers == ["ok", '{"error":"not_found"}', '{"error":"invalid_argument"}', "hi"]
    assert [(e.name, e.error) for e in world.events] == [
        ("crm_update", None),
        ("crm_get", "not_found"),
        ("crm_get", "invalid_argument"),
        ("file_read", None),
    ]
    direct = World(SPEC, MemoryWorkspace())
    direct.call("crm_update", {"id": "A01", "tier": "gold"})
    assert world.fingerprint() == direct.fingerprint()


def test_a_key_opens_its_own_episode_and_ends_with_it() -> None:
    async def statuses() -> list[int]:
        ask = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        accept = {"Accept": "application/json, text/event-stream"}
        async with serving() as server, httpx2.AsyncClient(headers=accept) as http:

            async def post(url: str, key: str) -> int:
                return (await http.post(url, json=ask, headers={"Authorization": key})).status_code

            world = World(SPEC, MemoryWorkspace())
            with (
                server.serve("a", TOOLS, calling(world)) as a,
                server.serve("b", TOOLS, calling(world)) as b,
            ):
                assert a.key != b.key
                found = [
                    await post(a.url, f"Bearer {a.key}"),
                    await post(a.url, f"Bearer {b.key}"),
                    await post(a.url, a.key),
                    await post(a.url, ""),
                    await post(a.url.replace("/a/", "/c/"), f"Bearer {a.key}"),
                    await post(a.url + "/more", f"Bearer {a.key}"),
                ]
            return [*found, await post(a.url, f"Bearer {a.key}")]

    assert asyncio.run(statuses()) == [200, 401, 401, 401, 404, 404, 404]


def test_one_id_is_served_once_at_a_time() -> None:
    async def twice() -> None:
        async with serving() as server:
            world = World(SPEC, MemoryWorkspace())
            with server.serve("a", TOOLS, calling(world)):
                again = server.serve("a", TOOLS, calling(world))
                with pytest.raises(ValueError, match="episode a are served already"):
                    again.__enter__()
            with server.serve("a", TOOLS, calling(world)):
                pass

    asyncio.run(twice())


def test_calls_of_one_world_wait_for_each_other_and_those_of_two_do_not() -> None:
    inside: list[str] = []
    log: list[tuple[str, int]] = []

    async def play() -> None:
        met = asyncio.Event()

        def slow(world: str) -> Callable[[str, dict[str, Any]], Awaitable[ToolResult]]:
            async def call(name: str, arguments: dict[str, Any]) -> ToolResult:
                inside.append(world)
                log.append((world, inside.count(world)))
                if {"a", "b"} <= set(inside):
                    met.set()
                await met.wait()
                inside.remove(world)
                return ToolResult("ok", True, None)

            return call

        async with serving() as server:
            with server.serve("a", TOOLS, slow("a")) as a, server.serve("b", TOOLS, slow("b")) as b:
                async with connected(a) as one, connected(b) as two:
                    await asyncio.gather(
                        text_of(one, "file_list", {}), text_of(one, "file_list", {}), text_of(two, "file_list", {})
                    )

    asyncio.run(asyncio.wait_for(play(), 20))
    assert sorted(log) == [("a", 1), ("a", 1), ("b", 1)]
