"""What the tests of real agent programs share: the installed program, patient tasks, what a written policy says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from occamy.contracts.episode import Segment
from occamy.contracts.task import Budget, TaskContract
from occamy.harness.adapters.launch import AdapterHarness
from occamy.harness.adapters.program import ProgramMissing
from occamy.harness.loading import load, load_adapter
from occamy.rollout.jobs import EpisodeJob

from .open_vocabulary import long_text

BUDGET = Budget(turns=60, tool_calls=60, tokens=100_000, wall_seconds=200.0)


def installed(name: str) -> AdapterHarness:
    """The adapter's harness; skips the test where its program is not installed."""
    try:
        harness = load(name)
    except ProgramMissing as e:
        pytest.skip(str(e))
    assert isinstance(harness, AdapterHarness)
    return harness


def locked_out(name: str, place: str) -> AdapterHarness:
    """The adapter's harness with something wrong in a place of its configuration."""
    adapter, here = load_adapter(name)
    launch = json.loads(json.dumps(adapter.launch.model_dump(mode="json")).replace(place, "wrong"))
    return AdapterHarness(adapter.model_validate({**adapter.model_dump(mode="json"), "launch": launch}), here)


def patient(task: TaskContract, **world: Any) -> TaskContract:
    """The task with time for a starved machine, and with another world where asked."""
    meta = task.meta.model_copy(update={"budget": BUDGET})
    return task.model_copy(update={"meta": meta, "world": task.world.model_copy(update=world)})


def with_long_files(task: TaskContract) -> TaskContract:
    """The patient task with seven files, big0 to big6, of `long_text`, which may be read and others written."""
    files = {f"big{number}": long_text(number) for number in range(7)}
    task = patient(task, files=task.world.files | files, faults=())
    grading = task.grading.model_copy(update={"allow_other_changes": True})
    tools = tuple(dict.fromkeys((*task.tools, "file_read", "file_write")))
    return task.model_copy(update={"grading": grading, "tools": tools})


def job(task: TaskContract, name: str, temperature: float = 1.0) -> EpisodeJob:
    return EpisodeJob(name, task, trial=0, seed=1, sampled_by="policy", temperature=temperature, model="written")


def call(name: str, **arguments: Any) -> str:
    """A tool call as the written policy says it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def by_run(segments: Sequence[Segment]) -> dict[str, list[Segment]]:
    runs: dict[str, list[Segment]] = {}
    for segment in segments:
        runs.setdefault(segment.run, []).append(segment)
    return runs


def targets(segments: Sequence[Segment]) -> list[int]:
    return [int(i) for i in np.concatenate([s.tokens[s.mask] for s in segments])]
