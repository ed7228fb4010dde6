"""Demonstrations through the real proxy, harness, worlds and sandboxes; killed and resumed."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from occamy.capture.sealed import read_sealed
from occamy.contracts.episode import Origin, Outcome
from occamy.contracts.manifest import SealError
from occamy.contracts.release import load_release
from occamy.rollout.config import DemonstrationConfig, RolloutConfig
from occamy.rollout.demonstrate import demonstrate

CONFIG = DemonstrationConfig(rollout=RolloutConfig(concurrency=8))


def test_every_task_is_demonstrated_and_long_ones_are_compacted(
    release: Path, checkpoint: Path, tmp_path: Path
) -> None:
    out, shown = tmp_path / "demos", []
    manifest = demonstrate(release, checkpoint, out, CONFIG, 3, progress=lambda *a: shown.append(a))
    counts = manifest.counts["demonstrations"]
    assert (counts.raw, counts.admitted, counts.quarantined) == (20, 20, 0)
    assert manifest.parents == {"task_release": load_release(release).manifest.digest()}
    assert shown[-1] == (20, 20, "20/20 admitted")
    sealed = read_sealed(out, "demonstrations")
    assert all(r.success and r.score == r.reward == 1.0 and r.outcome is Outcome.completed for r in sealed.records)
    assert all(r.quarantine is None and r.version_max == -1 and r.sampled_by == "teacher" for r in sealed.records)
    assert max(r.segments for r in sealed.records) > 1 and sum(r.failed_calls for r in sealed.records) > 0
    for record in sealed.records:
        own = [s for s in sealed.segments if s.episode_id == record.episode_id]
        assert [s.index for s in own] == list(range(record.segments))
        assert [s.closed_by for s in own] == ["summary_replacement"] * (record.segments - 1) + ["end"]
        assert sum(int(s.mask.sum()) for s in own) == record.output_tokens
        assert all(np.array_equal(s.mask, s.origin == Origin.SAMPLED) and not s.logprobs.any() for s in own)
        assert 0 < record.cached_tokens < record.input_tokens
    assert not list(tmp_path.glob(".demos*"))
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert demonstrate(release, checkpoint, out, CONFIG, 3) == manifest
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir()} == before
    with pytest.raises(SealError, match="another release, configuration or seed"):
        demonstrate(release, checkpoint, out, CONFIG, 4)


def test_wasteful_demonstrations_cost_more_calls(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    calls = {}
    for share in (0.0, 1.0):
        config = CONFIG.model_copy(update={"wasteful": share, "pool": "short", "limit": 6, "trials": 2})
        demonstrate(release, checkpoint, tmp_path / str(share), config, 1)
        records = read_sealed(tmp_path / str(share)).records
        assert len(records) == 12 and all(r.pool == "short" for r in records)
        calls[share] = sum(r.tool_calls for r in records)
    assert calls[1.0] > calls[0.0]


def test_failed_demonstrations_are_counted_not_admitted(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    narrow = RolloutConfig(context_limit=128)  # below what a long task needs before its first compaction
    config = CONFIG.model_copy(update={"rollout": narrow})
    manifest = demonstrate(release, checkpoint, tmp_path / "demos", config, 1)
    counts = manifest.counts["demonstrations"]
    assert counts.raw == 20 == counts.admitted + counts.quarantined and counts.quarantined >= 5
    assert manifest.facts["quarantine"] == {"not_successful:timed_out": counts.quarantined}
    assert len(read_sealed(tmp_path / "demos").records) == counts.admitted


def test_nothing_is_lost_or_repeated_over_kill_nine(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "demos"
    code = f"""
from pathlib import Path
from occamy.rollout.config import DemonstrationConfig, RolloutConfig
from occamy.rollout.demonstrate import demonstrate
def progress(done, total, figure):
    print(done, flush=True)
config = DemonstrationConfig(rollout=RolloutConfig(concurrency=2))
demonstrate(Path({str(release)!r}), Path({str(checkpoint)!r}), Path({str(out)!r}), config, 3, progress=progress)
"""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert child.stdout is not None
    for _ in range(7):
        assert child.stdout.readline()
    child.kill()
    child.communicate()
    work = tmp_path / ".demos.work"
    assert work.exists() and not out.exists()
    with sqlite3.connect(work / "session" / "capture.sqlite") as db:
        finished = {i for (i,) in db.execute("SELECT episode_id FROM episodes WHERE record IS NOT NULL")}
        rows = dict(db.execute("SELECT episode_id, record FROM episodes WHERE record IS NOT NULL").fetchall())
    assert 7 <= len(finished) < 20
    config = DemonstrationConfig(rollout=RolloutConfig(concurrency=2))
    manifest = demonstrate(release, checkpoint, out, config, 3)
    assert manifest.counts["demonstrations"].admitted == 20
    sealed = read_sealed(out)
    assert len({r.episode_id for r in sealed.records}) == 20
    for record in sealed.records:
        if record.episode_id in rows:
            assert record.model_dump_json() == rows[record.episode_id]  # taken over, not run again
    straight = tmp_path / "straight"
    demonstrate(release, checkpoint, straight, config, 3)
    whole = read_sealed(straight)
    assert [s.tokens.tolist() for s in whole.segments] == [s.tokens.tolist() for s in sealed.segments]
