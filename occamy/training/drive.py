"""Reinforcement learning as other rooms see it: runs engine, rollouts and trainer side by side, resumable at any kill.

The driver samples batch s with exactly the weights of version max(0, s − 1 − max_lag), so a resumed stage samples the
rest of a batch with the weights that its first part had. Imports neither torch nor megatron.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from occamy.contracts.episode import EpisodeRecord, Outcome
from occamy.contracts.lineage import NAME as LINEAGE
from occamy.contracts.lineage import LineageCard, read_card, weights_digest
from occamy.contracts.manifest import write_atomic
from occamy.contracts.record import canonical_json, digest
from occamy.contracts.release import load_release
from occamy.engines.local.launch import launch_engine
from occamy.harness.assignment import Harness
from occamy.rollout.config import RolloutConfig
from occamy.rollout.jobs import EpisodeJob
from occamy.rollout.session import RolloutSession
from occamy.training.exchange import Exchange
from occamy.training.launch import Progress, TrainingFailed, check_ended, started_trainer
from occamy.training.rl_config import HdpoConfig, SaoConfig
from occamy.training.rl_job import RlJob
from occamy.training.rl_tasks import TaskPlan, plan_tasks

POLL_S = 0.02
"""Time between looks at the trainer."""


class NothingSucceeds(RuntimeError):
    """The first batches hold no valid episode: names the last error and the log to read."""


def train_hdpo(
    init: Path,
    release: Path,
    out: Path,
    config: HdpoConfig,
    *,
    name: str,
    seed: int,
    recipe_digest: str,
    rollout: RolloutConfig,
    harness: Harness,
    on_progress: Progress | None = None,
) -> LineageCard:
    """Train checkpoint `init` by HDPO on the training tasks of a sealed `release` and write checkpoint `out`.

    A finished `out` with equal inputs is returned at once; a killed stage resumes: no episode is lost or counted twice.
    `on_progress` gets one dict per trained batch: step, steps_total, reward, success, steps (per episode) and more.
    Raises SealError for a damaged release, FileExistsError when `out` holds a checkpoint of other inputs,
    ExchangeBusy when another process drives this stage, TrainingFailed with the end of the trainer's log,
    NothingSucceeds, and RolloutStopped when the engine keeps failing.
    """
    job, plan = _prepare("hdpo", init, release, out, config, name, seed, recipe_digest, rollout, harness)
    return _run(job, plan, rollout, harness, on_progress)


def train_sao(
    init: Path,
    release: Path,
    out: Path,
    config: SaoConfig,
    *,
    name: str,
    seed: int,
    recipe_digest: str,
    rollout: RolloutConfig,
    harness: Harness,
    on_progress: Progress | None = None,
) -> LineageCard:
    """Train checkpoint `init` by SAO: one episode per task and a critic. Everything else as `train_hdpo`."""
    job, plan = _prepare("sao", init, release, out, config, name, seed, recipe_digest, rollout, harness)
    return _run(job, plan, rollout, harness, on_progress)


def _prepare(
    algorithm: str,
    init: Path,
    release: Path,
    out: Path,
    config: HdpoConfig | SaoConfig,
    name: str,
    seed: int,
    recipe_digest: str,
    rollout: RolloutConfig,
    harness: Harness,
) -> tuple[RlJob, TaskPlan]:
    if rollout.temperature != 1.0:
        raise ValueError(
            f"rollout.temperature is {rollout.temperature}: the recorded log-probs would not be those of the policy "
            "that trains; set it to 1.0"
        )
    loaded = load_release(release)
    settings = rollout.model_dump(mode="json", exclude={"concurrency", "engine_threads", "sandbox"})
    job = RlJob.model_validate(
        {
            "algorithm": algorithm,
            "init": init.resolve(),
            "out": out.resolve(),
            "config": config,
            "name": name,
            "seed": seed,
            "recipe_digest": recipe_digest,
            "init_digest": weights_digest(init),
            "release_digest": loaded.manifest.digest(),
            "rollout_digest": digest({"harness": harness.digest, "settings": settings}),
        }
    )
    tasks, group = (config.tasks_per_step, config.group) if isinstance(config, HdpoConfig) else (config.batch, 1)
    return job, plan_tasks(loaded, config.mix, tasks=tasks, group=group, name=name, seed=seed)


def _run(
    job: RlJob, plan: TaskPlan, rollout: RolloutConfig, harness: Harness, on_progress: Progress | None
) -> LineageCard:
    if (job.out / LINEAGE).is_file():
        return _finished(job)
    exchange = Exchange(job.exchange)
    with exchange.held("driver") as token:
        exchange.clear_stop()
        _check_identity(job)
        with _trainer(job, token) as trainer:
            driver = _Driver(job, plan, rollout, exchange, trainer, on_progress)
            if driver.next_step <= job.config.steps:
                driver.sample_rest(harness)
            driver.wait_for_end()
    _tidy(job)
    return read_card(job.out)


def _tidy(job: RlJob) -> None:
    """Remove what only an unfinished stage needs; a kill right after its card was written leaves all of it."""
    for folder in (job.exchange / "weights", job.workplace / "states"):
        shutil.rmtree(folder, ignore_errors=True)


def _finished(job: RlJob) -> LineageCard:
    card = read_card(job.out)
    if card.facts.get("job") != job.identity:
        raise FileExistsError(
            f"{job.out} holds checkpoint {card.name!r} (stage {card.stage}, seed {card.seed}) made from other inputs; "
            "choose another folder or remove it"
        )
    if weights_digest(job.out) != card.weights_digest:
        raise FileExistsError(f"{job.out}: model.safetensors is not what its lineage card says; remove the folder")
    _tidy(job)
    return card


def _check_identity(job: RlJob) -> None:
    """Batches of other inputs must not be trained on."""
    path = job.workplace / "identity"
    if path.is_file() and path.read_text() != job.identity:
        raise FileExistsError(
            f"{job.workplace} holds the unfinished work of other inputs ({path.read_text()[:15]}, now "
            f"{job.identity[:15]}); choose another folder or remove it"
        )
    write_atomic(path, job.identity.encode())


@contextmanager
def _trainer(job: RlJob, token: str) -> Iterator[subprocess.Popen[bytes]]:
    spec = job.workplace / "spec.json"
    write_atomic(spec, canonical_json(job.model_copy(update={"driver": token})))
    processes, threads = job.config.processes, job.config.threads
    with started_trainer(spec, log=job.log, processes=processes, threads=threads) as trainer:
        yield trainer


@dataclass
class _Driver:
    """Feeds one trainer with batches."""

    job: RlJob
    plan: TaskPlan
    rollout: RolloutConfig
    exchange: Exchange
    trainer: subprocess.Popen[bytes]
    on_progress: Progress | None
    _reported: int = 0
    """Metrics lines handed on."""
    _seen: int = -1
    """Size of the metrics at the last look: parsing all of them at every result would cost more each step."""
    _barren: int = 0
    """Batches without a valid episode before the first that has one."""
    _fruitful: bool = False
    """Whether there ever was a valid episode."""

    def __post_init__(self) -> None:
        trained = self.exchange.metrics()
        self._reported = len(trained)
        self._fruitful = any(row["admitted"] for row in trained)

    @property
    def next_step(self) -> int:
        """First batch that is not there yet."""
        step = 1
        while self.exchange.batch(step) is not None:
            step += 1
        return step

    def sample_rest(self, harness: Harness) -> None:
        """Sample every batch that is not there yet, each with the weights that it is due."""
        rollout, init = self.rollout, self.job.init
        log = self.job.workplace / "engine.log"
        with (
            launch_engine(init, max_running=rollout.concurrency, threads=rollout.engine_threads, log=log) as engine,
            RolloutSession(
                self.job.rollout, checkpoint=init, engine_url=engine.url, harness=harness, config=rollout
            ) as session,
        ):
            served = 0
            for step in range(self.next_step, self.job.config.steps + 1):
                version = max(0, step - 1 - self.job.config.max_lag)
                began = time.monotonic()
                if version != served:
                    session.update_weights(self._weights(version), version)
                    served = version
                self._sample(session, step, version, time.monotonic() - began)

    def wait_for_end(self) -> None:
        """Wait until the trainer has written the checkpoint and ended."""
        while self.trainer.poll() is None:
            self._report()
            time.sleep(POLL_S)
        check_ended(self.trainer, self.job.log)
        self._report()
        if not (self.job.out / LINEAGE).is_file():
            raise TrainingFailed(f"trainer ended without writing {self.job.out / LINEAGE}; read {self.job.log}")

    def _weights(self, version: int) -> Path:
        while (weights := self.exchange.weights(version)) is None:
            self._check_trainer()
            self._report()
            time.sleep(POLL_S)
        return weights

    def _sample(self, session: RolloutSession, step: int, version: int, waited: float) -> None:
        began = time.monotonic()
        records: list[EpisodeRecord] = []
        due: list[tuple[EpisodeJob, int]] = [(job, 0) for job in self.plan.jobs(step)]
        while due:
            attempts = {job.episode_id: (job, attempt) for job, attempt in due}
            due = []
            for result in session.stream((job for job, _ in attempts.values()), self.rollout.concurrency):
                self._check_trainer()
                self._report()
                records.append(result.record)
                job, attempt = attempts[result.record.episode_id]
                if result.record.outcome is Outcome.infra_failed and attempt < self.job.config.infra_retries:
                    due.append((self._again(job, attempt + 1), attempt + 1))
        if any(r.outcome is Outcome.infra_failed for r in records):
            session.check_engine()  # what a dead engine left is sampled again on resume, not sealed
        facts = {
            "step": step,
            "version": version,
            "rollout_seconds": time.monotonic() - began,
            "rollout_waited_seconds": waited,
            "rollout_output_tokens": sum(r.output_tokens for r in records),
        }
        parents = {"tasks": self.job.release_digest}
        episodes = [session.recorded(r.episode_id) for r in records]
        self.exchange.publish_batch(
            step, lambda out: session.seal_into(out, episodes, kind="episodes", parents=parents, facts=facts)
        )
        self._watch(records)

    def _again(self, job: EpisodeJob, attempt: int) -> EpisodeJob:
        """A fresh attempt: its id tells that it is one, and its seed follows the id."""
        first = job.episode_id.removesuffix(f".r{attempt - 1}")
        return self.plan.job(f"{first}.r{attempt}", job.task, job.trial)

    def _watch(self, records: list[EpisodeRecord]) -> None:
        """Give up when nothing ever succeeds; a batch without valid episodes is otherwise just an idle step."""
        self._fruitful = self._fruitful or any(r.quarantine is None for r in records)
        self._barren += 0 if self._fruitful else 1
        if self._barren >= self.job.config.dead_steps:
            error = next((r.error for r in records if r.error), "none noted")
            raise NothingSucceeds(
                f"{self.job.name}: no valid episode in the first {self._barren} batches, last error: {error}; read "
                f"{self.job.workplace / 'engine.log'}"
            )

    def _check_trainer(self) -> None:
        if self.trainer.poll() is not None:
            check_ended(self.trainer, self.job.log)
            raise TrainingFailed(f"trainer ended before its last batch; read {self.job.log}")

    def _report(self) -> None:
        if self.on_progress is None or (size := self.exchange.metrics_size()) == self._seen:
            return
        self._seen = size
        for row in self.exchange.metrics()[self._reported :]:
            self._reported += 1
            self.on_progress(row)
