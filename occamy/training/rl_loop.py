"""Reinforcement learning inside a trainer process: wait for batch k, train on it, publish weights k, again.

Everything a step does is a function of the trainer state, the durable batch and the seed, so a killed worker that
resumes from an older state replays the batches to the same weights.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from occamy.capture.sealed import read_sealed
from occamy.contracts.manifest import NAME as MANIFEST
from occamy.contracts.record import digest, digest_file
from occamy.training.checkpoint import StateStore, derive_card
from occamy.training.critic import Critic, SeparateCritic, SharedDetachedCritic
from occamy.training.device import Place
from occamy.training.exchange import Exchange
from occamy.training.hdpo import Hdpo
from occamy.training.learner import Learner
from occamy.training.model import PolicyModel, export_hf, load_hf, start_parallel
from occamy.training.rl_batch import admit_batch, batch_metrics
from occamy.training.rl_config import HdpoConfig, SaoConfig
from occamy.training.rl_job import RlJob
from occamy.training.rl_policy import Algorithm, improve
from occamy.training.sao import Sao

logger = logging.getLogger(__name__)

POLL_S = 0.01
"""Time between looks at the exchange."""
LIVENESS_S = 0.5
"""Time between looks at the driver's lock."""
TAKEOVER_S = 60.0
"""How long a new worker waits for an older one, orphaned by a killed driver, to notice and end."""
SEGMENTS_WARNING = 2.0
"""Mean segments per episode above which one broadcast reward has hurt elsewhere."""


def train(spec: dict[str, Any], place: Place) -> None:
    """Train batch after batch until the stage's last one, or until the driver stops or dies."""
    job = RlJob.model_validate(spec)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    start_parallel(job.seed)
    exchange = Exchange(job.exchange)
    with ExitStack() as held:
        if place.leader:
            asked = time.monotonic()
            held.enter_context(exchange.held("worker", wait_s=TAKEOVER_S))
            logger.info("took the exchange over after %.1f s", time.monotonic() - asked)
        torch.distributed.barrier()
        trainer = RlTrainer(job, place, exchange)
        while trainer.step < job.config.steps:
            batch = _agree(wait_for_batch(exchange, trainer.step + 1, job.driver) if place.leader else None, place)
            if batch is None:
                return
            trainer.advance(batch)
        if place.leader:
            trainer.finish()


def wait_for_batch(exchange: Exchange, step: int, driver: str) -> Path | None:
    """Wait for the batch of `step`. None when the driver asked to stop or no longer holds the exchange."""
    looked = time.monotonic()
    while (batch := exchange.batch(step)) is None:
        if exchange.stop_requested():
            return None
        if time.monotonic() - looked > LIVENESS_S:
            if not exchange.holder_alive("driver", driver):
                logger.warning("driver %s no longer holds %s; ending", driver, exchange.folder)
                return None
            looked = time.monotonic()
        time.sleep(POLL_S)
    return batch


class RlTrainer:
    """Policy, optimiser and algorithm of one stage; `step` batches are behind it."""

    def __init__(self, job: RlJob, place: Place, exchange: Exchange) -> None:
        """Build everything and resume from the newest trainer state of this job, if there is one."""
        self._job, self._place, self._exchange, config = job, place, exchange, job.config
        policy = load_hf(job.init, aux_loss_coefficient=config.aux_loss_coefficient)
        self._learner = Learner(policy, config.optimiser, policy_updates(config))
        self._algorithm = _algorithm(job, policy, place)
        self._states = StateStore(job.workplace / "states", job.identity)
        self.step = 0
        if place.leader:
            self._states.discard_foreign()
        torch.distributed.barrier()
        if state := self._states.restore(place.device):
            self.step = int(state["step"])
            self._learner.load_state_dict(state["learner"])
            self._algorithm.load_state_dict(state["algorithm"])
            logger.info("resumed after step %d", self.step)

    def advance(self, folder: Path) -> dict[str, Any]:
        """Train on the next batch, publish its weights and metrics, and save the trainer state when it is due."""
        began, step = time.monotonic(), self.step + 1
        metrics = self._train(folder, step)
        trained = time.monotonic()
        if self._place.leader:
            policy, init = self._learner.model, self._job.init
            self._exchange.publish_weights(step, lambda out: export_hf(policy, init, out))
            self._exchange.prune_weights(keep=self._job.config.max_lag + 2)
            seconds = {"train_seconds": trained - began, "publish_seconds": time.monotonic() - trained}
            self._exchange.append_metrics(step, metrics | seconds)
        self.step = step
        if self._place.leader and (step % self._job.config.save_every == 0 or step == self._job.config.steps):
            states = {"learner": self._learner.state_dict(), "algorithm": self._algorithm.state_dict()}
            self._states.save(step, {"step": step} | states)
        return metrics

    def finish(self) -> None:
        """Write the stage's checkpoint, its card last, and drop the trainer states."""
        job = self._job
        export_hf(self._learner.model, job.init, job.out)
        batches = [self._exchange.batch(step) for step in range(1, self.step + 1)]
        rows = self._exchange.metrics()
        sums = ("episodes", "admitted", "tokens")
        derive_card(
            job.init,
            job.out,
            name=job.name,
            stage=job.algorithm,
            data={"tasks": job.release_digest, "episodes": digest([digest_file(b / MANIFEST) for b in batches if b])},
            recipe_digest=job.recipe_digest,
            seed=job.seed,
            facts={"job": job.identity, "config": job.config.model_dump(mode="json"), "steps": self.step}
            | {name: sum(row[name] for row in rows) for name in sums},
        )
        self._states.clear()

    def _train(self, folder: Path, step: int) -> dict[str, Any]:
        config, version = self._job.config, step - 1
        sealed = read_sealed(folder, "episodes")
        batch = admit_batch(
            sealed.records,
            sealed.segments,
            version=version,
            max_staleness=config.max_staleness,
            max_length=config.pack_tokens,
        )
        metrics = batch_metrics(sealed.records, batch, version) | {"steps_total": config.steps}
        if metrics.get("segments", 0.0) > SEGMENTS_WARNING:
            logger.warning("step %d: %.2f segments per episode share one reward", step, metrics["segments"])
        rng = np.random.default_rng([self._job.seed, step])
        try:
            rows, figures = self._algorithm.rows(batch, step)
            figures |= improve(self._learner, self._algorithm, rows, config, self._place, rng)
        except FloatingPointError as e:
            raise ValueError(f"step {step}, batch {folder}: {e}") from e
        for name, value in figures.items():
            if not math.isfinite(value):
                raise ValueError(f"step {step}: {name} is {value}; lower lr {config.optimiser.lr} or check {folder}")
        return metrics | figures | _rollout_facts(sealed.manifest.facts)


def policy_updates(config: HdpoConfig | SaoConfig) -> int:
    """Optimiser steps that the policy's schedule is laid out for."""
    idle = config.critic.value_only_steps if isinstance(config, SaoConfig) else 0
    return max(1, config.steps - idle) * config.minibatches


def _algorithm(job: RlJob, policy: PolicyModel, place: Place) -> Algorithm:
    config = job.config
    if isinstance(config, HdpoConfig):
        return Hdpo(config)
    critic: Critic
    if config.critic.trunk == "separate":
        critic = SeparateCritic(load_hf(job.init), config.critic, config.steps)
    else:
        critic = SharedDetachedCritic(policy, config.critic, config.steps, seed=job.seed)
    return Sao(config, policy, critic, place)


def _rollout_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Figures that the driver noted while it sampled the batch."""
    return {name: value for name, value in facts.items() if name.startswith("rollout_")}


def _agree(batch: Path | None, place: Place) -> Path | None:
    """All ranks go by what the leader saw."""
    if place.world == 1:
        return batch
    seen: list[Path | None] = [batch]
    torch.distributed.broadcast_object_list(seen, src=0)
    return seen[0]
