"""Whole runs through the command line, small enough for two slow cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TINY = [
    "synthesis={train: {long: 24, short: 24}, validation: {long: 2, short: 2}, test: {long: 4, short: 4}}",
    "marathon_sft.epochs=2",
    "sprint.epochs=2",
    "hdpo.steps=3",
    "hdpo.tasks_per_step=3",
    "hdpo.group=4",
    "sao.steps=3",
    "sao.batch=12",
    "sao.critic.value_only_steps=1",
    "evaluation={tasks: 4, trials: 3, bootstrap: 200}",
]


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start `occamy ARGUMENTS` in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "occamy.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def survivors(owner: int) -> list[int]:
    """Processes whose environment says that `owner` asked for them."""
    wanted = f"OCCAMY_OWNER_PID={owner}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def outputs(run: Path) -> dict[str, str]:
    """Digest of what each stage made that is equal to the bit in equal runs."""
    names = ("synthesis", "admission", "marathon-sft", "sprint")
    return {name: json.loads((run / "stages" / f"{name}.json").read_text())["output"] for name in names}


def counts(run: Path) -> list[tuple[Any, ...]]:
    """Who was evaluated on how much."""
    result = json.loads((run / "stages" / "evaluation" / "evaluation.json").read_text())
    keys = ("candidate", "pool", "tasks", "episodes", "infra_failed", "quarantined")
    return [tuple(row[key] for key in keys) for row in result["figures"]]


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Options of a run of minutes on the shipped base, which solves enough for reinforcement learning to update."""
    options = ["--profile", "ci"]
    for override in TINY:
        options += ["--set", override]
    return options


@pytest.fixture(scope="session")
def finished_run(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """An uninterrupted run: its directory and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    process = start("run", *tiny, "--out", str(out))
    printed, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, printed
    yield out, printed
