"""What each record was judged by, kept for audit beside the capture: final state, dispatcher's log, harness trace."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from occamy.contracts.record import canonical_json
from occamy.contracts.release import contract_bytes
from occamy.contracts.task import TaskContract
from occamy.worlds.world import WORLD_VERSION, Event

_SCHEMA = """
CREATE TABLE IF NOT EXISTS evidence (episode_id TEXT PRIMARY KEY, data BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS contracts (digest TEXT PRIMARY KEY, data BLOB NOT NULL) STRICT;
"""


@dataclass(frozen=True)
class Evidence:
    """Evidence of one attempt."""

    state: dict[str, Any]
    """Canonical final state after freeze, {} when the sandbox itself failed."""
    events: Sequence[Event]
    """The dispatcher's log."""
    trace: list[dict[str, Any]]
    """The harness's own events."""
    answer: str
    """Final text of the agent."""
    goals_met: tuple[bool, ...]
    """One per goal, in the contract's order; empty when unscored."""
    forbidden: tuple[str, ...]
    """State changes that no goal asks for."""
    world_version: int = WORLD_VERSION
    """`WORLD_VERSION` of the code that the world ran on; 0 in evidence from before it was kept."""
    logged_files: bool = True
    """Whether the log tells of all writes to the workspace. An agent with a shell writes past the dispatcher."""


class EvidenceStore:
    """One SQLite row per attempt and per contract; a repeated attempt replaces its row. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        self._contracts: dict[str, TaskContract] = {}

    def put(self, episode_id: str, evidence: Evidence) -> None:
        """Commit the evidence of an attempt."""
        self._db.execute(
            "INSERT OR REPLACE INTO evidence VALUES (?, ?)", (episode_id, canonical_json(asdict(evidence)))
        )

    def put_contract(self, digest: str, contract: TaskContract) -> None:
        """Keep the contract that attempts were made at; `digest` is its own."""
        if digest not in self._contracts:
            self._db.execute("INSERT OR IGNORE INTO contracts VALUES (?, ?)", (digest, contract_bytes(contract)))
            self._contracts[digest] = contract

    def get(self, episode_id: str) -> Evidence:
        """Read the evidence of an attempt. Raises KeyError naming an unknown episode."""
        row = self._db.execute("SELECT data FROM evidence WHERE episode_id = ?", (episode_id,)).fetchone()
        if row is None:
            raise KeyError(f"no evidence of episode {episode_id}; it has not finished in this folder")
        data = {"world_version": 0, **json.loads(row[0])}
        data["events"] = tuple(Event(**event) for event in data["events"])
        return Evidence(**{**data, "goals_met": tuple(data["goals_met"]), "forbidden": tuple(data["forbidden"])})

    def contract(self, digest: str) -> TaskContract | None:
        """The contract of this digest; None when it was not kept (folders of older versions)."""
        if digest not in self._contracts:
            row = self._db.execute("SELECT data FROM contracts WHERE digest = ?", (digest,)).fetchone()
            if row is None:
                return None
            self._contracts[digest] = TaskContract.model_validate_json(row[0])
        return self._contracts[digest]

    def close(self) -> None:
        """Close the database."""
        self._db.close()
