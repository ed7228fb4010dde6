"""The real OpenClaw on worlds over MCP: solved by the oracle, captured token by token, typed when it fails.

Skipped where the program is not installed; `occamy harness install openclaw` does that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from occamy.contracts.episode import EpisodeRecord, Outcome, QuarantineReason
from occamy.contracts.release import load_release
from occamy.contracts.task import TaskContract
from occamy.harness.adapters.launch import AdapterHarness
from occamy.rollout.config import RolloutConfig
from occamy.rollout.session import RolloutSession
from occamy.rollout.trial import Sampler, play

from .agent_programs import by_run, call, installed, job, locked_out, patient, targets, with_long_files

TEMPERATURE = 0.7
CONFIG = RolloutConfig(
    context_limit=65536,
    max_new_tokens=2048,
    concurrency=2,
    hold_seconds=4.0,
    answer_seconds=6.0,
    temperature=TEMPERATURE,
)


@pytest.fixture(scope="module")
def openclaw() -> AdapterHarness:
    return installed("openclaw")


def test_the_oracle_solves_frozen_tasks_through_it(
    openclaw: AdapterHarness, release: Path, chatml: Path, tmp_path: Path
) -> None:
    tasks = [patient(task) for task in load_release(release).select(pool="long")[:2]]
    seen: list[EpisodeRecord] = []
    sampler = Sampler(chatml, "oracle")
    records = play(tasks, openclaw, sampler, tmp_path / "s", CONFIG, trials=1, seed=1, on_record=seen.append)
    assert records == seen and len(records) == 2
    for record, task in zip(sorted(records, key=lambda r: r.task_id), tasks, strict=True):
        assert (record.outcome, record.quarantine, record.error) == (Outcome.completed, None, "")
        assert record.success and record.score == 1.0 and record.segments == 1
        assert record.tool_calls >= len(task.grading.reference) and record.steps == record.tool_calls + 1


class Marathon:
    """A policy that writes and reads at once, reads long files until OpenClaw has compacted twice, does the task, and
    then has nothing to say until it is asked for a last word."""

    def __init__(self, task: TaskContract) -> None:
        calls = [call(f"world__{c.name}", **c.arguments) for c in task.grading.reference]
        reads = [call("world__file_read", path=f"big{i % 7}") for i in range(9)]
        both = f"  Splitting — naïve.\n{call('world__file_write', text='café ' * 40, path='note')}\n{reads[0]}"
        self._root = [both, *reads, *calls, ""]
        self.roots = self.summaries = 0

    def __call__(self, prompt: str) -> str:
        kind = _kind(prompt)
        if kind == "root":
            self.roots += 1
            return self._root[self.roots - 1]
        self.summaries += kind == "summary"
        return f"Summary {self.summaries}: the note is written, files were read." if kind == "summary" else " done \n"

    @property
    def finished(self) -> bool:
        return self.roots == len(self._root)


def test_compaction_is_captured_without_loss(
    openclaw: AdapterHarness, release: Path, chatml: Path, policy: Any, tmp_path: Path
) -> None:
    task = with_long_files(load_release(release).select(pool="short")[0])
    policy.write = marathon = Marathon(task)
    asked, answer = [], policy.answer
    policy.answer = lambda body: asked.append(body["sampling_params"]) or answer(body)
    with RolloutSession(
        tmp_path / "s", checkpoint=chatml, engine_url=policy.url, harness=openclaw, config=CONFIG
    ) as session:
        [result] = session.stream([job(task, "m", TEMPERATURE)], 1)
    record = result.record
    assert (record.outcome, record.quarantine, record.error) == (Outcome.completed, None, "")
    assert marathon.finished and record.success and (record.version_min, record.version_max) == (3, 3)
    assert {p["temperature"] for p in asked} == {TEMPERATURE} and max(p["max_new_tokens"] for p in asked) == 2048
    runs = by_run(result.segments)
    summaries = [f"auxsummary-{n}" for n in range(marathon.summaries)]
    assert sorted(runs) == ["auxanswer-0", *summaries, "root"] and len(summaries) >= 2
    closed_by = [s.closed_by for s in runs["root"]]
    assert closed_by.count("summary_replacement") == len(summaries) and closed_by[-1] == "end"
    assert set(closed_by) == {"summary_replacement", "history_pruning", "end"}

    def sampled_by(kind: str) -> list[int]:
        return [i for prompt, ids in policy.sampled if kind == _kind(prompt) for i in ids]

    assert targets(runs["root"]) == sampled_by("root")
    assert targets([s for name in summaries for s in runs[name]]) == sampled_by("summary")
    assert targets(runs["auxanswer-0"]) == []
    assert sum(int(s.mask.sum()) for s in result.segments) + len(sampled_by("answer")) == record.output_tokens
    assert all((s.logprobs[s.mask] == -0.5).all() for s in result.segments)


def _kind(prompt: str) -> str:
    if "You are a context summarization assistant" in prompt:
        return "summary"
    return "root" if '"name": "world__file_read", "description"' in prompt else "answer"


def test_faults_of_the_endpoint_are_infrastructure_and_a_silent_policy_is_not(
    openclaw: AdapterHarness, release: Path, chatml: Path, policy: Any, tmp_path: Path
) -> None:
    task = patient(load_release(release).select(pool="short")[0])
    acted: set[str] = set()

    def write(prompt: str) -> str | None:
        if "REQUEST-EMPTY" in prompt:
            return ""
        name = "500" if "REQUEST-500" in prompt else "HANG"
        if name not in acted:
            acted.add(name)
            return call(f"world__{task.grading.reference[0].name}", **task.grading.reference[0].arguments)
        if name == "HANG":
            policy.ended.wait()
        return None

    policy.write = write
    jobs = [
        job(task.model_copy(update={"request": f"REQUEST-{name}"}), name, TEMPERATURE)
        for name in ("500", "HANG", "EMPTY")
    ]
    with RolloutSession(
        tmp_path / "s", checkpoint=chatml, engine_url=policy.url, harness=openclaw, config=CONFIG
    ) as session:
        records = {r.record.episode_id: r.record for r in session.stream(jobs, 3)}
    for name in ("500", "HANG"):
        record = records[name]
        assert (record.outcome, record.quarantine) == (Outcome.infra_failed, QuarantineReason.infra_failed)
        assert "the endpoint failed" in record.error and record.steps == 1  # no try after the first
    silent = records["EMPTY"]
    assert (silent.outcome, silent.quarantine, silent.reward) == (Outcome.agent_failed, None, 0.0)
    assert silent.steps == 2 and "Agent couldn't generate a response" in silent.error


@pytest.mark.parametrize(("place", "said"), [("{key}", "401"), ("{tools_key}", "No callable tools remain")])
def test_a_program_that_never_gets_in_is_infrastructure(
    place: str, said: str, openclaw: AdapterHarness, release: Path, chatml: Path, policy: Any, tmp_path: Path
) -> None:
    task = patient(load_release(release).select(pool="short")[0])
    with RolloutSession(
        tmp_path / "s", checkpoint=chatml, engine_url=policy.url, harness=locked_out("openclaw", place), config=CONFIG
    ) as session:
        [result] = session.stream([job(task, "out", TEMPERATURE)], 1)
    assert result.record.outcome is Outcome.infra_failed and result.record.quarantine is QuarantineReason.infra_failed
    assert said in result.record.error and policy.sampled == []
