"""Open episodes of one proxy: who may call them, and their way to the store. All methods belong to one event loop.

State is per episode and there is no lock: recorders work on the loop, and commits happen in order of arrival, in a
thread where they would have to wait.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from occamy.capture.backends import Gate
from occamy.capture.bodies import Bodies
from occamy.capture.call import ContextLimitError
from occamy.capture.recorder import Recorder
from occamy.capture.render import Renderer
from occamy.capture.request import ApiError
from occamy.capture.segments import CapturedEpisode, capture_episode
from occamy.capture.store import Busy, Store
from occamy.capture.turn import Exchange, Turn
from occamy.contracts.capture import EpisodeSetup
from occamy.contracts.episode import QuarantineReason
from occamy.contracts.record import digest_bytes

_LOG = logging.getLogger(__name__)

SampledBy = Literal["policy", "teacher"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Watched:
    """An open episode from outside."""

    pending: float
    """Seconds that the oldest call has been waiting for its answer, 0 when none is."""
    idle: float
    """Seconds since the last call ended, or the episode began."""
    used_up: str
    """What of the budget a call was refused for, "" while none was."""
    too_long: str
    """Why the last call was refused, if the context limit was why, else ""."""


@dataclass(slots=True)
class Episode:
    """An open episode."""

    recorder: Recorder
    setup: EpisodeSetup
    gate: Gate = field(default_factory=Gate)
    """Holds the episode's calls while it is paused."""
    bodies: Bodies = field(default_factory=Bodies)
    """Of its last chat requests on record."""
    closed: bool = False
    writes: set[asyncio.Task[None]] = field(default_factory=set)
    """Commits under way."""
    asked: dict[object, float] = field(default_factory=dict)
    """When each call under way began, on the monotonic clock."""
    last_answer: float = field(default_factory=time.monotonic)
    """When the last call ended, or the episode began."""
    used_up: str = ""
    """What of the budget a call was refused for, "" while none was."""
    too_long: str = ""
    """Why the last call was refused, if the context limit was why, else ""."""

    def refuse_closed(self) -> None:
        """Raise ApiError 404 once the episode is closed."""
        if self.closed:
            raise ApiError(404, f"episode {self.recorder.episode_id} is closed", "episode_closed")

    def refuse_over_budget(self) -> None:
        """Raise ApiError 403 once the turns or the tokens of the budget are used up."""
        if (budget := self.setup.budget) is None:
            return
        if self.recorder.answered >= budget.turns:
            self.used_up = f"budget of {budget.turns} turns is used up"
        elif self.recorder.sampled >= budget.tokens:
            self.used_up = f"budget of {budget.tokens} tokens is used up"
        if self.used_up:
            raise ApiError(403, self.used_up, "budget_used_up")

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Around the start of a call: notes whether it is refused for its length."""
        self.too_long = ""
        try:
            yield
        except ContextLimitError as e:
            self.too_long = str(e)
            raise

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around a call that waits for its answer."""
        call = object()
        self.asked[call] = time.monotonic()
        try:
            yield
        finally:
            del self.asked[call]
            self.last_answer = time.monotonic()

    def watched(self) -> Watched:
        """What the episode is doing now."""
        now = time.monotonic()
        pending = now - min(list(self.asked.values()), default=now)
        return Watched(pending, now - self.last_answer, self.used_up, self.too_long)


class Episodes:
    """Opens, finds and closes episodes."""

    def __init__(self, renderer: Renderer, store: Store, samplers: Collection[SampledBy], context_limit: int) -> None:
        self._renderer, self._store, self._samplers, self._limit = renderer, store, samplers, context_limit
        self._open: dict[str, Episode] = {}
        self._keys: dict[str, str] = {}
        self._waiting = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="capture-store")

    def __len__(self) -> int:
        return len(self._open)

    def restore(self) -> None:
        """Go on with the episodes that an earlier proxy left open; what was in flight is lost. Not while serving."""
        for episode_id, setup in self._store.open_episodes().items():
            left = self._store.read_open(episode_id)
            recorder = Recorder.restore(
                episode_id,
                self._renderer,
                left.turns,
                left.quarantine,
                seed=setup.seed,
                rules=setup.rules,
                context_limit=self._limit,
                mixed_versions=setup.mixed_versions,
            )
            self._add(Episode(recorder, setup))

    async def open(self, episode_id: str, setup: EpisodeSetup) -> str:
        """Start an episode and return its key, whose digest completes the setup.

        Raises ValueError on an id that is open or finished, or a sampler that this proxy lacks.
        """
        if setup.sampled_by not in self._samplers:
            raise ValueError(
                f"episode {episode_id}: no {setup.sampled_by} behind this proxy; pass its engine URL or teacher"
            )
        if episode_id in self._open:
            raise ValueError(f"episode {episode_id} is open already; close it first")
        key = secrets.token_hex(16)
        setup = setup.model_copy(update={"key_digest": _digest(key)})
        recorder = Recorder(
            episode_id,
            self._renderer,
            seed=setup.seed,
            rules=setup.rules,
            context_limit=self._limit,
            mixed_versions=setup.mixed_versions,
        )
        episode = Episode(recorder, setup)
        self._open[episode_id] = episode  # from here on the id is taken
        try:
            await self._write(self._store.open_episode, episode_id, setup)
        except BaseException:
            del self._open[episode_id]
            raise
        self._add(episode)
        return key

    async def close(self, episode_id: str) -> CapturedEpisode:
        """End an episode; calls still in flight are dropped. Raises KeyError when it is not open."""
        episode = self.get(episode_id)
        recorder, episode.closed = episode.recorder, True
        try:
            await asyncio.gather(*episode.writes, return_exceptions=True)
            await self._write(self._store.close_episode, episode_id, recorder.quarantine)
        except BaseException:
            episode.closed = False
            raise
        del self._open[episode_id], self._keys[episode.setup.key_digest]
        return await asyncio.to_thread(
            capture_episode, episode_id, episode.setup.sampled_by, recorder.turns, recorder.quarantine
        )

    def get(self, episode_id: str) -> Episode:
        """Return an open episode. Raises KeyError."""
        episode = self._open.get(episode_id)
        if episode is None or episode.closed:
            raise KeyError(f"episode {episode_id} is not open")
        return episode

    def ids(self) -> list[str]:
        """Return the open episodes' ids in order of opening."""
        return list(self._open)

    async def turns(self, episode_id: str) -> tuple[list[Turn], QuarantineReason | None]:
        """Return what an episode, open or closed, has on record. Raises KeyError."""
        if episode_id in self._open:
            recorder = self._open[episode_id].recorder
            return recorder.turns, recorder.quarantine
        captured = await asyncio.to_thread(self._store.captured, episode_id)
        return await asyncio.to_thread(self._store.turns, episode_id), captured.quarantine

    def authorise(self, episode_id: str, key: str | None) -> Episode:
        """Return the open episode that the key opens. Raises ApiError 401 or 403."""
        owner = self._keys.get(_digest(key or ""))
        if owner is None:
            raise ApiError(401, "no open episode has this key; send it as a bearer token", "invalid_api_key")
        if owner != episode_id:
            raise ApiError(403, f"this key does not open episode {episode_id!r}", "wrong_episode")
        return self._open[episode_id]

    async def add_turn(self, episode: Episode, turn: Turn, exchange: Exchange) -> None:
        """Commit a turn. A turn that cannot be stored quarantines its episode, also if the caller is cancelled.

        Raises ApiError 500.
        """
        task = asyncio.create_task(self._commit(episode, turn, exchange))
        episode.writes.add(task)
        task.add_done_callback(episode.writes.discard)
        await asyncio.shield(task)

    def stop(self) -> None:
        """Return when all commits under way are done. Not while serving."""
        self._writer.shutdown()

    async def quarantine(self, episode: Episode, reason: QuarantineReason) -> None:
        """Quarantine an episode, also in the store if it takes it; else closing the episode stores it or fails."""
        episode.recorder.set_quarantine(reason)
        try:
            await self._write(self._store.set_quarantine, episode.recorder.episode_id, reason)
        except (sqlite3.Error, OSError) as e:
            _LOG.error("episode %s: quarantine for %s is not stored: %s", episode.recorder.episode_id, reason, e)

    async def _commit(self, episode: Episode, turn: Turn, exchange: Exchange) -> None:
        recorder = episode.recorder
        try:
            await self._write(self._store.add_turn, recorder.episode_id, turn, exchange, recorder.quarantine)
        except (sqlite3.Error, OSError) as e:
            await self.quarantine(episode, QuarantineReason.incomplete_capture)
            raise ApiError(500, f"the turn could not be stored: {e}", "capture_failed") from e

    def _add(self, episode: Episode) -> None:
        self._open[episode.recorder.episode_id] = episode
        self._keys[episode.setup.key_digest] = episode.recorder.episode_id

    async def _write(self, act: Callable[..., T], *arguments: Any) -> T:
        """Write at once when nobody else is writing, which takes tens of microseconds; else wait in line."""
        if not self._waiting:
            with suppress(Busy), self._store.unless_busy():
                return act(*arguments)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._writer, act, *arguments)
        finally:
            self._waiting -= 1


def _digest(key: str) -> str:
    return digest_bytes(key.encode())
