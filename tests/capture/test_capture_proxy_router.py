"""The router in front of proxies: streams pass through it, clients that leave, proxies that die."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from occamy.capture.proxy import MAX_BODY
from occamy.capture.router import Router
from occamy.capture.server import ProxyServer
from occamy.capture.stream import Delivery

ASK = {"role": "user", "content": "set tier of A01 to gold"}
Ids = Callable[[str], list[int]]


@contextmanager
def _routed(url: str) -> Iterator[Any]:
    """Serve a router in front of one proxy; yields its address as tests know a proxy's."""
    loop, listener = asyncio.new_event_loop(), socket.create_server(("127.0.0.1", 0))
    runner = web.AppRunner(Router({"a": url}, hold_seconds=0.5).app(), access_log=None, handler_cancellation=True)

    async def start() -> None:
        await runner.setup()
        await web.SockSite(runner, listener).start()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield types.SimpleNamespace(url="http://{}:{}".format(*listener.getsockname()))
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def proxy(tmp_path: Path, tokenizer_dir: Path, engine: Any) -> Iterator[ProxyServer]:
    """A proxy whose streams begin at once."""
    delivery = Delivery(commit_seconds=0.0, alive_seconds=0.02)
    with ProxyServer(tmp_path, tokenizer_dir, engine_url=engine.url, delivery=delivery) as server:
        yield server


def test_a_held_stream_passes_through(proxy: ProxyServer, engine: Any, connect: Any, ids: Ids) -> None:
    engine.script, engine.release = [(ids("done<end>"), "stop")], threading.Event()
    with _routed(proxy.url) as router:
        client = connect(router, key=connect(proxy).key)
        with closing(client.request("POST", "/chat/completions", {"messages": [ASK], "stream": True})) as connection:
            response = connection.getresponse()
            assert response.status == 200 and response.readline() == b": held\n"
            engine.release.set()
            assert response.read().endswith(b"data: [DONE]\n\n")


def test_a_client_that_leaves_ends_its_request_in_the_engine(
    proxy: ProxyServer, engine: Any, connect: Any, ids: Ids
) -> None:
    engine.script, engine.release = [(ids("done<end>"), "stop")], threading.Event()
    with _routed(proxy.url) as router:
        client = connect(router, key=connect(proxy).key)
        connection = client.request("POST", "/chat/completions", {"messages": [ASK]})
        assert engine.arrived.wait(10)
        connection.close()
        assert engine.aborted.get(timeout=10) == engine.seen[0]["rid"]
        engine.release.set()


def test_a_body_that_is_too_large_is_refused_in_openai_format(proxy: ProxyServer, connect: Any) -> None:
    with _routed(proxy.url) as router:
        client = connect(router, key=connect(proxy).key)
        status, answer = client.send("POST", "/chat/completions", b" " * (MAX_BODY + 1))
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


def test_a_proxy_that_is_gone_is_waited_for_and_then_told(connect: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = "http://{}:{}".format(*free.getsockname())
    with _routed(url) as router:
        client = connect(router, key="k")
        status, answer = client.chat([ASK])
        assert (status, answer["error"]["code"]) == (503, "proxy_unavailable")
        client.base = ""
        assert client.send("GET", "/healthz") == (503, {"status": "degraded", "down": ["a"]})
        assert client.send("POST", "/admin/pause")[0] == 503


def test_a_proxy_that_dies_in_a_stream_ends_it_with_an_error_event(connect: Any) -> None:
    def die(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head + b"8\r\n: held\n\n\r\n")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        dying = threading.Thread(target=die, args=(listener,))
        dying.start()
        with _routed("http://{}:{}".format(*listener.getsockname())) as router:
            status, lines = connect(router, key="k").stream([ASK])
        dying.join()
    assert status == 200 and lines[0] == ": held" and lines[-1] == "data: [DONE]"
    assert json.loads(lines[1].removeprefix("data: "))["error"]["code"] == "proxy_unavailable"
