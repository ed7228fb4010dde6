"""The trainer side of RL: real model, real batches on disk, real worker processes; no engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from occamy.capture.sealed import write_sealed
from occamy.contracts.episode import EpisodeRecord, Outcome, QuarantineReason, Segment
from occamy.contracts.lineage import read_card, weights_digest
from occamy.contracts.manifest import write_atomic
from occamy.contracts.record import canonical_json
from occamy.training.config import OptimiserConfig
from occamy.training.exchange import Exchange
from occamy.training.launch import check_ended, started_trainer
from occamy.training.rl_config import CriticConfig, GateConfig, HdpoConfig, SaoConfig
from occamy.training.rl_job import RlJob

ADAM = OptimiserConfig(lr=2e-2, min_lr=1e-2, warmup_steps=1)
HEAD = CriticConfig(
    trunk="shared_detached", value_only_steps=1, updates=4, minibatch_tokens=64, optimiser=ADAM, head_width=16
)
OWN = CriticConfig(value_only_steps=1, updates=2, optimiser=OptimiserConfig(lr=5e-3, min_lr=5e-3, warmup_steps=0))
COMMON: dict[str, Any] = {"steps": 5, "optimiser": ADAM, "save_every": 2, "pack_tokens": 128}
CONFIGS = {
    "hdpo": HdpoConfig(**COMMON, aux_loss_coefficient=1e-3),
    "sao-own": SaoConfig(**COMMON, critic=OWN),
    "sao-head": SaoConfig(
        **COMMON,
        critic=HEAD,
        minibatches=2,
        normalise_advantages=True,
        lambda_fixed=1.0,
        aux_loss_coefficient=1e-3,
        gate=GateConfig(low=0.9, high=9.0),
    ),
}
GOOD = 16
"""Token ids below this one are rewarded."""


@pytest.fixture(scope="module")
def base(trainer: Any, make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("qwen3_moe", tie_word_embeddings=True)


def make_job(base: Path, out: Path, config: HdpoConfig | SaoConfig, **overrides: Any) -> RlJob:
    values = {"name": "rl", "seed": 3, "recipe_digest": "r", "init_digest": "i", "release_digest": "t"}
    algorithm = "hdpo" if isinstance(config, HdpoConfig) else "sao"
    extra = {"algorithm": algorithm, "rollout_digest": "h", "init": base, "out": out, "config": config}
    return RlJob.model_validate(values | extra | overrides)


@pytest.fixture(scope="module")
def batch_of(make_record: Callable[..., EpisodeRecord]) -> Callable[..., Callable[[Path], object]]:
    """Writer of a batch of prompt, answer, observation, answer; reward is the share of answers below GOOD.

    `answers` [episodes, 2], `logprobs` [episodes, 2]; groups of four episodes share a task and its prompt.
    """

    def make(
        step: int, answers: np.ndarray, logprobs: np.ndarray, version: int, **facts: Any
    ) -> Callable[[Path], object]:
        records, segments = [], []
        for i, (chosen, behaviour) in enumerate(zip(answers, logprobs, strict=True)):
            name, reward = f"s{step:05d}-{i:03d}", float((chosen < GOOD).mean())
            values = {"task_id": f"t{i // 4:02d}", "reward": reward, "success": reward == 1, "steps": 2 + i % 3}
            sampled = {"sampled_by": "policy", "version_min": version, "version_max": version}
            records.append(make_record(name, **values | sampled | facts))
            mask = np.array([0, 0, 1, 0, 1], bool)
            tokens = np.array([*prompt(i), chosen[0], 63, chosen[1]], np.int32)
            spread = np.zeros(5, np.float32)
            spread[mask] = behaviour
            versions = np.where(mask, version, -1).astype(np.int32)
            segments.append(
                Segment(name, "root", 0, "end", "policy", tokens, mask, spread, versions, mask.astype("i1"))
            )
        return lambda folder: write_sealed(folder, records, segments, kind="episodes", parents={}, facts={})

    return make


def prompt(i: int) -> tuple[int, int]:
    return 30 + i // 4, 50


@pytest.fixture
def fixed_batches(batch_of: Callable[..., Any]) -> Callable[[Exchange], None]:
    """Publish five batches of made-up answers."""

    def publish(exchange: Exchange) -> None:
        for step in range(1, 6):
            rng = np.random.default_rng(step)
            answers = rng.integers(0, 32, (16, 2))
            logprobs = rng.normal(-4, 0.3, (16, 2)).astype(np.float32)
            exchange.publish_batch(step, batch_of(step, answers, logprobs, max(0, step - 2)))

    return publish


def trained(job: RlJob, place: Any, publish: Callable[[Exchange], None], until: int = 5) -> Exchange:
    from occamy.training.rl_loop import RlTrainer

    exchange = Exchange(job.exchange)
    publish(exchange)
    loop = RlTrainer(job, place, exchange)
    for step in range(loop.step + 1, until + 1):
        batch = exchange.batch(step)
        assert batch is not None
        loop.advance(batch)
    if until == job.config.steps:
        loop.finish()
    return exchange


@pytest.mark.parametrize("name", CONFIGS)
def test_a_resumed_trainer_replays_the_batches_to_the_same_weights(
    name: str, trainer: Any, base: Path, fixed_batches: Callable[[Exchange], None], tmp_path: Path
) -> None:
    whole, cut = (make_job(base, tmp_path / kind, CONFIGS[name]) for kind in ("whole", "cut"))
    straight = trained(whole, trainer, fixed_batches)
    interrupted = trained(cut, trainer, fixed_batches, until=3)  # its newest state is that of step 2
    trained(cut, trainer, fixed_batches)
    assert weights_digest(cut.out) == weights_digest(whole.out) != weights_digest(base)
    timeless = [
        [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in exchange.metrics()]
        for exchange in (straight, interrupted)
    ]
    assert timeless[0] == timeless[1]
    assert [row["step"] for row in timeless[0]] == [1, 2, 3, 4, 5]
    assert read_card(whole.out).facts["tokens"] == 5 * 16 * 2
    assert sorted(p.name for p in (whole.exchange / "weights").iterdir()) == ["00003", "00004", "00005"]


def test_another_seed_does_not_continue_from_this_ones_states(
    trainer: Any, base: Path, fixed_batches: Callable[[Exchange], None], tmp_path: Path
) -> None:
    from occamy.training.rl_loop import RlTrainer

    trained(make_job(base, tmp_path, CONFIGS["sao-head"]), trainer, fixed_batches, until=2)
    other = make_job(base, tmp_path, CONFIGS["sao-head"], seed=4)
    assert RlTrainer(other, trainer, Exchange(other.exchange)).step == 0


def sampled(exchange: Exchange, base: Path, step: int, batch_of: Callable[..., Any]) -> Callable[[Path], object]:
    """A batch that the newest weights really sampled, 64 episodes of 16 tasks."""
    import torch

    from occamy.training.model import load_hf
    from occamy.training.packing import pack
    from occamy.training.views import TrainingSequence

    policy = load_hf(exchange.weights(step - 1) or base)
    generator = torch.Generator().manual_seed(step)
    rows = [list(prompt(i)) for i in range(64)]
    answers, logprobs = np.zeros((64, 2), int), np.zeros((64, 2), np.float32)
    for turn in range(2):
        blank = np.zeros(len(rows[0]) + 1)
        mask = np.arange(len(blank)) == len(rows[0])
        sequences = [
            TrainingSequence(np.array([*row, 0], np.int32), mask, blank, blank, "", "", 0, 1, 1, 0, 0.0, False, 1)
            for row in rows
        ]
        with torch.no_grad():
            log_p = torch.log_softmax(policy.logits(pack(sequences)), -1)
        chosen = torch.multinomial(log_p.exp(), 1, generator=generator)
        answers[:, turn], logprobs[:, turn] = chosen[:, 0].numpy(), log_p.gather(1, chosen)[:, 0].numpy()
        rows = [[*row, int(c), 63] for row, c in zip(rows, answers[:, turn], strict=True)]
    return batch_of(step, answers, logprobs, step - 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_reward_rises_on_a_bandit(
    name: str, trainer: Any, base: Path, batch_of: Callable[..., Any], tmp_path: Path
) -> None:
    from occamy.training.rl_loop import RlTrainer

    job = make_job(base, tmp_path, CONFIGS[name].model_copy(update={"steps": 10, "max_lag": 0}))
    exchange = Exchange(job.exchange)
    loop = RlTrainer(job, trainer, exchange)
    for step in range(1, 11):
        loop.advance(exchange.publish_batch(step, sampled(exchange, base, step, batch_of)))
    rows = exchange.metrics()
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.25
    assert [row["staleness"] for row in rows] == [0] * 10
    first = next(row for row in rows if row["updates"])
    if job.config.minibatches == 1:
        assert abs(first["kl"]) < 1e-6 and first["cut"] == 0  # on policy: the sampler's log-probs are the trainer's
    assert first["updates"] == job.config.minibatches


def test_value_only_steps_leave_the_policy_and_teach_the_critic(
    trainer: Any, base: Path, fixed_batches: Callable[[Exchange], None], tmp_path: Path
) -> None:
    config = CONFIGS["sao-own"].model_copy(update={"critic": OWN.model_copy(update={"value_only_steps": 4})})
    exchange = trained(make_job(base, tmp_path, config), trainer, fixed_batches, until=4)
    rows = exchange.metrics()
    assert [row["updates"] for row in rows] == [0, 0, 0, 0]
    assert rows[-1]["loss_critic"] < rows[0]["loss_critic"]
    assert rows[0]["value_mean"] == 0  # the head starts at zero
    for version in (2, 3, 4):
        assert weights_digest(exchange.weights(version) or base) == weights_digest(base)


def test_a_batch_without_valid_episodes_is_an_idle_step(
    trainer: Any, base: Path, batch_of: Callable[..., Any], tmp_path: Path
) -> None:
    from occamy.training.rl_loop import RlTrainer

    facts = {"quarantine": QuarantineReason.infra_failed, "outcome": Outcome.infra_failed}
    for name, config in CONFIGS.items():
        job = make_job(base, tmp_path / name, config)
        exchange = Exchange(job.exchange)
        empty = batch_of(1, np.zeros((4, 2), int), np.zeros((4, 2)), 0, **facts)
        row = RlTrainer(job, trainer, exchange).advance(exchange.publish_batch(1, empty))
        assert (row["admitted"], row["infra_failed_rate"], row["updates"]) == (0, 1, 0)
        assert not {"reward", "success", "steps", "segments", "staleness"} & row.keys()  # nothing was scored: not zero
        assert weights_digest(exchange.weights(1) or tmp_path) == weights_digest(base)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_loss_that_is_not_finite_stops_at_its_step_and_publishes_nothing(
    name: str, trainer: Any, base: Path, fixed_batches: Callable[[Exchange], None], batch_of: Any, tmp_path: Path
) -> None:
    from occamy.training.rl_loop import RlTrainer

    job = make_job(base, tmp_path, CONFIGS[name].model_copy(update={"save_every": 1}))
    exchange = Exchange(job.exchange)
    loop = RlTrainer(job, trainer, exchange)
    answers, logprobs = np.arange(16).reshape(8, 2) * 2, np.full((8, 2), -4.0, np.float32)
    loop.advance(exchange.publish_batch(1, batch_of(1, answers, logprobs, 0)))
    logprobs[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"step 2"):
        loop.advance(exchange.publish_batch(2, batch_of(2, answers, logprobs, 1)))
    assert exchange.weights(2) is None and [row["step"] for row in exchange.metrics()] == [1]
    assert RlTrainer(job, trainer, exchange).step == 1  # the state of the good step is what a new run starts from


def test_worker_stops_waiting_when_asked_or_when_its_driver_is_gone(trainer: Any, tmp_path: Path) -> None:
    from occamy.training.rl_loop import wait_for_batch

    exchange = Exchange(tmp_path)
    assert wait_for_batch(exchange, 1, "no such driver") is None
    with exchange.held("driver") as token:
        exchange.request_stop("enough")
        assert wait_for_batch(exchange, 1, token) is None
        assert exchange.publish_batch(1, lambda _: None) == wait_for_batch(exchange, 1, token)


def run_worker(job: RlJob, kill_after: int | None = None) -> None:
    """Run a real trainer process on the job; kill it once `kill_after` steps are in the metrics."""
    exchange = Exchange(job.exchange)
    with exchange.held("driver") as token:
        spec = job.workplace / "spec.json"
        write_atomic(spec, canonical_json(job.model_copy(update={"driver": token})))
        with started_trainer(spec, log=job.log, processes=job.config.processes) as process:
            while process.poll() is None:
                if kill_after is not None and len(exchange.metrics()) >= kill_after:
                    os.kill(process.pid, signal.SIGKILL)
                    process.wait()
                    return
                time.sleep(0.005)
        check_ended(process, job.log)


def test_a_killed_worker_process_ends_at_the_weights_of_one_that_lived(
    trainer: Any, base: Path, fixed_batches: Callable[[Exchange], None], tmp_path: Path
) -> None:
    config = CONFIGS["sao-head"]
    lived, killed = make_job(base, tmp_path / "lived", config), make_job(base, tmp_path / "killed", config)
    trained(lived, trainer, fixed_batches)
    fixed_batches(Exchange(killed.exchange))
    run_worker(killed, kill_after=3)
    assert not (killed.out / "lineage.json").exists()
    run_worker(killed)
    assert read_card(killed.out) == read_card(lived.out)
    assert [row["step"] for row in Exchange(killed.exchange).metrics()] == [1, 2, 3, 4, 5]


def test_two_ranks_train_as_one(
    trainer: Any, base: Path, fixed_batches: Callable[[Exchange], None], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    config = CONFIGS["sao-own"].model_copy(update={"pack_tokens": 20})
    alone = make_job(base, tmp_path / "one", config)
    pair = make_job(base, tmp_path / "two", config.model_copy(update={"processes": 2}))
    trained(alone, trainer, fixed_batches)
    fixed_batches(Exchange(pair.exchange))
    run_worker(pair)
    one, two = (load_file(job.out / "model.safetensors") for job in (alone, pair))
    assert max(float(np.abs(one[name] - two[name]).max()) for name in one) < 2e-4
    assert Exchange(pair.exchange).metrics()[-1]["tokens_scored"] == 32
