"""kill -9 in every stage, of the whole run or of one process in it: nothing is lost, repeated or left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from occamy.capture.sealed import read_sealed
from occamy.stages.names import STAGES

from .conftest import figures, start, survivors, weights

ONE_PROCESS = {"admission", "demonstrations", "soup", "sao", "evaluation"}
"""Stages in which one process is killed; in the others the command. (A branch goes on while the other one fails.)"""
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]


def wait_for(process: subprocess.Popen[str], out: Path, stage: str) -> None:
    """Wait until `stage` is at work in this attempt."""
    path = out / "progress.jsonl"
    seen = path.stat().st_size if path.exists() else 0
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        text = path.read_bytes()[seen:].decode() if path.exists() else ""
        for line in text.splitlines():
            if f'"stage": "{stage}"' in line and '"started"' in line:
                return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise AssertionError(f"stage {stage} did not start")


def kill(process: subprocess.Popen[str], one_process: bool, dice: random.Random) -> None:
    """kill -9 of the command, whose processes have to notice, or of one process that works for it."""
    victims = survivors(process.pid) if one_process else []
    os.kill(dice.choice(victims) if victims else process.pid, signal.SIGKILL)


def test_killed_in_every_stage_and_resumed(finished_run: tuple[Path, str], tiny: list[str], tmp_path: Path) -> None:
    whole, _ = finished_run
    out = tmp_path / "killed"
    dice = random.Random(int(os.environ.get("OCCAMY_KILL_SEED", "1")))
    kills = 0
    for stage in STAGES:
        process = start("run", *(["--resume", str(out)] if (out / "run.json").exists() else [*tiny, "--out", str(out)]))
        wait_for(process, out, stage)
        time.sleep(dice.uniform(0, 0.8) * seconds_of(whole, stage))
        kill(process, stage in ONE_PROCESS, dice)
        kills += 1
        process.communicate(timeout=300)
        deadline = time.monotonic() + 60
        while left := survivors(process.pid):
            assert time.monotonic() < deadline, f"left behind after a kill in {stage}: {left}"
            time.sleep(0.1)
    assert kills >= 10

    process = start("run", "--resume", str(out))
    printed, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, printed

    assert weights(out) == weights(whole)
    assert figures(out) == figures(whole)
    for stage in ("marathon", "sao"):
        assert batches(out, stage) == batches(whole, stage)


def seconds_of(run: Path, stage: str) -> float:
    path = run / "stages" / f"{stage}.json"
    return float(json.loads(path.read_text())["facts"]["seconds"]) if path.exists() else 1.0


def batches(run: Path, stage: str) -> list[list[str]]:
    """Episode ids of every batch that trained; none twice."""
    found = []
    for folder in sorted((run / "stages" / stage / "trainer" / "exchange" / "batches").iterdir()):
        ids = [r.episode_id for r in read_sealed(folder, "episodes").records]
        assert max(Counter(ids).values()) == 1
        found.append(sorted(ids))
    return found
