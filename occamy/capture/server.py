"""The proxy as a thread of the rollout process: uvicorn on loopback, one event loop, opened and closed from outside."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn

from occamy.capture.backends import Backend, EngineBackend, Gate, Teacher, TeacherBackend
from occamy.capture.proxy import Proxy, SampledBy, build_app
from occamy.capture.render import Renderer
from occamy.capture.segments import CapturedEpisode
from occamy.capture.store import Store
from occamy.contracts.capture import CaptureRules
from occamy.engines.client import EngineClient

DATABASE = "capture.sqlite"


class ProxyServer:
    """Context manager; one per rollout process. `url` and `store` are valid while it is entered."""

    url: str
    """``http://host:port``; an episode's base URL is ``{url}/episodes/{id}/root/v1``."""
    store: Store
    """Captured turns and finished episodes of `folder`."""

    def __init__(
        self,
        folder: Path,
        tokenizer_dir: Path,
        *,
        engine_url: str | None,
        teacher: Teacher | None = None,
        context_limit: int = 1024,
        hold_seconds: float = 120.0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """`context_limit` counts prompt and answer tokens; `hold_seconds` is how long a call waits for an engine that
        is down or being updated (our choice). Raises ValueError when nobody could answer a call."""
        if engine_url is None and teacher is None:
            raise ValueError("a proxy needs an engine URL or a teacher")
        self._folder, self._renderer = folder, Renderer(tokenizer_dir)
        self._engine_url, self._teacher = engine_url, teacher
        self._limit, self._hold, self._address = context_limit, hold_seconds, (host, port)

    def __enter__(self) -> Self:
        self.store = Store(self._folder / DATABASE)
        listener = socket.create_server(self._address, backlog=2048)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it; else 40 ms a call
        self.url = "http://{}:{}".format(*listener.getsockname()[:2])
        ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(listener, ready), name="capture-proxy", daemon=True)
        self._thread.start()
        ready.wait()
        if self._failure is not None:
            self.store.close()
            raise self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.store.close()

    def open_episode(self, episode_id: str, *, sampled_by: SampledBy, seed: int, rules: CaptureRules) -> str:
        """Start an episode and return its API key. An unfinished capture of the same id is discarded.

        Raises ValueError when the id is open or finished, or when `sampled_by` has no backend here.
        """
        return self._proxy.open(episode_id, sampled_by=sampled_by, seed=seed, rules=rules)

    def close_episode(self, episode_id: str) -> CapturedEpisode:
        """End an episode and return what was captured; it is durable in `store`. Raises KeyError when not open."""
        return self._proxy.close(episode_id)

    def pause(self) -> None:
        """Hold new calls and return when no call is being sampled. Raises TimeoutError after `hold_seconds`."""
        self._in_loop(self._gate.close())

    def resume(self) -> None:
        """Let held calls go on."""

        async def reopen() -> None:
            self._gate.open()

        self._in_loop(reopen())

    def _in_loop(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(self._hold)

    def _run(self, listener: socket.socket, ready: threading.Event) -> None:
        try:
            asyncio.run(self._serve(listener, ready))
        except BaseException as e:
            self._failure = e
        finally:
            ready.set()

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._gate = Gate()
        client = None if self._engine_url is None else EngineClient(self._engine_url)
        backends: dict[SampledBy, Backend] = {}
        if client is not None:
            backends["policy"] = EngineBackend(client, self._gate, self._hold)
        if self._teacher is not None:
            backends["teacher"] = TeacherBackend(self._teacher, self._renderer)
        self._proxy = Proxy(self._renderer, self.store, backends, self._limit)
        config = uvicorn.Config(
            build_app(self._proxy),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=600,
            timeout_graceful_shutdown=2,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        self._server = uvicorn.Server(config)
        ready.set()
        try:
            await self._server.serve(sockets=[listener])
        finally:
            if client is not None:
                await client.close()
