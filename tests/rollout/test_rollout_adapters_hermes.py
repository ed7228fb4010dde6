"""The real Hermes on worlds over MCP: solved by the oracle, captured token by token with a policy, typed when it fails.

Skipped where the program is not installed; `occamy harness install hermes` does that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from occamy.contracts.episode import EpisodeRecord, Origin, Outcome, QuarantineReason
from occamy.contracts.release import load_release
from occamy.contracts.task import TaskContract
from occamy.harness.adapters.launch import AdapterHarness
from occamy.harness.loading import load_adapter
from occamy.rollout.config import RolloutConfig
from occamy.rollout.episode import EpisodeResult
from occamy.rollout.session import RolloutSession
from occamy.rollout.trial import Sampler, play

from .agent_programs import BUDGET, by_run, call, installed, job, locked_out, patient, targets, with_long_files

CONFIG = RolloutConfig(context_limit=131072, max_new_tokens=2048, concurrency=3, hold_seconds=4.0)


@pytest.fixture(scope="module")
def hermes() -> AdapterHarness:
    return installed("hermes")


def test_the_oracle_solves_frozen_tasks_through_it(
    hermes: AdapterHarness, release: Path, chatml: Path, tmp_path: Path
) -> None:
    tasks = [patient(task) for task in load_release(release).select(pool="long")[:2]]
    seen: list[EpisodeRecord] = []
    sampler = Sampler(chatml, "oracle")
    records = play(tasks, hermes, sampler, tmp_path / "s", CONFIG, trials=1, seed=1, on_record=seen.append)
    assert records == seen and len(records) == 2
    for record, task in zip(sorted(records, key=lambda r: r.task_id), tasks, strict=True):
        assert (record.outcome, record.quarantine, record.error) == (Outcome.completed, None, "")
        assert record.success and record.score == 1.0
        assert record.tool_calls >= len(task.grading.reference) and record.steps == record.tool_calls + 1
        assert record.harness_digest == hermes.digest


class Marathon:
    """A policy that delegates, writes a long note, reads until Hermes has compacted twice, then does the task."""

    def __init__(self, task: TaskContract) -> None:
        calls = [call(f"mcp__world__{c.name}", **c.arguments) for c in task.grading.reference]
        reads = [call("mcp__world__file_read", path=f"big{i % 7}") for i in range(14)]
        parts = [{"goal": f"PART-{x} look — café", "context": f"part {x}"} for x in "AB"]
        note = call("mcp__world__file_write", path="note", text="long " * 200)
        # Arguments in an order that Hermes changes, characters that it escapes, spaces that it strips.
        self._root = [f"  Splitting — naïve.\n{call('delegate_task', tasks=parts)}", note, *reads, *calls, " done \n"]
        self.roots = 0

    def __call__(self, prompt: str) -> str:
        if '"name": "delegate_task"' in prompt:
            self.roots += 1
            return self._root[self.roots - 1]
        if "You are a summarization agent" in prompt:
            return "Summary: the note is written, files were read."
        if "<tool_response>" in prompt:
            return "PART done."
        return call("mcp__world__file_read", path="big0")

    @property
    def finished(self) -> bool:
        return self.roots == len(self._root)


def test_compaction_and_children_are_captured_without_loss(
    hermes: AdapterHarness, release: Path, chatml: Path, policy: Any, tmp_path: Path
) -> None:
    task = with_long_files(load_release(release).select(pool="short")[0])
    policy.write = marathon = Marathon(task)
    config = CONFIG.model_copy(update={"context_limit": 65536})
    with RolloutSession(
        tmp_path / "s", checkpoint=chatml, engine_url=policy.url, harness=hermes, config=config
    ) as session:
        [result] = session.stream([job(task, "m")], 1)
    record = result.record
    assert (record.outcome, record.quarantine, record.error) == (Outcome.completed, None, "")
    assert marathon.finished and record.success and (record.version_min, record.version_max) == (3, 3)
    runs = by_run(result.segments)
    assert sorted(runs) == ["auxsummary-0", "auxsummary-1", "root", "sub-0", "sub-1"]
    assert [s.closed_by for s in runs["root"]] == ["summary_replacement", "summary_replacement", "end"]

    def sampled_by(kind: str) -> list[int]:
        return [i for prompt, ids in policy.sampled if kind == _kind(prompt) for i in ids]

    assert targets(runs["root"]) == sampled_by("root")
    summaries = runs["auxsummary-0"] + runs["auxsummary-1"]
    assert targets(summaries) == sampled_by("summary")
    children = runs["sub-0"] + runs["sub-1"]
    assert targets(children) == []
    kept = [int(i) for s in children for i in s.tokens[s.origin == Origin.SUBAGENT]]
    assert sorted(kept) == sorted(sampled_by("child"))
    assert sum(int(s.mask.sum()) for s in result.segments) + len(kept) == record.output_tokens
    assert all((s.logprobs[s.mask] == -0.5).all() for s in result.segments)


def _kind(prompt: str) -> str:
    if "You are a summarization agent" in prompt:
        return "summary"
    return "root" if '"name": "delegate_task"' in prompt else "child"


def test_faults_of_the_endpoint_are_infrastructure_and_a_silent_policy_is_not(
    hermes: AdapterHarness, release: Path, chatml: Path, policy: Any, tmp_path: Path
) -> None:
    _, here = load_adapter("hermes")
    hasty = AdapterHarness(hermes.adapter.model_copy(update={"stall_seconds": 3.0}), here)
    task = patient(load_release(release).select(pool="short")[0])
    short = BUDGET.model_copy(update={"wall_seconds": 20.0})  # on top of what Hermes has to start
    task = task.model_copy(update={"meta": task.meta.model_copy(update={"budget": short})})

    def write(prompt: str) -> str | None:
        if "REQUEST-500" in prompt:
            return None
        if "REQUEST-HANG" in prompt:
            policy.ended.wait()
        return ""

    policy.write = write
    jobs = [job(task.model_copy(update={"request": f"REQUEST-{name}"}), name) for name in ("500", "HANG", "EMPTY")]
    with RolloutSession(
        tmp_path / "s", checkpoint=chatml, engine_url=policy.url, harness=hasty, config=CONFIG
    ) as session:
        results: dict[str, EpisodeResult] = {r.record.episode_id: r for r in session.stream(jobs, 3)}
    for name in ("500", "HANG"):
        record = results[name].record
        assert (record.outcome, record.quarantine) == (Outcome.infra_failed, QuarantineReason.infra_failed)
    assert "the endpoint failed" in results["500"].record.error
    # the episode's time or the engine's own, whichever is over first
    assert re.search("a model call was pending for|no answer within", results["HANG"].record.error)
    silent = results["EMPTY"].record
    assert (silent.outcome, silent.quarantine, silent.reward) == (Outcome.agent_failed, None, 0.0)
    assert re.search("empty|No reply", silent.error)


def test_a_program_that_never_gets_in_is_infrastructure(
    hermes: AdapterHarness, release: Path, chatml: Path, policy: Any, tmp_path: Path
) -> None:
    task = patient(load_release(release).select(pool="short")[0])
    with RolloutSession(
        tmp_path / "s", checkpoint=chatml, engine_url=policy.url, harness=locked_out("hermes", "{key}"), config=CONFIG
    ) as session:
        [result] = session.stream([job(task, "401")], 1)
    assert result.record.outcome is Outcome.infra_failed and result.record.quarantine is QuarantineReason.infra_failed
    assert "401" in result.record.error and policy.sampled == []
