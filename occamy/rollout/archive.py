"""Everything recorded about episodes, beside their segments: written into sealed folders and read back, or read from
the folder of a live session."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from occamy.capture.ledger import TURNS, LedgerTurn, ledger, read_ledgers, write_ledgers
from occamy.capture.sealed import read_sealed
from occamy.capture.segments import build_segments
from occamy.capture.store import Store
from occamy.contracts.episode import EpisodeRecord, Segment
from occamy.contracts.manifest import NAME as MANIFEST
from occamy.contracts.manifest import SealError
from occamy.contracts.record import canonical_json
from occamy.contracts.release import contract_bytes
from occamy.contracts.task import TaskContract
from occamy.rollout.evidence import Evidence, EvidenceStore
from occamy.worlds.world import Event

EVIDENCE = "evidence.parquet"
CONTRACTS = "contracts.parquet"
CAPTURE_DB = "capture.sqlite"
EVIDENCE_DB = "evidence.db"

_CALL = pa.struct(
    [
        ("ordinal", pa.int32()),
        ("clock", pa.string()),
        ("name", pa.string()),
        ("arguments", pa.string()),
        ("response", pa.string()),
        ("ok", pa.bool_()),
        ("error", pa.string()),
        ("fingerprint", pa.string()),
    ]
)
_EVIDENCE = pa.schema(
    [
        ("episode_id", pa.string()),
        ("world_version", pa.int32()),
        ("logged_files", pa.bool_()),
        ("answer", pa.string()),
        ("goals_met", pa.list_(pa.bool_())),
        ("forbidden", pa.list_(pa.string())),
        ("calls", pa.list_(_CALL)),
        ("state", pa.string()),
        ("trace", pa.string()),
    ]
)


@dataclass(frozen=True)
class Recorded:
    """One episode with what can be known of it."""

    record: EpisodeRecord
    segments: list[Segment]
    turns: list[LedgerTurn] | None = None
    """None in folders that were sealed before turns were kept."""
    evidence: Evidence | None = None
    """None in folders that were sealed before evidence was kept."""
    contract: TaskContract | None = None
    """The task, if the folder has it."""


class Archive:
    """The finished episodes of one folder, in order of id; each is put together when it is asked for."""

    def __init__(self, folder: Path, records: Iterable[EpisodeRecord], tokenizer: str | None) -> None:
        self.folder = folder
        self.records = {r.episode_id: r for r in sorted(records, key=lambda r: r.episode_id)}
        self.tokenizer = tokenizer
        """Digest of the tokenizer of the ids; None when the folder does not say."""

    def episode(self, episode_id: str) -> Recorded:
        """Raises ValueError naming an unknown episode."""
        record = self.records.get(episode_id)
        if record is None:
            known = f", the first is {next(iter(self.records))}" if self.records else ""
            raise ValueError(f"{self.folder}: no finished episode {episode_id!r} among {len(self.records)}{known}")
        return self._recorded(record)

    def __iter__(self) -> Iterator[Recorded]:
        return (self._recorded(record) for record in self.records.values())

    def _recorded(self, record: EpisodeRecord) -> Recorded:
        raise TypeError("use open_archive")

    def close(self) -> None:
        """Free what is open."""


class _SealedArchive(Archive):
    def __init__(self, folder: Path) -> None:
        sealed = read_sealed(folder)
        super().__init__(folder, sealed.records, sealed.manifest.facts.get("tokenizer"))
        self.manifest = sealed.manifest
        self._segments: dict[str, list[Segment]] = {}
        for segment in sealed.segments:
            self._segments.setdefault(segment.episode_id, []).append(segment)

    def _recorded(self, record: EpisodeRecord) -> Recorded:
        name = record.episode_id
        turns = self._turns.get(name, []) if self._turns is not None else None
        row = self._evidence.get(name)
        evidence = None if row is None else _evidence(row.as_py())
        return Recorded(record, self._segments.get(name, []), turns, evidence, self._contract(record.task_digest))

    @cached_property
    def _turns(self) -> dict[str, list[LedgerTurn]] | None:
        return read_ledgers(self.folder / TURNS) if TURNS in self.manifest.files else None

    @cached_property
    def _evidence(self) -> dict[str, Any]:
        if EVIDENCE not in self.manifest.files:
            return {}
        table = pq.read_table(self.folder / EVIDENCE)
        return dict(zip(table["episode_id"].to_pylist(), table.to_struct_array().combine_chunks(), strict=True))

    @cached_property
    def _contracts(self) -> dict[str, str]:
        if CONTRACTS not in self.manifest.files:
            return {}
        table = pq.read_table(self.folder / CONTRACTS)
        return dict(zip(table["digest"].to_pylist(), table["contract"].to_pylist(), strict=True))

    def _contract(self, digest: str) -> TaskContract | None:
        text = self._contracts.get(digest)
        return None if text is None else TaskContract.model_validate_json(text)


class _SessionArchive(Archive):
    def __init__(self, folder: Path) -> None:
        self._store = Store(folder / CAPTURE_DB)
        self._evidence = EvidenceStore(folder / EVIDENCE_DB)
        session = folder / "session.json"
        tokenizer = json.loads(session.read_bytes()).get("tokenizer") if session.is_file() else None
        records = [EpisodeRecord.model_validate_json(r) for r in self._store.finished().values()]
        super().__init__(folder, records, tokenizer)

    def _recorded(self, record: EpisodeRecord) -> Recorded:
        return recorded(record, self._store, self._evidence)

    def close(self) -> None:
        self._store.close()
        self._evidence.close()


def open_archive(folder: Path) -> Archive:
    """Open a sealed folder of episodes or the folder of a session. Raises SealError when it is neither or altered."""
    if (folder / MANIFEST).is_file():
        return _SealedArchive(folder)
    if (folder / CAPTURE_DB).is_file() and (folder / EVIDENCE_DB).is_file():
        return _SessionArchive(folder)
    raise SealError(f"{folder}: neither a sealed folder ({MANIFEST}) nor one of a rollout session ({CAPTURE_DB})")


def recorded(record: EpisodeRecord, store: Store, evidence: EvidenceStore) -> Recorded:
    """Put a finished episode of a session together. Raises KeyError when there is no evidence of it."""
    turns = store.turns(record.episode_id)
    return Recorded(
        record,
        build_segments(record.episode_id, record.sampled_by, turns),
        ledger(turns),
        evidence.get(record.episode_id),
        evidence.contract(record.task_digest),
    )


def write_archive(folder: Path, episodes: Sequence[Recorded]) -> None:
    """Write turns, evidence and contracts of episodes into `folder`, to be sealed with their segments.

    Raises ValueError when an episode has no turns or no evidence.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(episodes, key=lambda e: e.record.episode_id)
    ledgers, rows, contracts = [], [], {}
    for episode in ordered:
        name = episode.record.episode_id
        if episode.turns is None or episode.evidence is None:
            raise ValueError(f"{folder}: episode {name} has no turns or no evidence; they are kept by its session")
        ledgers.append((name, episode.turns))
        rows.append(_row(name, episode.evidence))
        if episode.contract is not None:
            contracts[episode.record.task_digest] = contract_bytes(episode.contract).decode()
    write_ledgers(folder / TURNS, ledgers)
    pq.write_table(pa.Table.from_pylist(rows, schema=_EVIDENCE), folder / EVIDENCE, compression="zstd")
    texts = dict(sorted(contracts.items()))
    table = pa.table({"digest": pa.array(texts.keys(), pa.string()), "contract": pa.array(texts.values(), pa.string())})
    pq.write_table(table, folder / CONTRACTS, compression="zstd")


def _row(episode_id: str, evidence: Evidence) -> dict[str, Any]:
    """Arguments, state and trace as canonical JSON: their keys differ from call to call. A raw string, of arguments
    that were no JSON object, is a JSON string."""
    return {
        "episode_id": episode_id,
        "world_version": evidence.world_version,
        "logged_files": evidence.logged_files,
        "answer": evidence.answer,
        "goals_met": evidence.goals_met,
        "forbidden": evidence.forbidden,
        "calls": [{**vars(e), "arguments": canonical_json(e.arguments).decode()} for e in evidence.events],
        "state": canonical_json(evidence.state).decode(),
        "trace": canonical_json(evidence.trace).decode(),
    }


def _evidence(row: Mapping[str, Any]) -> Evidence:
    calls = [{**call, "arguments": json.loads(call["arguments"])} for call in row["calls"]]
    return Evidence(
        state=json.loads(row["state"]),
        events=tuple(Event(**call) for call in calls),
        trace=json.loads(row["trace"]),
        answer=row["answer"],
        goals_met=tuple(row["goals_met"]),
        forbidden=tuple(row["forbidden"]),
        world_version=row["world_version"],
        logged_files=row["logged_files"],
    )
