"""Durable capture: SQLite in WAL mode, one transaction per turn, token columns as little-endian int32/float32 blobs."""

from __future__ import annotations

import sqlite3
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from occamy.capture.segments import CapturedEpisode, capture_episode
from occamy.capture.turn import Exchange, Prefix, Turn
from occamy.contracts.capture import EpisodeSetup
from occamy.contracts.episode import QuarantineReason

_SCHEMA = """
CREATE TABLE IF NOT EXISTS episodes (
    episode_id TEXT PRIMARY KEY, setup TEXT NOT NULL, closed INTEGER NOT NULL DEFAULT 0, quarantine TEXT, record TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS turns (
    episode_id TEXT NOT NULL, run TEXT NOT NULL, role TEXT NOT NULL, summary INTEGER NOT NULL,
    segment INTEGER NOT NULL, ordinal INTEGER NOT NULL, repeats INTEGER NOT NULL, continues INTEGER NOT NULL,
    parent_ordinal INTEGER, parent_attempt INTEGER, opened_by TEXT NOT NULL, delta BLOB NOT NULL,
    prompt_tokens INTEGER NOT NULL, tools BLOB NOT NULL, heard BLOB NOT NULL, attempt INTEGER NOT NULL,
    overlaps INTEGER NOT NULL, prefix TEXT NOT NULL, cached_tokens INTEGER NOT NULL, temperature REAL NOT NULL,
    top_p REAL NOT NULL, output BLOB NOT NULL, logprobs BLOB NOT NULL,
    versions BLOB NOT NULL, finish TEXT NOT NULL, said BLOB NOT NULL,
    request_digest TEXT NOT NULL, history_digest TEXT NOT NULL, sampling TEXT NOT NULL,
    engine_cached_tokens INTEGER NOT NULL, seconds REAL NOT NULL,
    PRIMARY KEY (episode_id, ordinal, attempt)
) STRICT;
"""
_TURN_COLUMNS = (
    "run, role, summary, segment, ordinal, repeats, continues, parent_ordinal, parent_attempt, opened_by, delta, "
    "prompt_tokens, tools, heard, attempt, overlaps, prefix, cached_tokens, temperature, top_p, output, logprobs, "
    "versions, finish, said"
)
_INSERT = f"INSERT INTO turns VALUES ({', '.join('?' * 31)})"
_BUSY_SECONDS = 30.0
"""How long a commit waits for another process that writes to the same file (our choice)."""


@dataclass(frozen=True)
class OpenEpisode:
    """What the store holds of an episode that is not closed."""

    setup: EpisodeSetup
    turns: list[Turn]
    """In order of completion."""
    quarantine: QuarantineReason | None


class Busy(RuntimeError):
    """Another thread or process is writing."""


class Store:
    """The capture of one rollout folder. Safe to share between threads; commits survive a killed process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)

    @contextmanager
    def unless_busy(self) -> Iterator[None]:
        """Within it a write raises Busy, having changed nothing, where it would have to wait."""
        if not self._lock.acquire(blocking=False):
            raise Busy
        try:
            self._db.execute("PRAGMA busy_timeout=0")
            yield
        except sqlite3.OperationalError as e:
            if e.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                raise Busy from e
            raise
        finally:
            self._db.execute(f"PRAGMA busy_timeout={int(1000 * _BUSY_SECONDS)}")
            self._lock.release()

    def open_episode(self, episode_id: str, setup: EpisodeSetup) -> None:
        """Start an episode; an unfinished capture of the same id is discarded.

        Raises ValueError when the episode is finished: its record is in `finished()`.
        """
        with self._lock, self._transaction():
            row = self._db.execute("SELECT record FROM episodes WHERE episode_id = ?", (episode_id,)).fetchone()
            if row is not None and row[0] is not None:
                raise ValueError(f"episode {episode_id} is finished; take it from the store or choose another id")
            if row is not None:
                self._delete(episode_id)
            values = (episode_id, setup.model_dump_json())
            self._db.execute("INSERT INTO episodes (episode_id, setup) VALUES (?, ?)", values)

    def open_episodes(self) -> dict[str, EpisodeSetup]:
        """Return episode id -> setup of the episodes that are not closed, in order of opening."""
        with self._lock:
            rows = self._db.execute("SELECT episode_id, setup FROM episodes WHERE closed = 0 ORDER BY rowid").fetchall()
        return {name: EpisodeSetup.model_validate_json(setup) for name, setup in rows}

    def read_open(self, episode_id: str) -> OpenEpisode:
        """Return what is needed to go on with an episode. Raises KeyError when the store holds no open one."""
        with self._lock:
            row = self._db.execute(
                "SELECT setup, quarantine FROM episodes WHERE episode_id = ? AND closed = 0", (episode_id,)
            ).fetchone()
        if row is None:
            raise KeyError(f"no open episode {episode_id} in this store")
        return OpenEpisode(EpisodeSetup.model_validate_json(row[0]), self.turns(episode_id), _reason(row[1]))

    def add_turn(
        self, episode_id: str, turn: Turn, exchange: Exchange, quarantine: QuarantineReason | None = None
    ) -> None:
        """Commit one attempt, and with it why the episode is quarantined, if it is.

        Raises KeyError when the episode is not open: a closed one is never changed.
        """
        parent = turn.parent or (None, None)
        row = (
            episode_id, turn.run, turn.role, turn.summary, turn.segment, turn.ordinal, turn.repeats, turn.continues,
            *parent, turn.opened_by, _blob(turn.delta), turn.prompt_tokens, turn.tools, turn.heard, turn.attempt,
            turn.overlaps, turn.prefix.value, turn.cached_tokens, turn.temperature, turn.top_p, _blob(turn.output),
            _blob(turn.logprobs), _blob(turn.versions), turn.finish, turn.said, exchange.request_digest,
            exchange.history_digest, exchange.sampling, exchange.engine_cached_tokens, exchange.seconds,
        )  # fmt: skip
        with self._lock, self._transaction():
            self._check_open(episode_id)
            self._db.execute(_INSERT, row)
            if quarantine is not None:
                self._quarantine(episode_id, quarantine)

    def set_quarantine(self, episode_id: str, reason: QuarantineReason) -> None:
        """Commit why an episode is quarantined, when no turn carries it; the first reason stays."""
        with self._lock:
            self._quarantine(episode_id, reason)

    def close_episode(self, episode_id: str, quarantine: QuarantineReason | None) -> None:
        """Mark an episode as completely captured."""
        with self._lock, self._transaction():
            if quarantine is not None:
                self._quarantine(episode_id, quarantine)
            self._db.execute("UPDATE episodes SET closed = 1 WHERE episode_id = ?", (episode_id,))

    def finish_episode(self, episode_id: str, record_json: str) -> None:
        """Keep the graded record of a closed episode: from now on it is never run again.

        Raises ValueError when the episode is unknown, still open, or finished with another record.
        """
        with self._lock:
            changed = self._db.execute(
                "UPDATE episodes SET record = ? WHERE episode_id = ? AND closed = 1 AND coalesce(record, ?) = ?",
                (record_json, episode_id, record_json, record_json),
            ).rowcount
        if changed != 1:
            raise ValueError(
                f"episode {episode_id} is not closed in this store, or finished with another record; close it before "
                "finishing it, and finish it once"
            )

    def finished(self) -> dict[str, str]:
        """Return episode id -> record JSON of all finished episodes, in order of opening."""
        with self._lock:
            rows = self._db.execute("SELECT episode_id, record FROM episodes WHERE record IS NOT NULL ORDER BY rowid")
            return dict(rows.fetchall())

    def discard(self, episode_id: str) -> None:
        """Forget an episode, finished or not."""
        with self._lock, self._transaction():
            self._delete(episode_id)

    def turns(self, episode_id: str) -> list[Turn]:
        """Return the committed attempts of an episode in order of completion."""
        with self._lock:
            rows = self._db.execute(
                f"SELECT {_TURN_COLUMNS} FROM turns WHERE episode_id = ? ORDER BY rowid", (episode_id,)
            ).fetchall()
        return [_turn(*row) for row in rows]

    def captured(self, episode_id: str) -> CapturedEpisode:
        """Rebuild a closed episode. Raises KeyError when the store holds no closed episode of this id."""
        with self._lock:
            row = self._db.execute(
                "SELECT setup, quarantine FROM episodes WHERE episode_id = ? AND closed = 1", (episode_id,)
            ).fetchone()
        if row is None:
            raise KeyError(f"no closed episode {episode_id} in this store")
        setup = EpisodeSetup.model_validate_json(row[0])
        return capture_episode(episode_id, setup.sampled_by, self.turns(episode_id), _reason(row[1]))

    def close(self) -> None:
        """Close the database; commits are already durable."""
        with self._lock:
            self._db.close()

    def _check_open(self, episode_id: str) -> None:
        row = self._db.execute("SELECT 1 FROM episodes WHERE episode_id = ? AND closed = 0", (episode_id,)).fetchone()
        if row is None:
            raise KeyError(f"no open episode {episode_id} in this store")

    def _quarantine(self, episode_id: str, reason: QuarantineReason) -> None:
        self._db.execute(
            "UPDATE episodes SET quarantine = coalesce(quarantine, ?) WHERE episode_id = ?", (reason, episode_id)
        )

    def _delete(self, episode_id: str) -> None:
        self._db.execute("DELETE FROM turns WHERE episode_id = ?", (episode_id,))
        self._db.execute("DELETE FROM episodes WHERE episode_id = ?", (episode_id,))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _reason(text: str | None) -> QuarantineReason | None:
    return None if text is None else QuarantineReason(text)


def _blob(values: array[int] | array[float]) -> bytes:
    return np.frombuffer(values, values.typecode).astype(f"<{values.typecode}4").tobytes()


def _array(code: Literal["i", "f"], blob: bytes) -> array[Any]:
    return array(code, np.frombuffer(blob, f"<{code}4").astype(code).tobytes())


def _turn(
    run: str, role: str, summary: int, segment: int, ordinal: int, repeats: int, continues: int, *rest: Any
) -> Turn:
    (
        parent_ordinal, parent_attempt, opened_by, delta, prompt_tokens, tools, heard, attempt, overlaps, prefix,
        cached_tokens, temperature, top_p, output, logprobs, versions, finish, said,
    ) = rest  # fmt: skip
    return Turn(
        run=run,
        role=role,
        summary=bool(summary),
        segment=segment,
        ordinal=ordinal,
        repeats=repeats,
        continues=continues,
        parent=None if parent_ordinal is None else (parent_ordinal, parent_attempt),
        opened_by=opened_by,
        delta=_array("i", delta),
        prompt_tokens=prompt_tokens,
        tools=tools,
        heard=heard,
        attempt=attempt,
        overlaps=bool(overlaps),
        prefix=Prefix(prefix),
        cached_tokens=cached_tokens,
        temperature=temperature,
        top_p=top_p,
        output=_array("i", output),
        logprobs=_array("f", logprobs),
        versions=_array("i", versions),
        finish=finish,
        said=said,
    )
