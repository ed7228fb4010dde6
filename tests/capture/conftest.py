"""The nano tokenizer as a folder, and an engine that answers /generate with scripted ids."""

from __future__ import annotations

import asyncio
import http.client
import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import orjson
import pytest
from aiohttp import web

from occamy.capture.render import Renderer
from occamy.contracts.capture import CaptureRules
from occamy.nano.tokenizer import save_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(tokenizer_dir: Path) -> Renderer:
    return Renderer(tokenizer_dir)


class ScriptedEngine:
    """Speaks SGLang's /generate in a thread.

    `script` holds (ids, finish), an HTTP status or a raw body, served in order; an empty body breaks the connection.
    """

    def __init__(self, port: int = 0) -> None:
        self.script: list[tuple[list[int], str] | int | bytes] = []
        self.seen: list[dict[str, Any]] = []
        self.aborted: queue.Queue[str] = queue.Queue()
        self.version = 0
        self.release: threading.Event | None = None
        self.arrived = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._ok)
        runner = web.AppRunner(app, access_log=None)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.SockSite(runner, self._socket).start())
        self._loop.call_soon(self._ready.set)
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.put(orjson.loads(await request.read())["rid"])
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.seen.append(body)
        self.arrived.set()
        if self.release is not None:
            await asyncio.to_thread(self.release.wait, 10)
        step = self.script.pop(0)
        if isinstance(step, int):
            return web.json_response({"error": {"message": "scripted failure"}}, status=step)
        if isinstance(step, bytes):
            if not step and request.transport is not None:
                request.transport.abort()
            return web.Response(body=step)
        ids, finish = step
        meta = {
            "id": body.get("rid"),
            "finish_reason": {"type": finish},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": str(self.version),
            "output_token_logprobs": [[-0.25 * (i + 1), token, None] for i, token in enumerate(ids)],
        }
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    scripted = ScriptedEngine()
    yield scripted
    scripted.stop()


Answer = tuple[int, dict[str, Any]]


class Client:
    """One episode's HTTP client."""

    def __init__(self, url: str, episode: str, key: str, run: str = "root") -> None:
        self.address = url.removeprefix("http://")
        self.base, self.key = f"/episodes/{episode}/{run}/v1", key

    def chat(self, messages: list[dict[str, Any]], rewrite: str | None = None, **options: Any) -> Answer:
        headers = {"x-occamy-rewrite": rewrite} if rewrite else {}
        return self.send("POST", "/chat/completions", {"messages": messages, **options}, headers)

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        with closing(self.request(method, path, body, headers)) as connection:
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def stream(self, messages: list[dict[str, Any]], **options: Any) -> tuple[int, list[str]]:
        """Status and lines of a streamed answer, blank ones left out."""
        body = {"messages": messages, "stream": True, **options}
        with closing(self.request("POST", "/chat/completions", body)) as connection:
            response = connection.getresponse()
            return response.status, [line for line in response.read().decode().split("\n") if line]

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPConnection:
        """Send a request; the connection gives the answer."""
        connection = http.client.HTTPConnection(self.address, timeout=20)
        auth = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body)
        connection.request(method, self.base + path, data, {**auth, **(headers or {})})
        return connection


@pytest.fixture(scope="session")
def connect() -> Callable[..., Client]:
    """Return a function that opens an episode on a proxy, unless it is given a key, and returns its client."""

    def connect(
        proxy: Any,
        episode: str = "e",
        *,
        key: str | None = None,
        run: str = "root",
        sampled_by: Literal["policy", "teacher"] = "policy",
        seed: int = 1,
        rules: CaptureRules | None = None,
    ) -> Client:
        if key is None:
            rules = rules or CaptureRules()
            key = proxy.open_episode(episode, sampled_by=sampled_by, seed=seed, rules=rules)
        return Client(proxy.url, episode, key, run)

    return connect


@pytest.fixture(scope="session")
def ids(renderer: Renderer) -> Callable[[str], list[int]]:
    return lambda text: list(renderer.encode(text))
