"""Each shipped composition, end to end: scripted teachers behind the real proxy, in real sandboxes, on real tasks."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from occamy.capture.backends import Teacher
from occamy.contracts.episode import Origin, Outcome, Segment
from occamy.contracts.release import load_release
from occamy.contracts.task import Budget, TaskContract
from occamy.harness.loading import load
from occamy.nano.tokenizer import CHAT_TEMPLATE
from occamy.rollout.config import RolloutConfig
from occamy.rollout.episode import EpisodeResult
from occamy.rollout.evidence import Evidence
from occamy.rollout.jobs import EpisodeJob, make_jobs
from occamy.rollout.oracle import OracleTeacher, Script
from occamy.rollout.session import RolloutSession

Message = dict[str, Any]


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of single characters under the nano template: it can spell calls that the nano model cannot."""
    special = ["<pad>", "<unk>", "<end>", "<tools>", "<system>", "<user>", "<assistant>", "<tool>"]
    vocabulary = {token: i for i, token in enumerate(special + [chr(i) for i in range(32, 127)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<[a-z]+>|.|\n"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("letters")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=special[3:],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def run_all(
    folder: Path,
    checkpoint: Path,
    composition: str,
    jobs: list[EpisodeJob],
    teacher: Teacher,
    context: int = 1024,
    concurrency: int = 4,
) -> list[tuple[EpisodeResult, Evidence]]:
    config = RolloutConfig(context_limit=context, max_new_tokens=512)
    harness = load(composition)
    with RolloutSession(
        folder, checkpoint=checkpoint, engine_url=None, harness=harness, config=config, teacher=teacher
    ) as session:
        return [(r, session.evidence(r.record.episode_id)) for r in session.stream(jobs, concurrency)]


def jobs_of(release: Path, pool: Any, count: int) -> list[EpisodeJob]:
    """One demonstration each of the longest tasks of a pool."""
    tasks = sorted(load_release(release).select(pool=pool), key=lambda task: -len(task.grading.reference))[:count]
    return list(make_jobs(tasks, trials=1, seed=1, sampled_by="teacher", temperature=0.0, model="oracle"))


def roomy(job: EpisodeJob) -> EpisodeJob:
    """The job with a budget that a family of agents who spell every letter can live on."""
    budget = Budget(turns=200, tool_calls=200, tokens=100_000)
    meta = job.task.meta.model_copy(update={"budget": budget})
    return replace(job, task=job.task.model_copy(update={"meta": meta}))


def spans(segment: Segment, origin: int) -> Iterator[list[int]]:
    """Runs of consecutive tokens of one origin."""
    at = [-2, *(i for i, o in enumerate(segment.origin) if o == origin)]
    span: list[int] = []
    for before, i in pairwise(at):
        if i != before + 1 and span:
            yield span
            span = []
        span.append(int(segment.tokens[i]))
    if span:
        yield span


class Planner(OracleTeacher):
    """The oracle, which writes a plan when it is asked for one."""

    async def complete(self, episode_id: str, request: dict[str, Any]) -> Message:
        if request["messages"][-1] == {"role": "user", "content": "make plan"}:
            return {"role": "assistant", "content": "get then update"}
        return await super().complete(episode_id, request)


@pytest.mark.parametrize("composition", ["react", "briefed", "plan_act"])
def test_the_oracle_succeeds_under_every_composition_of_the_laptop(
    composition: str, release: Path, checkpoint: Path, tmp_path: Path
) -> None:
    teacher = Planner(0.5)
    jobs = jobs_of(release, "long", 3) + jobs_of(release, "short", 2)
    for job in jobs:
        teacher.enrol(job)
    results = run_all(tmp_path / "s", checkpoint, composition, jobs, teacher)
    compacted = 0
    for result, evidence in results:
        record = result.record
        assert (record.outcome, record.success, record.quarantine) == (Outcome.completed, True, None), record
        assert record.harness_digest == load(composition).digest
        assert sum(int(s.mask.sum()) for s in result.segments) == record.output_tokens
        assert {s.run for s in result.segments} == {"root"} and len(result.segments) == 1 + rewrites(evidence)
        compacted += rewrites(evidence)
    assert compacted > 0


def rewrites(evidence: Evidence) -> int:
    """Rewrites in a trace."""
    return sum(e["kind"] == "turn" and e["rewrite"] is not None for e in evidence.trace)


class Delegator:
    """Delegates the whole task and a look at the files at the same time, then forks somebody to look again."""

    def __init__(self, task: TaskContract) -> None:
        path = task.grading.reference
        self._scripts = {"do": Script(path, "all set"), "look": Script([], "seen"), "again": Script([], "fine")}
        self._looks = {"do": False, "look": True, "again": True}
        self._answer = task.grading.answer

    async def complete(self, episode_id: str, request: dict[str, Any]) -> Message:
        messages = request["messages"]
        goal = next((m["content"] for m in messages if str(m.get("content")).startswith("task ")), None)
        if goal is None:
            return self._lead(messages)
        name = goal.partition(": ")[2]
        if self._looks[name]:
            self._looks[name] = False
            return calling(("file_list", {}))
        return self._scripts[name].reply(messages)

    def _lead(self, messages: list[Message]) -> Message:
        match [m["content"] for m in messages if m["role"] == "tool"]:
            case []:
                return calling(("task_delegate", {"goal": "do"}), ("task_delegate", {"goal": "look"}))
            case ["all set", "seen"]:
                return calling(("task_delegate", {"goal": "again", "mode": "fork"}))
            case ["all set", "seen", "fine"]:
                return {"role": "assistant", "content": self._answer}
            case results:
                raise AssertionError(results)


def calling(*calls: tuple[str, dict[str, Any]]) -> Message:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for n, (name, arguments) in enumerate(calls)
        ],
    }


def test_children_do_the_work_and_stay_in_the_lineage(release: Path, letters: Path, tmp_path: Path) -> None:
    [job] = jobs_of(release, "long", 1)
    [(result, evidence)] = run_all(tmp_path / "s", letters, "delegating", [roomy(job)], Delegator(job.task), 16384)
    record = result.record
    assert (record.outcome, record.success, record.quarantine) == (Outcome.completed, True, None), record
    assert (record.steps, record.failed_calls) == (3, len(job.task.world.faults))
    assert [s.run for s in result.segments] == ["root", "sub-0", "sub-1", "sub-2"]
    root, *children = result.segments
    tokens = {s.run: list(spans(s, Origin.SAMPLED if s.run == "root" else Origin.SUBAGENT)) for s in result.segments}
    assert int(root.mask.sum()) == sum(map(len, tokens["root"])) and not any(s.mask.any() for s in children)
    assert sum(len(span) for of_run in tokens.values() for span in of_run) == record.output_tokens
    steps = len(job.task.grading.reference) + len(job.task.world.faults) + 1
    assert {run: len(turns) for run, turns in tokens.items()} == {"root": 3, "sub-0": steps, "sub-1": 2, "sub-2": 2}
    tokenizer = Tokenizer.from_file(str(letters / "tokenizer.json"))
    opening = tokenizer.decode(children[2].tokens.tolist(), skip_special_tokens=False)
    assert job.task.request in opening.replace("<user>", "") and "task 3: again" in opening
    assert job.task.request not in tokenizer.decode(children[0].tokens.tolist(), skip_special_tokens=False)
    family = [e for e in evidence.trace if e["kind"] == "subagent"]
    assert {(e["number"], e["mode"], e["outcome"]) for e in family} == {
        (1, "isolated", "completed"),
        (2, "isolated", "completed"),
        (3, "fork", "completed"),
    }


def test_a_forks_prompt_is_its_parents_tokens_and_the_goal(release: Path, letters: Path, tmp_path: Path) -> None:
    [job] = jobs_of(release, "short", 1)
    [(result, _)] = run_all(tmp_path / "s", letters, "delegating", [roomy(job)], Delegator(job.task), 16384)
    root, fork = result.segments[0], result.segments[3]
    shared = next(i for i, (a, b) in enumerate(zip(root.tokens, fork.tokens)) if a != b)
    first_answer = next(i for i, m in enumerate(root.mask) if m)
    assert shared > first_answer  # the fork holds the root's first turn as it was sampled
    assert not (fork.origin[:shared] == Origin.SUBAGENT).any()  # and trains none of it


class Endless:
    """Delegates for ever, to children who never stop either."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    async def complete(self, episode_id: str, request: dict[str, Any]) -> Message:
        return calling(*[("task_delegate", {"goal": f"x{self.random.random()}"})] * 3, ("file_list", {}))


def test_a_family_that_never_stops_is_ended_by_the_budgets_of_the_task(
    release: Path, letters: Path, tmp_path: Path
) -> None:
    [job] = jobs_of(release, "long", 1)
    [(result, evidence)] = run_all(tmp_path / "s", letters, "delegating", [job], Endless(), 65536)
    record, budget = result.record, job.task.meta.budget
    assert (record.outcome, record.quarantine) == (Outcome.timed_out, None)
    assert record.output_tokens <= budget.tokens + 512 and record.tool_calls <= budget.tool_calls
    children = [e for e in evidence.trace if e["kind"] == "subagent"]
    assert children and record.steps + sum(e["turns"] for e in children) <= budget.turns
    assert {e["outcome"] for e in children} == {"timed_out"}


class Quarrel:
    """Four children at once write the same file, three times each; every answer takes a time of its own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def complete(self, episode_id: str, request: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(self._random.random() / 50)
        messages = request["messages"]
        goal = next((m["content"] for m in messages if str(m.get("content")).startswith("task ")), None)
        turn = sum(m["role"] == "assistant" for m in messages)
        if goal is None and turn == 0:
            return calling(*[("task_delegate", {"goal": str(child)}) for child in range(4)])
        if goal is not None and turn < 3:
            return calling(("file_write", {"path": "memo", "text": f"{goal[-1]}{turn}"}))
        return {"role": "assistant", "content": "done"}


def kept(results: list[tuple[EpisodeResult, Evidence]]) -> dict[str, Any]:
    """What is kept of each episode, without times and the trace."""
    return {
        result.record.episode_id: (
            result.record.model_copy(update={"wall_seconds": 0.0}),
            [(s.run, s.index, s.closed_by, s.tokens.tolist(), s.origin.tolist()) for s in result.segments],
            evidence.events,
            evidence.state,
        )
        for result, evidence in results
    }


def test_timing_decides_nothing_in_a_family(release: Path, letters: Path, tmp_path: Path) -> None:
    jobs = [roomy(job) for job in jobs_of(release, "short", 8)]
    alone = run_all(tmp_path / "alone", letters, "delegating", jobs, Quarrel(1), 16384, concurrency=1)
    beside = run_all(tmp_path / "beside", letters, "delegating", jobs, Quarrel(2), 16384, concurrency=8)
    assert kept(alone) == kept(beside)
    for result, evidence in alone:
        assert (result.record.outcome, result.record.quarantine) == (Outcome.completed, None)
        assert [s.run for s in result.segments] == ["root", "sub-0", "sub-1", "sub-2", "sub-3"]
        written = [event.arguments["text"] for event in evidence.events if isinstance(event.arguments, dict)]
        assert written == [f"{child}{turn}" for turn in range(3) for child in range(4)]
