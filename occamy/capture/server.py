"""A proxy on an event loop of its own thread: inside the rollout process, or as all that a process does."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import uvicorn
import uvloop

from occamy.capture.admin import add_admin
from occamy.capture.backends import Backend, EngineBackend, Gate, Teacher, TeacherBackend
from occamy.capture.episodes import Episodes, SampledBy, Watched
from occamy.capture.metrics import Metrics
from occamy.capture.proxy import Proxy, build_app
from occamy.capture.render import Renderer
from occamy.capture.segments import CapturedEpisode
from occamy.capture.store import Store
from occamy.capture.stream import Delivery
from occamy.contracts.capture import CaptureRules, EpisodeSetup, MixedVersions
from occamy.contracts.task import Budget
from occamy.engines.client import EngineClient

DATABASE = "capture.sqlite"
_COLLECT = (100_000, 20, 20)
"""Thresholds of Python's garbage collector while a proxy serves (our choice). Requests are large trees that die with
their call, without cycles; by default the collector walks them again and again, for a third of a rollout's CPU time."""

T = TypeVar("T")


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
        answer_seconds: float = 600.0,
        delivery: Delivery | None = None,
        admin_key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        listener: socket.socket | None = None,
    ) -> None:
        """`context_limit` counts prompt and answer tokens; `hold_seconds` is how long a call waits for an engine that
        is down or being updated, `answer_seconds` how long the engine may work on one answer (our choices).

        `admin_key` opens the admin API, which is off without one; with it, the episodes that an earlier proxy left open
        in `folder` go on. `listener` takes the place of host and port.
        Raises ValueError when nobody could answer a call.
        """
        if engine_url is None and teacher is None:
            raise ValueError("a proxy needs an engine URL or a teacher")
        self._folder, self._renderer = folder, Renderer(tokenizer_dir)
        self._engine_url, self._teacher, self._admin_key = engine_url, teacher, admin_key
        self._limit, self._hold, self._answer = context_limit, hold_seconds, answer_seconds
        self._delivery = delivery or Delivery()
        self._address, self._listener = (host, port), listener

    def __enter__(self) -> Self:
        listener = self._listener or socket.create_server(self._address, backlog=2048)
        self.store = Store(self._folder / DATABASE)
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
        self._collect = gc.get_threshold()
        gc.set_threshold(*_COLLECT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.set_threshold(*self._collect)
        self._server.should_exit = True
        self._thread.join()
        self.store.close()

    def open_episode(
        self,
        episode_id: str,
        *,
        sampled_by: SampledBy,
        seed: int,
        rules: CaptureRules,
        mixed_versions: MixedVersions = "between_turns",
        budget: Budget | None = None,
    ) -> str:
        """Start an episode and return its API key. An unfinished capture of the same id is discarded.

        Raises ValueError when the id is open or finished, or when `sampled_by` has no backend here.
        """
        setup = EpisodeSetup(
            sampled_by=sampled_by, seed=seed, rules=rules, mixed_versions=mixed_versions, budget=budget
        )
        return self._in_loop(self._episodes.open(episode_id, setup))

    def watch(self, episode_id: str) -> Watched:
        """What an open episode is doing now; from any thread. Raises KeyError when it is not open."""
        return self._episodes.get(episode_id).watched()

    def close_episode(self, episode_id: str) -> CapturedEpisode:
        """End an episode and return what was captured; it is durable in `store`. Raises KeyError when not open."""
        return self._in_loop(self._episodes.close(episode_id))

    def pause(self) -> None:
        """Hold new calls and return when no call is being sampled.

        Raises TimeoutError after `hold_seconds`; calls go on then.
        """
        self._in_loop(self._gate.close(self._hold))

    def resume(self) -> None:
        """Let held calls go on."""

        async def reopen() -> None:
            self._gate.open()

        self._in_loop(reopen())

    def wait(self) -> None:
        """Return when the server has stopped."""
        self._thread.join()

    def _in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _run(self, listener: socket.socket, ready: threading.Event) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(listener, ready))
        except BaseException as e:
            self._failure = e
        finally:
            ready.set()

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._gate, metrics = Gate(), Metrics()
        # Refused calls are held by the proxy's own clock, outside the gate.
        client = None if self._engine_url is None else EngineClient(self._engine_url, self._answer, refused_s=0.0)
        backends: dict[SampledBy, Backend] = {}
        if client is not None:
            backends["policy"] = EngineBackend(client, self._gate)
        if self._teacher is not None:
            backends["teacher"] = TeacherBackend(self._teacher, self._renderer)
        self._episodes = Episodes(self._renderer, self.store, backends.keys(), self._limit)
        proxy = Proxy(
            self._renderer,
            self._episodes,
            backends,
            context_limit=self._limit,
            hold_seconds=self._hold,
            metrics=metrics,
            delivery=self._delivery,
        )
        app = build_app(proxy, metrics, self._episodes)
        if self._admin_key is not None:
            self._episodes.restore()
            add_admin(app, self._admin_key, self._episodes, self._gate, self._hold)
        self._server = uvicorn.Server(_config(app))
        ready.set()
        try:
            await self._server.serve(sockets=[listener])
        finally:
            self._episodes.stop()
            if client is not None:
                await client.close()


def _config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
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
