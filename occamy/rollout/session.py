"""A rollout session: many episodes at once in one folder, streamed as they finish, resumable after any kill."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import aiohttp

from occamy.capture.backends import Teacher
from occamy.capture.sealed import write_sealed
from occamy.capture.server import ProxyServer
from occamy.capture.store import Store
from occamy.contracts.episode import EpisodeRecord, Outcome, Segment
from occamy.contracts.lineage import tokenizer_digest
from occamy.contracts.manifest import NAME as MANIFEST
from occamy.contracts.manifest import Manifest, write_atomic
from occamy.contracts.record import canonical_json
from occamy.engines.client import EngineClient
from occamy.harness.adapters.launch import AdapterHarness
from occamy.harness.assignment import Harness
from occamy.harness.client import open_http
from occamy.rollout.archive import Recorded, recorded, write_archive
from occamy.rollout.backend import open_backend, programs_of, serving_address
from occamy.rollout.config import RolloutConfig
from occamy.rollout.episode import EpisodeResult, Place, run_episode
from occamy.rollout.evidence import Evidence, EvidenceStore
from occamy.rollout.jobs import EpisodeJob
from occamy.rollout.spelling import SpelledTeacher

if TYPE_CHECKING:  # an extra that only agent programs need
    from occamy.worlds.mcp import ToolServer

_T = TypeVar("_T")
_HEALTH_S = 5.0


class SessionError(RuntimeError):
    """A session cannot go on in its folder: names what differs and the fix."""


class RolloutStopped(RuntimeError):
    """So many infrastructure failures in a row that the engine or the proxy must be gone."""


class RolloutSession:
    """Context manager that owns the recording proxy, the sandboxes and an event loop in a thread of its own.

    An episode whose id is finished in `folder` is returned from there and never run twice. One that was cut off by
    a kill is run again from its beginning, and its partial capture is dropped. So is, when the folder is opened
    again, one that failed on infrastructure: that says nothing about the attempt.
    """

    def __init__(
        self,
        folder: Path,
        *,
        checkpoint: Path,
        engine_url: str | None,
        harness: Harness,
        config: RolloutConfig,
        teacher: Teacher | None = None,
        asked: str | None = None,
    ) -> None:
        """`checkpoint` gives tokenizer and template; `asked`, a digest, tells what else decides the episodes (jobs,
        weights). Raises SessionError when `folder` was begun with other ones, and ValueError when an agent program
        needs a longer context than `config` gives, or could not reach what is served to it."""
        if isinstance(harness, AdapterHarness):
            harness.check_context(config.context_limit)
            teacher = teacher and SpelledTeacher(teacher, harness.adapter.tools)
        self._address = serving_address(harness, config)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._config = config
        self._harness = harness
        self._engine_url = engine_url
        self._tokenizer = tokenizer_digest(checkpoint)
        identity = {
            "harness": harness.digest,
            "tokenizer": self._tokenizer,
            "context_limit": config.context_limit,
            "max_new_tokens": config.max_new_tokens,
            "reward_needs_completion": config.reward_needs_completion,
            "asked": asked,
        }
        _check_identity(folder, identity)
        write_atomic(folder / "harness.json", canonical_json(harness.manifest))
        self._proxy = ProxyServer(
            folder,
            checkpoint,
            engine_url=engine_url,
            teacher=teacher,
            context_limit=config.context_limit,
            hold_seconds=config.hold_seconds,
            answer_seconds=config.answer_seconds,
            host=self._address,
            port=config.servers.proxy_port,
        )
        self._stack = ExitStack()
        self._failures_in_row = 0
        self._in_flight: dict[str, asyncio.Task[Any]] = {}

    def __enter__(self) -> Self:
        """Start proxy, loop and sandboxes. Raises SandboxError when there can be none, such as for want of rights."""
        with ExitStack() as stack:
            self._proxy = stack.enter_context(self._proxy)
            self._evidence = EvidenceStore(self._folder / "evidence.db")
            stack.callback(self._evidence.close)
            self._sandboxes = open_backend(self._config.sandbox, self._folder)
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
            thread.start()
            stack.callback(self._stop_loop, thread)
            self._http = self._call(_opened_http())
            self._call(self._sandboxes.check())
            tools, programs = self._tool_server(stack), programs_of(self._config.sandbox)
            self._finished = _resumed(self._proxy.store)
            self._place = Place(self._proxy, self._harness, self._http, self._sandboxes, self._config, tools, programs)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Cancel what still runs and stop everything. Unfinished episodes stay resumable."""
        self._stack.close()

    def stream(self, jobs: Iterable[EpisodeJob], concurrency: int) -> Iterator[EpisodeResult]:
        """Run jobs, at most `concurrency` at once, and yield results in completion order.

        Jobs are drawn in the caller's thread, one for each free slot, before a result is handed out; closing the
        iterator cancels what is in flight. Raises RolloutStopped, SessionError for an id that was finished as another
        job, and whatever a broken contract raises.
        """
        arrived: queue.SimpleQueue[Future[EpisodeResult]] = queue.SimpleQueue()
        running: dict[Future[EpisodeResult], str] = {}
        remaining = iter(jobs)

        def fill() -> None:
            while len(running) < concurrency and (job := next(remaining, None)) is not None:
                future = asyncio.run_coroutine_threadsafe(self._episode(job), self._loop)
                running[future] = job.episode_id
                future.add_done_callback(arrived.put)

        try:
            fill()
            while running:
                done = arrived.get()
                del running[done]
                result = done.result()
                self._watch(result.record)
                fill()
                yield result
        finally:
            if running and not self._loop.is_closed():
                self._call(self._abandon(list(running.values())))

    def evidence(self, episode_id: str) -> Evidence:
        """What a finished episode was judged by. Raises KeyError."""
        return self._evidence.get(episode_id)

    def records(self) -> list[EpisodeRecord]:
        """Records of all finished episodes, in order of finishing."""
        return list(self._finished.values())

    def update_weights(self, path: Path, version: int) -> None:
        """Hold all calls, load weights into the engine, go on. Episodes in flight continue with the new version."""
        if self._engine_url is None:
            raise SessionError("this session has no engine; pass engine_url to update weights")
        try:
            self._proxy.pause()
            self._call(_update(self._engine_url, path, version))
        finally:
            self._proxy.resume()

    def check_engine(self) -> None:
        """Raise EngineError unless the engine is healthy within a few seconds."""
        if self._engine_url is not None:
            self._call(_check_health(self._engine_url))

    def recorded(self, episode_id: str) -> Recorded:
        """A finished episode with all that is known of it, for replay. Raises KeyError."""
        return recorded(self._finished[episode_id], self._proxy.store, self._evidence)

    def seal(self, *, kind: str, parents: dict[str, str], facts: dict[str, Any]) -> Manifest:
        """Write all finished episodes to ``folder/sealed`` and seal it. The same episodes give the same seal."""
        episodes = [self.recorded(i) for i in self._finished]
        return self.seal_into(self._folder / "sealed", episodes, kind=kind, parents=parents, facts=facts)

    def seal_into(
        self, out: Path, episodes: Sequence[Recorded], *, kind: str, parents: dict[str, str], facts: dict[str, Any]
    ) -> Manifest:
        """Write episodes of this session, with what a replay needs of them, to `out` and seal it."""
        write_archive(out, episodes)
        segments = [s for e in episodes for s in e.segments]
        facts = {**facts, "tokenizer": self._tokenizer}
        return write_sealed(out, [e.record for e in episodes], segments, kind=kind, parents=parents, facts=facts)

    async def _episode(self, job: EpisodeJob) -> EpisodeResult:
        record = self._finished.get(job.episode_id)
        if record is not None:
            _check_same(job, record)
            return EpisodeResult(record, self._segments(job.episode_id))
        if job.episode_id in self._in_flight:
            raise SessionError(f"episode {job.episode_id} is asked for twice at once; give each attempt its own id")
        task = asyncio.current_task()
        assert task is not None
        self._in_flight[job.episode_id] = task
        try:
            result, evidence = await run_episode(job, self._place)
        finally:
            del self._in_flight[job.episode_id]
        self._evidence.put(job.episode_id, evidence)
        self._evidence.put_contract(result.record.task_digest, job.task)
        self._proxy.store.finish_episode(job.episode_id, result.record.model_dump_json())
        self._finished[job.episode_id] = result.record
        return result

    async def _abandon(self, episode_ids: list[str]) -> None:
        """Cancel episodes and wait until they have let go of their sandboxes and ids."""
        await _cancel([self._in_flight[i] for i in episode_ids if i in self._in_flight])

    async def _shut_down(self) -> None:
        """Cancel episodes first: a session closed under them would look like an infrastructure failure."""
        await self._abandon(list(self._in_flight))
        await self._sandboxes.close()
        await _cancel([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])
        await self._http.close()

    def _segments(self, episode_id: str) -> list[Segment]:
        return self._proxy.store.captured(episode_id).segments

    def _watch(self, record: EpisodeRecord) -> None:
        failed = record.outcome is Outcome.infra_failed
        self._failures_in_row = self._failures_in_row + 1 if failed else 0
        if self._failures_in_row >= self._config.infra_failure_limit:
            raise RolloutStopped(
                f"{self._failures_in_row} episodes in a row failed on infrastructure, last {record.episode_id}: "
                f"{record.error}; put that right and resume in {self._folder}"
            )

    def _tool_server(self, stack: ExitStack) -> ToolServer | None:
        """Start what agent programs reach their tools by; compositions have theirs in this process."""
        if not isinstance(self._harness, AdapterHarness):
            return None
        try:
            from occamy.worlds.mcp import ToolServer
        except ModuleNotFoundError as e:
            raise SessionError(f"agent programs reach their tools over MCP ({e}); install the extra harness") from e
        server = ToolServer(self._address, self._config.servers.tools_port)
        self._call(server.start())
        stack.callback(lambda: self._call(server.stop()))
        return server

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _stop_loop(self, thread: threading.Thread) -> None:
        self._call(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join()
        self._loop.close()


async def _opened_http() -> aiohttp.ClientSession:
    return open_http()


async def _update(url: str, path: Path, version: int) -> None:
    client = EngineClient(url)
    try:
        await client.update_weights_from_disk(path, version)
    finally:
        await client.close()


async def _check_health(url: str) -> None:
    client = EngineClient(url)
    try:
        await client.wait_healthy(_HEALTH_S)
    finally:
        await client.close()


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _resumed(store: Store) -> dict[str, EpisodeRecord]:
    """Finished episodes of an earlier session by id. Those that failed on infrastructure are dropped, to run again."""
    records = {i: EpisodeRecord.model_validate_json(r) for i, r in store.finished().items()}
    failed = [i for i, record in records.items() if record.outcome is Outcome.infra_failed]
    for episode_id in failed:
        store.discard(episode_id)
        del records[episode_id]
    return records


def _check_identity(folder: Path, identity: dict[str, Any]) -> None:
    path = folder / "session.json"
    if not path.is_file():
        if (folder / MANIFEST).is_file():
            raise SessionError(f"{folder}: is sealed already; name another folder for the episodes")
        write_atomic(path, canonical_json(identity))
        return
    before = json.loads(path.read_bytes())
    for name in identity:
        if before.get(name) != identity[name]:
            raise SessionError(
                f"{folder}: was begun with {name} {before.get(name)!r}, now {identity[name]!r}; "
                "use the same setting or a new folder"
            )


def _check_same(job: EpisodeJob, record: EpisodeRecord) -> None:
    wanted = (job.task.digest(), job.trial, job.seed, job.sampled_by, job.model)
    if wanted != (record.task_digest, record.trial, record.seed, record.sampled_by, record.model):
        raise SessionError(f"episode {job.episode_id} is finished with another task, seed or model; use a new id")
