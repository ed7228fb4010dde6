"""The turns behind sealed segments, kept beside them: who sampled what after which prompt, all attempts included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from occamy.capture.history import split_prints
from occamy.capture.lines import settle
from occamy.capture.messages import PRINT, result_place
from occamy.capture.runs import ROOT
from occamy.capture.turn import Turn
from occamy.contracts.manifest import SealError

TURNS = "turns.parquet"

_LABELS = {
    "run": pa.string(),
    "segment": pa.int32(),
    "ordinal": pa.int32(),
    "attempt": pa.int32(),
    "prefix": pa.string(),
    "opened_by": pa.string(),
    "parent_ordinal": pa.int32(),
    "parent_attempt": pa.int32(),
    "prompt_tokens": pa.int32(),
    "cached_tokens": pa.int32(),
    "temperature": pa.float64(),
    "top_p": pa.float64(),
    "finish": pa.string(),
    "calls": pa.string(),
    "trains": pa.bool_(),
}
_ARRAYS: dict[str, tuple[pa.DataType, type[np.generic]]] = {
    "delta": (pa.int32(), np.int32),
    "output": (pa.int32(), np.int32),
    "logprobs": (pa.float32(), np.float32),
    "versions": (pa.int32(), np.int32),
}


@dataclass(frozen=True, slots=True)
class LedgerTurn:
    """One attempt at one turn, as the proxy recorded it. Arrays have shape [n]; see `Turn` for their meaning."""

    run: str
    segment: int
    """Place of its segment in the run; a later one has a greater number."""
    ordinal: int
    """Position of the turn in the episode, from 0."""
    attempt: int
    prefix: str
    opened_by: str
    """In a segment's first turn, what opened it; else empty."""
    parent_ordinal: int
    """Turn of another run that this one goes on from, from its ids unless `opened_by` is "tool_change"; -1 if none."""
    parent_attempt: int
    prompt_tokens: int
    """Length of P_t."""
    cached_tokens: int
    temperature: float
    """What the log-probs' distribution was scaled by; at 0 they are those of temperature 1."""
    top_p: float
    finish: str
    calls: str
    """JSON list of the tool calls that were handed out: [name, arguments, whether a later request held the result]."""
    trains: bool
    """Whether its sampled tokens are training targets, if this attempt is the one that was used."""
    delta: np.ndarray
    """int32 ids that are new in the prompt."""
    output: np.ndarray
    """int32 sampled ids."""
    logprobs: np.ndarray
    """float32, one per sampled id."""
    versions: np.ndarray
    """int32 weight version per sampled id, -1 for a teacher."""


def ledger(turns: Sequence[Turn]) -> list[LedgerTurn]:
    """The recorded attempts of an episode, in order of turn and attempt, each in the run that its segment is of."""
    places = {print_[: PRINT // 2] for t in turns for print_ in split_prints(t.heard)}
    return [
        LedgerTurn(
            run=t.run,
            segment=t.segment,
            ordinal=t.ordinal,
            attempt=t.attempt,
            prefix=t.prefix.value,
            opened_by=t.opened_by,
            parent_ordinal=-1 if t.parent is None else t.parent[0],
            parent_attempt=-1 if t.parent is None else t.parent[1],
            prompt_tokens=t.prompt_tokens,
            cached_tokens=t.cached_tokens,
            temperature=t.temperature,
            top_p=t.top_p,
            finish=t.finish,
            calls=_calls(t, places),
            trains=t.run == ROOT or t.summary,
            delta=np.asarray(t.delta, np.int32),
            output=np.asarray(t.output, np.int32),
            logprobs=np.asarray(t.logprobs, np.float32),
            versions=np.asarray(t.versions, np.int32),
        )
        for t in settle(turns)
    ]


def _calls(turn: Turn, heard: Set[bytes]) -> str:
    """`heard` are the places of the messages of all requests."""
    if not turn.said:
        return "[]"
    calls = orjson.loads(turn.said).get("tool_calls", ())
    told = [[c["function"]["name"], c["function"]["arguments"], result_place(c["id"]) in heard] for c in calls]
    return orjson.dumps(told).decode()


def write_ledgers(path: Path, ledgers: Sequence[tuple[str, Sequence[LedgerTurn]]]) -> None:
    """Write the turns of episodes, given as (episode id, turns), as one Parquet table, a row for each attempt."""
    turns = [t for _, own in ledgers for t in own]
    columns = {"episode_id": pa.array([name for name, own in ledgers for _ in own], pa.string())}
    for name, kind in _LABELS.items():
        columns[name] = pa.array([getattr(t, name) for t in turns], kind)
    for name, (kind, dtype) in _ARRAYS.items():
        parts = [getattr(t, name) for t in turns]
        offsets = pa.array(np.cumsum([0, *(len(p) for p in parts)]), pa.int32())
        values = pa.array(np.concatenate([*parts, np.empty(0, dtype)]), kind)
        columns[name] = pa.ListArray.from_arrays(offsets, values)
    pq.write_table(pa.table(columns), path, compression="zstd")


def read_ledgers(path: Path) -> dict[str, list[LedgerTurn]]:
    """Episode id -> its turns, in order of turn and attempt. Raises SealError for a table of an earlier version."""
    table = pq.read_table(path).combine_chunks()
    if missing := next((name for name in (*_LABELS, *_ARRAYS) if name not in table.column_names), ""):
        raise SealError(f"{path}: has no {missing}; it is of an earlier version, make the folder again")
    names = table["episode_id"].to_pylist()
    labels = [table[name].to_pylist() for name in _LABELS]
    arrays = [list(_rows(table[name], dtype)) for name, (_, dtype) in _ARRAYS.items()]
    found: dict[str, list[LedgerTurn]] = {}
    for name, *row in zip(names, *labels, *arrays, strict=True):
        found.setdefault(name, []).append(LedgerTurn(*row))
    return found


def _rows(column: pa.ChunkedArray, dtype: type[np.generic]) -> Iterator[np.ndarray]:
    for chunk in column.chunks:
        values = chunk.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
        for start, end in pairwise(chunk.offsets.to_numpy()):
            yield values[start:end]
