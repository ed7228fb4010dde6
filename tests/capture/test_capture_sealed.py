"""Sealed Parquet folders: what is written is read, what was touched is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from occamy.capture.sealed import EPISODES, SEGMENTS, read_sealed, write_sealed
from occamy.contracts.episode import EpisodeRecord, Outcome, QuarantineReason, Segment
from occamy.contracts.manifest import Counts, Manifest, SealError


def _record(name: str, **changes: Any) -> EpisodeRecord:
    values: dict[str, Any] = {
        "episode_id": name, "task_id": "t", "task_digest": "sha256:1", "pool": "long", "split": "train", "trial": 0,
        "seed": 2**62, "sampled_by": "policy", "outcome": Outcome.completed, "score": 0.5, "reward": 0.5,
        "success": False, "steps": 3, "tool_calls": 2, "failed_calls": 1, "segments": 1, "input_tokens": 90,
        "cached_tokens": 40, "output_tokens": 20, "wall_seconds": 0.25, "harness_digest": "sha256:2",
        "final_fingerprint": "sha256:3", "model": "base", "version_min": 0, "version_max": 1,
    }  # fmt: skip
    return EpisodeRecord(**{**values, **changes})


def _segment(name: str, index: int, size: int) -> Segment:
    mask = np.arange(size) % 2 == 1
    return Segment(
        name, "root", index, "end", "policy",
        tokens=np.arange(size, dtype=np.int32) + index, mask=mask,
        logprobs=np.where(mask, np.float32(-0.3), np.float32(0)).astype(np.float32),
        versions=np.where(mask, 7, -1).astype(np.int32), origin=mask.astype(np.int8),
    )  # fmt: skip


def _write(folder: Path, *, reverse: bool = False, kind: str = "episodes") -> Manifest:
    records = [_record("a"), _record("b", quarantine=QuarantineReason.state_drift, error="drifted")]
    segments = [_segment("a", 0, 5), _segment("a", 1, 0), _segment("b", 0, 3)]
    if reverse:
        records, segments = records[::-1], segments[::-1]
    return write_sealed(folder, records, segments, kind=kind, parents={"tasks": "sha256:9"}, facts={"seed": 1})


def test_records_and_segments_come_back_equal(tmp_path: Path) -> None:
    manifest = _write(tmp_path)
    sealed = read_sealed(tmp_path)
    assert sealed.manifest == manifest == read_sealed(tmp_path, "episodes").manifest
    assert manifest.counts == {"trajectories": Counts(raw=2, validated=1, quarantined=1)}
    assert sealed.records == [_record("a"), _record("b", quarantine=QuarantineReason.state_drift, error="drifted")]
    for got, want in zip(sealed.segments, [_segment("a", 0, 5), _segment("a", 1, 0), _segment("b", 0, 3)]):
        assert (got.episode_id, got.run, got.index, got.closed_by) == (want.episode_id, "root", want.index, "end")
        for name in ("tokens", "mask", "logprobs", "versions", "origin"):
            assert np.array_equal(getattr(got, name), getattr(want, name)), name
            assert getattr(got, name).dtype == getattr(want, name).dtype


def test_the_same_content_in_any_order_has_the_same_seal(tmp_path: Path) -> None:
    assert _write(tmp_path / "x").digest() == _write(tmp_path / "y", reverse=True).digest()


def test_token_columns_have_plain_types(tmp_path: Path) -> None:
    _write(tmp_path)
    schema = pq.read_schema(tmp_path / SEGMENTS)
    kinds = {
        name: str(schema.field(name).type.value_type) for name in ("tokens", "mask", "logprobs", "versions", "origin")
    }
    assert kinds == {"tokens": "int32", "mask": "bool", "logprobs": "float", "versions": "int32", "origin": "int8"}


def test_demonstrations_are_counted_apart(tmp_path: Path) -> None:
    assert set(_write(tmp_path, kind="demonstrations").counts) == {"demonstrations"}


def test_an_empty_release_is_a_release(tmp_path: Path) -> None:
    write_sealed(tmp_path, [], [], kind="episodes", parents={}, facts={})
    sealed = read_sealed(tmp_path)
    assert (sealed.records, sealed.segments) == ([], [])


def test_touched_folders_are_refused_by_name(tmp_path: Path) -> None:
    _write(tmp_path)
    with pytest.raises(SealError, match="expected 'demonstrations'"):
        read_sealed(tmp_path, "demonstrations")
    (tmp_path / "extra.txt").write_text("x")
    with pytest.raises(SealError, match=r"extra\.txt is not in the manifest"):
        read_sealed(tmp_path)
    (tmp_path / "extra.txt").unlink()
    data = (tmp_path / SEGMENTS).read_bytes()
    (tmp_path / SEGMENTS).write_bytes(data[:-1])
    with pytest.raises(SealError, match=r"segments\.parquet was altered or truncated"):
        read_sealed(tmp_path)
    (tmp_path / SEGMENTS).write_bytes(data)
    (tmp_path / EPISODES).unlink()
    with pytest.raises(SealError, match=r"episodes\.parquet is missing"):
        read_sealed(tmp_path)
    with pytest.raises(SealError, match=r"no manifest\.json"):
        read_sealed(tmp_path / "nowhere")


def test_rows_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="segments of b have no episode record"):
        write_sealed(tmp_path, [_record("a")], [_segment("b", 0, 2)], kind="episodes", parents={}, facts={})
    with pytest.raises(ValueError, match="ids must be unique"):
        write_sealed(tmp_path, [_record("a"), _record("a")], [], kind="episodes", parents={}, facts={})
