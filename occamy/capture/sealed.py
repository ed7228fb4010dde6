"""Sealed episode folders: episodes.parquet and segments.parquet under one manifest, verified before they are read."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from occamy.contracts import manifest as seals
from occamy.contracts.episode import EpisodeRecord, Segment
from occamy.contracts.manifest import Counts, Manifest, SealError

EPISODES = "episodes.parquet"
SEGMENTS = "segments.parquet"

_ARRAYS: dict[str, tuple[pa.DataType, type[np.generic]]] = {
    "tokens": (pa.int32(), np.int32),
    "mask": (pa.bool_(), np.bool_),
    "logprobs": (pa.float32(), np.float32),
    "versions": (pa.int32(), np.int32),
    "origin": (pa.int8(), np.int8),
}
_LABELS = {
    "episode_id": pa.string(),
    "run": pa.string(),
    "index": pa.int32(),
    "closed_by": pa.string(),
    "sampled_by": pa.string(),
}
_SCALARS = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


@dataclass(frozen=True)
class Sealed:
    """A verified folder's content."""

    records: list[EpisodeRecord]
    segments: list[Segment]
    manifest: Manifest


def write_sealed(
    folder: Path,
    records: list[EpisodeRecord],
    segments: list[Segment],
    *,
    kind: str,
    parents: dict[str, str],
    facts: dict[str, Any],
) -> Manifest:
    """Write both tables, sorted by episode, run and index, and seal the folder with everything else in it.

    Same content, same digests. Raises ValueError when a segment belongs to no record or an episode id repeats.
    """
    ids = {r.episode_id for r in records}
    if len(ids) != len(records):
        raise ValueError(f"{folder}: {len(records)} records carry only {len(ids)} episode ids; ids must be unique")
    if stray := {s.episode_id for s in segments} - ids:
        raise ValueError(f"{folder}: segments of {min(stray)} have no episode record; pass the record too")
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(records, key=lambda r: r.episode_id)
    pq.write_table(_episode_table(ordered), folder / EPISODES)
    chain = sorted(segments, key=lambda s: (s.episode_id, s.run, s.index))
    pq.write_table(_segment_table(chain), folder / SEGMENTS)
    bad = sum(r.quarantine is not None for r in records)
    name = "demonstrations" if kind == "demonstrations" else "trajectories"
    counts = {name: Counts(raw=len(records), validated=len(records) - bad, quarantined=bad)}
    return seals.seal(folder, kind, counts=counts, parents=parents, facts=facts)


def read_sealed(folder: Path, kind: str | None = None) -> Sealed:
    """Verify and read a sealed folder; without `kind`, any kind.

    Raises SealError naming the file when the folder is not what its manifest says.
    """
    manifest = seals.verify(folder, _kind_of(folder) if kind is None else kind)
    for name in (EPISODES, SEGMENTS):
        if name not in manifest.files:
            raise SealError(f"{folder}: sealed without {name}; this is a folder of {manifest.kind}, not of episodes")
    rows = pq.read_table(folder / EPISODES).to_pylist()
    return Sealed([EpisodeRecord.model_validate(r) for r in rows], _read_segments(folder / SEGMENTS), manifest)


def _kind_of(folder: Path) -> str:
    path = folder / seals.NAME
    try:
        return Manifest.model_validate_json(path.read_bytes()).kind
    except FileNotFoundError as e:
        raise SealError(f"{folder}: no {seals.NAME}; the stage that makes it did not finish, run it again") from e
    except ValidationError as e:
        raise SealError(f"{path}: not a manifest of this version; make the folder again") from e


def _episode_table(records: Sequence[EpisodeRecord]) -> pa.Table:
    schema = pa.schema([pa.field(n, _arrow_type(f.annotation)) for n, f in EpisodeRecord.model_fields.items()])
    return pa.Table.from_pylist([r.model_dump(mode="json") for r in records], schema=schema)


def _arrow_type(annotation: Any) -> pa.DataType:
    """Column type of a scalar field: enums and literals are text, optional fields are nullable anyway."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is typing.Literal or (
        isinstance(annotation, type) and issubclass(annotation, Enum)
    ):
        return pa.string()
    return _SCALARS[annotation]


def _segment_table(segments: Sequence[Segment]) -> pa.Table:
    offsets = pa.array(np.cumsum([0, *(len(s.tokens) for s in segments)]), pa.int32())
    columns = {name: pa.array([getattr(s, name) for s in segments], kind) for name, kind in _LABELS.items()}
    for name, (kind, dtype) in _ARRAYS.items():
        parts = [np.asarray(getattr(s, name), dtype) for s in segments]
        if [len(p) for p in parts] != [len(s.tokens) for s in segments]:
            raise ValueError(f"a segment's {name} and tokens differ in length")
        values = pa.array(np.concatenate([*parts, np.empty(0, dtype)]), kind)
        columns[name] = pa.ListArray.from_arrays(offsets, values)
    return pa.table(columns)


def _read_segments(path: Path) -> list[Segment]:
    table = pq.read_table(path).combine_chunks()
    labels = [table[name].to_pylist() for name in _LABELS]
    arrays = [list(_rows(table[name], dtype)) for name, (_, dtype) in _ARRAYS.items()]
    return [Segment(*row) for row in zip(*labels, *arrays, strict=True)]


def _rows(column: pa.ChunkedArray, dtype: type[np.generic]) -> Iterable[np.ndarray]:
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        values = chunk.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
        for start, end in pairwise(offsets):
            yield values[start:end].copy()
