"""RL stages whole: real engine, proxy, harness, sandboxes and trainer processes around a random nano model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from occamy.capture.sealed import read_sealed
from occamy.contracts.episode import EpisodeRecord, Outcome
from occamy.contracts.lineage import LineageCard, read_card, tokenizer_digest, weights_digest, write_card
from occamy.contracts.manifest import seal
from occamy.contracts.record import digest_file
from occamy.contracts.release import KIND, contract_bytes, contract_path, load_release
from occamy.contracts.task import TaskContract
from occamy.engines.client import EngineError
from occamy.engines.local.launch import launch_engine
from occamy.harness.loading import load
from occamy.nano.model import Shape, init_weights, save_model
from occamy.nano.tokenizer import save_tokenizer
from occamy.rollout.config import RolloutConfig
from occamy.rollout.session import RolloutSession, RolloutStopped
from occamy.synthesis.author import Slot
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.variants import write_task
from occamy.training.config import OptimiserConfig
from occamy.training.drive import NothingSucceeds, train_hdpo, train_sao
from occamy.training.exchange import Exchange
from occamy.training.rl_config import CriticConfig, HdpoConfig, SaoConfig
from occamy.training.rl_tasks import plan_tasks

ADAM = OptimiserConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0)
HDPO = HdpoConfig(
    steps=3, mix={"long": 1.0, "short": 1.0}, tasks_per_step=4, group=4, optimiser=ADAM, save_every=2, infra_retries=1
)
SAO = SaoConfig(
    steps=3, batch=6, optimiser=ADAM, critic=CriticConfig(trunk="shared_detached", value_only_steps=1, optimiser=ADAM)
)
ROLLOUT = RolloutConfig(max_new_tokens=12, concurrency=16)


@pytest.fixture(scope="module")
def init(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init")
    shape = Shape()
    save_model(folder, init_weights(shape, 1), shape)
    save_tokenizer(folder)
    weights, tokenizer = weights_digest(folder), tokenizer_digest(folder)
    card = LineageCard(
        name="random", stage="pretrain", root=weights, tokenizer_digest=tokenizer, weights_digest=weights
    )
    write_card(folder, card)
    return folder


def make_release(folder: Path, change: Callable[[int, TaskContract], TaskContract] = lambda _, task: task) -> Path:
    for index in range(6):
        for pool in ("long", "short"):
            task = change(index, write_task(Slot("train", pool, index), SynthesisConfig(), 7))
            path = contract_path(folder, task.meta.task_id)
            path.parent.mkdir(parents=True)
            path.write_bytes(contract_bytes(task))
    seal(folder, KIND)
    return folder


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("release"))


@pytest.fixture
def deep_sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes so deep that the longest path a task may use passes the system's limit of 4,096 bytes."""
    folder = tmp_path
    while len(str(folder)) < 3300:
        folder /= "d" * 200
    folder.mkdir(parents=True)
    monkeypatch.setattr("occamy.rollout.backend._MEMORY_FOLDER", folder)


def unservable(task: TaskContract) -> TaskContract:
    """Deep sandboxes cannot take this workspace: every attempt fails for infrastructure reasons."""
    world = task.world.model_copy(update={"files": {"/".join(["n" * 200] * 5): "x"}})
    return task.model_copy(update={"world": world})


def run(init: Path, release: Path, out: Path, config: HdpoConfig | SaoConfig = HDPO, **overrides: Any) -> LineageCard:
    settings = {"name": "rl", "seed": 5, "recipe_digest": "r", "rollout": ROLLOUT, "harness": load("react")} | overrides
    if isinstance(config, HdpoConfig):
        return train_hdpo(init, release, out, config, **settings)
    return train_sao(init, release, out, config, **settings)


def batches(out: Path) -> list[list[EpisodeRecord]]:
    folders = sorted((out / "trainer" / "exchange" / "batches").glob("[0-9]*"))
    return [read_sealed(folder, "episodes").records for folder in folders]


def test_a_stage_killed_with_all_its_processes_loses_and_repeats_nothing(
    init: Path, release: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import test_training_drive as t\n"
        "t.run(*map(Path, sys.argv[2:5]))"
    )
    out = tmp_path / "out"
    arguments = [str(Path(__file__).parent), str(init), str(release), str(out)]
    driver = subprocess.Popen([sys.executable, "-c", code, *arguments], start_new_session=True)
    first = out / "trainer" / "exchange" / "batches" / "00001"
    deadline = time.monotonic() + 240
    while not first.is_dir() and driver.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    assert first.is_dir() and not (out / "lineage.json").exists()
    before = digest_file(first / "manifest.json")
    seen: list[dict[str, Any]] = []
    card = run(init, release, out, on_progress=seen.append)
    assert digest_file(first / "manifest.json") == before
    assert card == read_card(out) and card.weights_digest == weights_digest(out)
    assert [row["step"] for row in Exchange(out / "trainer" / "exchange").metrics()] == [1, 2, 3]
    assert seen[-1]["step"] == seen[-1]["steps_total"] == 3
    for step, records in enumerate(batches(out), 1):
        assert len({r.episode_id for r in records}) == len(records) == 16
        assert len({r.task_id for r in records}) == 4
        assert all(r.episode_id == f"rl-s{step:05d}-{r.task_id}-{r.trial}" for r in records)
        assert {r.version_max for r in records} | {r.version_min for r in records} == {max(0, step - 2)}
    again: list[dict[str, Any]] = []
    leftovers = [out / "trainer" / "states", out / "trainer" / "exchange" / "weights" / "00003"]
    for folder in leftovers:  # as a kill right after the card was written leaves them
        folder.mkdir(parents=True)
    assert run(init, release, out, on_progress=again.append) == card and again == []
    assert not any(folder.exists() for folder in leftovers)
    with pytest.raises(FileExistsError, match="made from other inputs"):
        run(init, release, out, seed=6)


def test_sao_takes_one_episode_per_task_and_keeps_what_a_killed_driver_had_sampled(
    init: Path, release: Path, tmp_path: Path
) -> None:
    plan = plan_tasks(load_release(release), SAO.mix, tasks=SAO.batch, group=1, name="rl", seed=5)
    session = {"checkpoint": init, "harness": load("react"), "config": ROLLOUT}
    with (
        launch_engine(init) as engine,
        RolloutSession(tmp_path / "trainer" / "rollout", engine_url=engine.url, **session) as before,  # type: ignore[arg-type]
    ):
        half = [result.record for result in before.stream(list(plan.jobs(1))[:3], concurrency=3)]
    card = run(init, release, tmp_path, SAO)
    assert card.stage == "sao" and card.parents == (weights_digest(init),)
    first, *_ = made = batches(tmp_path)
    assert len(half) == 3 and all(record in first for record in half)
    for records in made:
        assert len({r.task_id for r in records}) == len(records) == 6
        assert sorted(r.pool for r in records) == ["long"] * 3 + ["short"] * 3
    rows = Exchange(tmp_path / "trainer" / "exchange").metrics()
    assert [row["admitted"] for row in rows] == [6, 6, 6]
    assert rows[0]["updates"] == 0  # the first step trains the critic alone


def own_engines() -> list[int]:
    """Engine processes of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"occamy.engines.local" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_killed_engine_stops_the_stage_and_leaves_no_thin_batch(init: Path, release: Path, tmp_path: Path) -> None:
    config = SAO.model_copy(update={"steps": 5})
    rollout = ROLLOUT.model_copy(update={"hold_seconds": 1.0, "concurrency": 3})

    def kill(row: dict[str, Any]) -> None:
        for pid in own_engines():
            os.kill(pid, signal.SIGKILL)

    with pytest.raises((EngineError, RolloutStopped), match=r"ended with code -9|nobody listens"):
        run(init, release, tmp_path, config, rollout=rollout, on_progress=kill)
    assert 1 <= len(batches(tmp_path)) < 5
    run(init, release, tmp_path, config, rollout=rollout)
    assert [len(records) for records in batches(tmp_path)] == [6] * 5
    assert {r.outcome for records in batches(tmp_path) for r in records}.isdisjoint({Outcome.infra_failed})


@pytest.mark.usefixtures("deep_sandboxes")
def test_an_always_failing_task_is_retried_a_bounded_number_of_times(init: Path, tmp_path: Path) -> None:
    """R7: its group drops out, the stage goes on."""
    release = make_release(tmp_path / "release", lambda index, task: unservable(task) if index < 3 else task)
    run(init, release, tmp_path / "out", HDPO.model_copy(update={"steps": 3, "tasks_per_step": 4}))
    records = [r for batch in batches(tmp_path / "out") for r in batch]
    failed = [r for r in records if r.outcome is Outcome.infra_failed]
    broken = {r.task_id for r in failed}
    assert len(broken) == 6
    assert len(failed) == len(broken) * 4 * 2  # four trials, one retry each
    assert sum(r.episode_id.endswith(".r1") for r in failed) == len(failed) // 2
    rows = Exchange(tmp_path / "out" / "trainer" / "exchange").metrics()
    assert sum(row["refused_infra_failed"] for row in rows) == len(failed)
    assert sum(row["admitted"] for row in rows) == 6 * 4


@pytest.mark.usefixtures("deep_sandboxes")
def test_a_stage_in_which_nothing_ever_succeeds_gives_up(init: Path, tmp_path: Path) -> None:
    release = make_release(tmp_path / "release", lambda _, task: unservable(task))
    config = HDPO.model_copy(update={"dead_steps": 2, "tasks_per_step": 2, "group": 2})
    with pytest.raises(NothingSucceeds, match="first 2 batches"):
        run(init, release, tmp_path / "out", config)
    with pytest.raises(FileExistsError, match="unfinished work of other inputs"):
        run(init, release, tmp_path / "out", config, seed=6)


def test_a_temperature_other_than_one_is_refused(init: Path, release: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"temperature is 0\.7"):
        run(init, release, tmp_path, rollout=ROLLOUT.model_copy(update={"temperature": 0.7}))
