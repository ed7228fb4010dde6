"""The nano tokenizer as a folder, and an engine that answers /generate with scripted ids."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from occamy.capture.render import Renderer
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
    """Speaks SGLang's /generate in a thread. `script` holds (ids, finish) or an HTTP status, served in order."""

    def __init__(self, port: int = 0) -> None:
        self.script: list[tuple[list[int], str] | int] = []
        self.seen: list[dict[str, Any]] = []
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
        app.router.add_post("/abort_request", self._ok)
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

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.seen.append(body)
        self.arrived.set()
        if self.release is not None:
            await asyncio.to_thread(self.release.wait, 10)
        step = self.script.pop(0)
        if isinstance(step, int):
            return web.json_response({"error": {"message": "scripted failure"}}, status=step)
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
