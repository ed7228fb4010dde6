"""Durable capture: SQLite in WAL mode, one transaction per turn, token columns as little-endian int32/float32 blobs."""

from __future__ import annotations

import sqlite3
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from occamy.capture.segments import CapturedEpisode, capture_episode
from occamy.capture.turn import Exchange, Prefix, Turn
from occamy.contracts.episode import QuarantineReason

_SCHEMA = """
CREATE TABLE IF NOT EXISTS episodes (
    episode_id TEXT PRIMARY KEY, sampled_by TEXT NOT NULL, closed INTEGER NOT NULL DEFAULT 0,
    quarantine TEXT, record TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS turns (
    episode_id TEXT NOT NULL, run TEXT NOT NULL, segment INTEGER NOT NULL, ordinal INTEGER NOT NULL,
    attempt INTEGER NOT NULL, continues INTEGER NOT NULL, prefix TEXT NOT NULL, opened_by TEXT NOT NULL,
    delta BLOB NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output BLOB NOT NULL,
    logprobs BLOB NOT NULL, version INTEGER NOT NULL, finish TEXT NOT NULL, request_digest TEXT NOT NULL,
    history_digest TEXT NOT NULL, sampling TEXT NOT NULL, engine_cached_tokens INTEGER NOT NULL, seconds REAL NOT NULL,
    PRIMARY KEY (episode_id, ordinal, attempt)
) STRICT;
"""
_TURN_COLUMNS = (
    "run, segment, ordinal, attempt, continues, prefix, opened_by, delta, prompt_tokens, cached_tokens, output, "
    "logprobs, version, finish"
)
_INSERT = f"INSERT INTO turns VALUES ({', '.join('?' * 20)})"


class Store:
    """The capture of one rollout folder. Safe to share between threads; commits survive a killed process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)

    def open_episode(self, episode_id: str, sampled_by: str) -> None:
        """Start an episode; an unfinished capture of the same id is discarded.

        Raises ValueError when the episode is finished: its record is in `finished()`.
        """
        with self._lock, self._transaction():
            row = self._db.execute("SELECT record FROM episodes WHERE episode_id = ?", (episode_id,)).fetchone()
            if row is not None and row[0] is not None:
                raise ValueError(f"episode {episode_id} is finished; take it from the store or choose another id")
            if row is not None:
                self._delete(episode_id)
            self._db.execute("INSERT INTO episodes (episode_id, sampled_by) VALUES (?, ?)", (episode_id, sampled_by))

    def add_turn(self, episode_id: str, turn: Turn, exchange: Exchange) -> None:
        """Commit one attempt."""
        row = (
            episode_id, turn.run, turn.segment, turn.ordinal, turn.attempt, turn.continues, turn.prefix.value,
            turn.opened_by, _blob("i", turn.delta), turn.prompt_tokens, turn.cached_tokens, _blob("i", turn.output),
            _blob("f", turn.logprobs), turn.version, turn.finish, exchange.request_digest, exchange.history_digest,
            exchange.sampling, exchange.engine_cached_tokens, exchange.seconds,
        )  # fmt: skip
        with self._lock:
            self._db.execute(_INSERT, row)

    def close_episode(self, episode_id: str, quarantine: QuarantineReason | None) -> None:
        """Mark an episode as completely captured."""
        with self._lock:
            self._db.execute(
                "UPDATE episodes SET closed = 1, quarantine = ? WHERE episode_id = ?", (quarantine, episode_id)
            )

    def finish_episode(self, episode_id: str, record_json: str) -> None:
        """Keep the graded record of a closed episode: from now on it is never run again.

        Raises ValueError when the episode is unknown or still open.
        """
        with self._lock:
            changed = self._db.execute(
                "UPDATE episodes SET record = ? WHERE episode_id = ? AND closed = 1", (record_json, episode_id)
            ).rowcount
        if changed != 1:
            raise ValueError(f"episode {episode_id} is not closed in this store; close it before finishing it")

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
                "SELECT sampled_by, quarantine FROM episodes WHERE episode_id = ? AND closed = 1", (episode_id,)
            ).fetchone()
        if row is None:
            raise KeyError(f"no closed episode {episode_id} in this store")
        quarantine = None if row[1] is None else QuarantineReason(row[1])
        return capture_episode(episode_id, row[0], self.turns(episode_id), quarantine)

    def close(self) -> None:
        """Close the database; commits are already durable."""
        with self._lock:
            self._db.close()

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


def _blob(code: Literal["i", "f"], values: list[int] | list[float]) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def _turn(run: str, segment: int, ordinal: int, attempt: int, continues: int, prefix: str, *rest: Any) -> Turn:
    opened_by, delta, prompt_tokens, cached_tokens, output, logprobs, version, finish = rest
    return Turn(
        run=run,
        segment=segment,
        ordinal=ordinal,
        attempt=attempt,
        continues=continues,
        prefix=Prefix(prefix),
        opened_by=opened_by,
        delta=_ints(delta),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output=_ints(output),
        logprobs=np.frombuffer(logprobs, "<f4").tolist(),
        version=version,
        finish=finish,
    )


def _ints(blob: bytes) -> list[int]:
    values: list[int] = np.frombuffer(blob, "<i4").tolist()
    return values
