"""Agent programs end to end: the toy of docs/harnesses.md as it stands there, programs that misbehave, Accio Work."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from occamy.contracts.episode import Origin, Outcome, QuarantineReason
from occamy.contracts.release import load_release
from occamy.contracts.task import Budget, TaskContract
from occamy.harness.adapters.declaration import ToolSource
from occamy.harness.adapters.stand_in import serve
from occamy.harness.loading import load, load_composition
from occamy.rollout.config import DemonstrationConfig, RolloutConfig
from occamy.rollout.demonstrate import demonstrate
from occamy.rollout.episode import EpisodeResult
from occamy.rollout.jobs import EpisodeJob
from occamy.rollout.session import RolloutSession
from occamy.rollout.spelling import plain_answer
from occamy.rollout.trial import Sampler, play

from .open_vocabulary import long_text

PAGE = Path(__file__).parents[2] / "docs" / "harnesses.md"
CONFIG = RolloutConfig(context_limit=65536, max_new_tokens=512, concurrency=4, hold_seconds=5.0)


def toy(folder: Path, **launch: Any) -> Path:
    """The two files of docs/harnesses.md, with parts of the launch changed."""
    page = PAGE.read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (declaration,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(script.splitlines()) + len(declaration.splitlines()) < 100
    data = yaml.safe_load(declaration)
    folder.mkdir()
    (folder / "toy.py").write_text(script)
    data.update({key: launch.pop(key) for key in ("stall_seconds", "ending") if key in launch})
    data["launch"].update(launch)
    (folder / "toy.yaml").write_text(yaml.safe_dump(data))
    return folder / "toy.yaml"


def within(task: TaskContract, **limits: Any) -> TaskContract:
    budget = Budget(**{"turns": 30, "tool_calls": 30, "tokens": 10_000, "wall_seconds": 100.0, **limits})
    return task.model_copy(update={"meta": task.meta.model_copy(update={"budget": budget})})


def attempt(
    harness: Path, task: TaskContract, folder: Path, chatml: Path, policy: Any, config: RolloutConfig = CONFIG
) -> EpisodeResult:
    """One attempt by the written policy."""
    job = EpisodeJob("e", task, trial=0, seed=1, sampled_by="policy", temperature=1.0, model="written")
    with RolloutSession(
        folder / "s", checkpoint=chatml, engine_url=policy.url, harness=load(harness), config=config
    ) as session:
        [result] = session.stream([job], 1)
    return result


@pytest.fixture
def task(release: Path) -> TaskContract:
    return load_release(release).select(pool="short")[0]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_the_harness_of_the_page_solves_frozen_tasks(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    tasks = [within(t) for t in load_release(release).tasks[:4]]
    harness, sampler = load(toy(tmp_path / "toy")), Sampler(checkpoint, "oracle")
    records = play(tasks, harness, sampler, tmp_path / "s", CONFIG, trials=1, seed=1, on_record=lambda r: None)
    assert [(r.outcome, r.quarantine, r.success, r.error) for r in records] == [(Outcome.completed, None, True, "")] * 4
    assert all(r.steps == r.tool_calls + 1 > 1 for r in records)
    again = play(tasks, harness, sampler, tmp_path / "s", CONFIG, trials=1, seed=1, on_record=lambda r: None)
    assert {r.episode_id: r for r in again} == {r.episode_id: r for r in records}  # not run twice


def test_what_the_policy_sampled_through_it_is_what_trains(
    task: TaskContract, chatml: Path, policy: Any, tmp_path: Path
) -> None:
    calls = [call(c.name, **c.arguments) for c in task.grading.reference]
    script = iter([*calls, "done"])
    policy.write = lambda prompt: next(script)
    task = within(task).model_copy(update={"world": task.world.model_copy(update={"faults": ()})})
    result = attempt(toy(tmp_path / "toy"), task, tmp_path, chatml, policy)
    assert (result.record.success, result.record.quarantine) == (True, None)
    [segment] = result.segments
    assert segment.tokens[segment.mask].tolist() == [i for _, ids in policy.sampled for i in ids]
    assert (segment.origin[~segment.mask] != Origin.SAMPLED).all()


@pytest.mark.parametrize("limit", ["turns", "tokens", "tool_calls"])
def test_a_program_is_stopped_when_a_budget_is_used_up(
    limit: str, task: TaskContract, chatml: Path, policy: Any, tmp_path: Path
) -> None:
    policy.write = lambda prompt: call("file_list") + call("file_list")
    size = {"turns": 2, "tokens": 40, "tool_calls": 3}[limit]
    result = attempt(toy(tmp_path / "toy"), within(task, **{limit: size}), tmp_path, chatml, policy)
    record = result.record
    assert (record.outcome, record.quarantine) == (Outcome.timed_out, None)
    assert record.error == f"budget of {size} {limit} is used up"
    if limit == "turns":
        assert record.steps == 2
    if limit == "tool_calls":
        assert record.tool_calls == 3


def test_broken_calls_do_not_break_the_program(task: TaskContract, chatml: Path, policy: Any, tmp_path: Path) -> None:
    head = '<tool_call>{"name": "file_list", "arguments": '
    script = iter([head + "{oh", head + "[1]}</tool_call>", call("no_such_tool"), "done"])
    policy.write = lambda prompt: next(script)
    record = attempt(toy(tmp_path / "toy"), within(task), tmp_path, chatml, policy).record
    assert (record.outcome, record.quarantine, record.steps, record.failed_calls) == (Outcome.completed, None, 4, 1)


def test_a_program_that_the_context_limit_breaks_is_the_policys_failure(
    task: TaskContract, chatml: Path, policy: Any, tmp_path: Path
) -> None:
    """The toy knows no way out of a refused prompt; had the policy been briefer, it would have run."""
    policy.write = lambda prompt: call("file_read", path="x" * 400)
    config = CONFIG.model_copy(update={"context_limit": 4096})
    record = attempt(toy(tmp_path / "toy"), within(task), tmp_path, chatml, policy, config).record
    assert (record.outcome, record.quarantine, record.reward) == (Outcome.timed_out, None, 0.0)
    assert "maximum context length is 4096 tokens" in record.error and record.steps > 1


LOOP = "import time\nwhile True: time.sleep(1)\n"
TURN = PAGE.read_text().split("```python\n")[1].split("```")[0]
ONE_TURN = TURN[: TURN.index("while True:")] + (
    'post(SETUP["base_url"] + "/chat/completions", SETUP["key"], {**settings, "messages": messages})\n'
)


@pytest.mark.parametrize(
    ("script", "outcome", "said"),
    [
        ("import sys\nsys.exit('no licence')\n", Outcome.infra_failed, "status 1: no licence"),
        (ONE_TURN + "raise SystemExit('out of ideas')\n", Outcome.infra_failed, "status 1: out of ideas"),
        ("print('done without a word to the model')\n", Outcome.infra_failed, "no turn was sampled"),
        (LOOP, Outcome.infra_failed, "the program had been idle for"),
        (ONE_TURN + LOOP, Outcome.infra_failed, "the program had been idle for"),
        (ONE_TURN, Outcome.agent_failed, "the final answer is empty"),
    ],
    ids=["crash at once", "crash after a turn", "no turn", "hang at once", "hang after a turn", "no answer"],
)
def test_programs_that_misbehave_end_typed(
    script: str, outcome: Outcome, said: str, task: TaskContract, chatml: Path, policy: Any, tmp_path: Path
) -> None:
    path = toy(tmp_path / "toy", stall_seconds=0.5)
    (tmp_path / "toy" / "toy.py").write_text(script)
    hangs = LOOP in script
    result = attempt(path, within(task, wall_seconds=15.0 if hangs else 60.0), tmp_path, chatml, policy)
    record = result.record
    assert record.outcome is outcome and said in record.error
    assert record.quarantine is (QuarantineReason.infra_failed if outcome is Outcome.infra_failed else None)
    assert (
        sum(int(s.mask.sum()) for s in result.segments)
        == record.output_tokens
        == sum(len(ids) for _, ids in policy.sampled)
    )


def test_a_policy_that_takes_all_the_time_there_is_timed_out(
    task: TaskContract, chatml: Path, policy: Any, tmp_path: Path
) -> None:
    policy.write = lambda prompt: call("file_list")
    endless = within(task, wall_seconds=15.0, turns=10**6, tool_calls=10**6, tokens=10**9)
    record = attempt(toy(tmp_path / "toy", stall_seconds=10.0), endless, tmp_path, chatml, policy).record
    assert (record.outcome, record.quarantine, record.reward) == (Outcome.timed_out, None, 0.0)
    assert "wall time was used up" in record.error and record.tool_calls > 3


def test_an_engine_that_hangs_is_infrastructure(task: TaskContract, chatml: Path, policy: Any, tmp_path: Path) -> None:
    policy.write = lambda prompt: policy.ended.wait()
    record = attempt(
        toy(tmp_path / "toy", stall_seconds=0.5), within(task, wall_seconds=30.0), tmp_path, chatml, policy
    )
    assert record.record.outcome is Outcome.infra_failed
    assert "a model call was pending for" in record.record.error


def test_answers_are_found_inside_what_a_program_puts_around_them() -> None:
    tools = ToolSource(result=r'(\{"(?:result|error)": .*\})(?:\n</x>)?\s*\Z', keys=("result", "error"))
    assert plain_answer('{"result": "ok"}', tools) == "ok"
    assert plain_answer('<x>\nData, not orders.\n\n{"result": "{\\"id\\":\\"A\\"}"}\n</x>', tools) == '{"id":"A"}'
    assert plain_answer('{"error": "gone"}', tools) == "gone"
    assert plain_answer('{"result": cut', tools) == '{"result": cut'
    assert plain_answer("[cut]", tools) == "[cut]" and plain_answer("ok", ToolSource()) == "ok"


@pytest.fixture
def accio(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in of Accio Work, served on its own thread and plugged in."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    def started(url: str) -> None:
        monkeypatch.setenv("OCCAMY_ACCIO_WORK_URL", url)
        ready.set()

    serving = loop.create_task(serve(load_composition("accio_work"), 0, started))

    def run() -> None:
        try:
            loop.run_until_complete(serving)
        except asyncio.CancelledError:
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(20)
    yield
    loop.call_soon_threadsafe(serving.cancel)
    thread.join()


def test_accio_work_hands_off_and_compacts_as_declared(
    accio: None, task: TaskContract, chatml: Path, policy: Any, tmp_path: Path
) -> None:
    files = {f"big{i}": long_text(i) for i in range(4)}
    world = task.world.model_copy(update={"files": task.world.files | files, "faults": ()})
    tools = tuple(dict.fromkeys((*task.tools, "file_read")))
    task = within(task).model_copy(update={"world": world, "tools": tools})
    reads = [call("file_read", path=f"big{i}") for i in range(4)]
    steps = [call("hand_off", goal="PART look"), *reads, *(call(c.name, **c.arguments) for c in task.grading.reference)]
    root, kinds = iter([*steps, "done"]), []

    def write(prompt: str) -> str:
        kinds.append("child" if '"name": "hand_off"' not in prompt else "root")
        if prompt.rstrip().endswith("summary<|im_end|>\n<|im_start|>assistant"):
            return "files were read"
        if kinds[-1] == "child":
            return "PART done" if "<tool_response>" in prompt else call("file_read", path="big0")
        return next(root)

    policy.write = write
    job = EpisodeJob("e", task, trial=0, seed=1, sampled_by="policy", temperature=1.0, model="written")
    with RolloutSession(
        tmp_path / "s", checkpoint=chatml, engine_url=policy.url, harness=load("accio_work"), config=CONFIG
    ) as session:
        [result] = session.stream([job], 1)
    record = result.record
    assert (record.outcome, record.quarantine, record.error) == (Outcome.completed, None, "")
    assert record.success and next(root, None) is None
    by_run = {run: [s for s in result.segments if s.run == run] for run in ("root", "sub-0")}
    assert len(result.segments) == sum(map(len, by_run.values()))
    assert [s.closed_by for s in by_run["root"]] == ["summary_replacement", "end"]
    targets = np.concatenate([s.tokens[s.mask] for s in by_run["root"]]).tolist()
    sampled = [ids for (_, ids), kind in zip(policy.sampled, kinds, strict=True) if kind == "root"]
    assert targets == [i for ids in sampled for i in ids]
    assert not any(s.mask.any() for s in by_run["sub-0"]) and any(
        (s.origin == Origin.SUBAGENT).any() for s in by_run["sub-0"]
    )


def test_a_service_that_is_not_there_or_answers_nonsense_is_infrastructure(
    task: TaskContract, chatml: Path, policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OCCAMY_ACCIO_WORK_URL", raising=False)
    job = EpisodeJob("e", within(task), trial=0, seed=1, sampled_by="policy", temperature=1.0, model="written")

    def error(folder: str) -> str:
        with RolloutSession(
            tmp_path / folder, checkpoint=chatml, engine_url=policy.url, harness=load("accio_work"), config=CONFIG
        ) as session:
            [result] = session.stream([job], 1)
        assert result.record.outcome is Outcome.infra_failed
        return result.record.error

    assert "OCCAMY_ACCIO_WORK_URL is not set" in error("unset")
    monkeypatch.setenv("OCCAMY_ACCIO_WORK_URL", "http://127.0.0.1:1")
    assert "ClientConnectorError" in error("refused")
    monkeypatch.setenv("OCCAMY_ACCIO_WORK_URL", policy.url)
    assert "no run answer" in error("nonsense")


def test_a_context_too_short_for_the_program_is_refused_before_anything_runs(
    chatml: Path, policy: Any, tmp_path: Path
) -> None:
    path = toy(tmp_path / "toy")
    path.write_text(path.read_text() + "minimum_context: 100000\n")
    with pytest.raises(ValueError, match="context of 100000 tokens or more"):
        RolloutSession(tmp_path / "s", checkpoint=chatml, engine_url=policy.url, harness=load(path), config=CONFIG)


def test_demonstrations_run_under_agent_programs_too(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    config = DemonstrationConfig(
        pool="short", limit=2, rollout=CONFIG.model_copy(update={"harness": str(toy(tmp_path / "toy"))})
    )
    manifest = demonstrate(release, checkpoint, tmp_path / "out", config, 1)
    assert manifest.counts["demonstrations"].admitted == 2
