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
from safetensors.torch import load_file

from occamy.capture.sealed import read_sealed
from occamy.stages.names import STAGES
from occamy.storage.progress import ProgressReader

from .conftest import counts, outputs, start, survivors

ONE_PROCESS = {"admission", "demonstrations", "soup", "sao", "evaluation"}
"""Stages in which one process is killed; in the others the command. (A branch goes on while the other one fails.)"""
SIGNS = {"admission": 2, "demonstrations": 1, "marathon-sft": 2, "marathon": 2, "sprint": 2, "sao": 2, "evaluation": 2}
"""Signs of progress that a stage shows in any run before it is near its end; the others end within one."""
SAME = 0.01
"""Share of a stage's own movement by which two runs may differ. Behaviour log-probs depend on which sequences share an
engine step (about 1e-5, which moved weights by 4e-5 of it between two uninterrupted runs); a lost or repeated batch of
three would be tens of percent."""
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]


def wait_for(process: subprocess.Popen[str], reader: ProgressReader, pending: set[str], dice: random.Random) -> str:
    """Wait until one of `pending` is at work (KFP orders branches as it likes) and has shown a few signs of progress,
    as many as the dice say of those that any run shows. Returns the stage."""
    stage, signs = "", 0
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for event in reader.poll():
            if not stage and event.state == "started" and event.stage in pending:
                stage, signs = event.stage, dice.randint(0, SIGNS.get(event.stage, 0))
            elif event.stage == stage and event.state == "running":
                signs -= 1
            if stage and signs <= 0:
                return stage
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    raise AssertionError(f"none of {pending} started, or {stage} shows too little progress")


def kill(process: subprocess.Popen[str], one_process: bool, dice: random.Random) -> None:
    """kill -9 of the command, whose processes have to notice, or of one process that works for it."""
    victims = [pid for pid in survivors(process.pid) if works(pid)] if one_process else []
    os.kill(dice.choice(victims) if victims else process.pid, signal.SIGKILL)


def works(pid: int) -> bool:
    """Whether the run cannot succeed without this process: the pipeline, a stage, a trainer (not a shell around it)."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return bool({b"pipelines.local", b"kfp.dsl.executor_main", b"occamy.training.worker"} & set(line))


def test_killed_in_every_stage_and_resumed(finished_run: tuple[Path, str], tiny: list[str], tmp_path: Path) -> None:
    whole, _ = finished_run
    out = tmp_path / "killed"
    dice = random.Random(int(os.environ.get("OCCAMY_KILL_SEED", "1")))
    kills = 0
    pending = set(STAGES)
    while pending:
        reader = ProgressReader(out, from_end=True)
        process = start("run", *(["--resume", str(out)] if (out / "run.json").exists() else [*tiny, "--out", str(out)]))
        stage = wait_for(process, reader, pending, dice)
        pending.remove(stage)
        kill(process, stage in ONE_PROCESS, dice)
        kills += not finished(out, stage)  # only a kill in the middle of a stage counts
        process.communicate(timeout=300)
        deadline = time.monotonic() + 60
        while left := survivors(process.pid):
            assert time.monotonic() < deadline, f"left behind after a kill in {stage}: {left}"
            time.sleep(0.1)
    assert kills >= 10, f"only {kills} of {len(STAGES)} kills came before their stages had ended"

    process = start("run", "--resume", str(out))
    printed, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, printed

    assert outputs(out) == outputs(whole)
    assert counts(out) == counts(whole)
    for stage, start_from in (("marathon", "marathon-sft"), ("sao", "soup")):
        assert batches(out, stage) == batches(whole, stage)
        assert updates(out, stage) == updates(whole, stage) > 0, "no update: the comparison would say nothing"
        moved = distance(whole / "stages" / stage, whole / "stages" / start_from)
        assert distance(out / "stages" / stage, whole / "stages" / stage) < SAME * moved


def finished(run: Path, stage: str) -> bool:
    """Whether a stage ended well; preflight leaves no record but its line of progress."""
    if stage != "preflight":
        return (run / "stages" / f"{stage}.json").is_file()
    path = run / "progress.jsonl"
    return path.is_file() and '"preflight", "state": "finished"' in path.read_text()


def updates(run: Path, stage: str) -> float:
    rows = (run / "stages" / stage / "trainer" / "exchange" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, len(rows) + 1))
    return float(sum(json.loads(row)["updates"] for row in rows))


def distance(one: Path, other: Path) -> float:
    """Euclidean distance of two checkpoints' parameters."""
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert a.keys() == b.keys()
    return float(sum(((a[k].double() - b[k].double()) ** 2).sum() for k in a)) ** 0.5


def batches(run: Path, stage: str) -> list[list[str]]:
    """Episode ids of every batch that trained; none twice."""
    found = []
    for folder in sorted((run / "stages" / stage / "trainer" / "exchange" / "batches").iterdir()):
        ids = [r.episode_id for r in read_sealed(folder, "episodes").records]
        assert max(Counter(ids).values()) == 1
        found.append(sorted(ids))
    return found
