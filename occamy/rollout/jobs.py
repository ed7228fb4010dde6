"""What is to be run: one job per attempt at a task, with a seed of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from occamy.contracts.record import digest
from occamy.contracts.task import TaskContract


@dataclass(frozen=True)
class EpisodeJob:
    """One attempt to be made."""

    episode_id: str
    """Unique in its session; letters, digits, ``.``, ``_`` and ``-``."""
    task: TaskContract
    trial: int
    """Which attempt at the task, from 0."""
    seed: int
    """Seed of sampling."""
    sampled_by: Literal["policy", "teacher"]
    temperature: float
    model: str
    """Name of what samples, for the record."""

    def digest(self) -> str:
        """Identity of the attempt: two jobs of one id must agree in it."""
        parts = (self.task.digest(), self.trial, self.seed, self.sampled_by, self.temperature, self.model)
        return digest([self.episode_id, *parts])


def make_jobs(
    tasks: Iterable[TaskContract],
    *,
    trials: int,
    seed: int,
    sampled_by: Literal["policy", "teacher"],
    temperature: float,
    model: str,
) -> Iterator[EpisodeJob]:
    """`trials` jobs per task, trial by trial within a task. Ids are ``<task>.<trial>``."""
    for task in tasks:
        for trial in range(trials):
            yield EpisodeJob(
                episode_id=f"{task.meta.task_id}.{trial}",
                task=task,
                trial=trial,
                seed=derive_seed(seed, task.meta.task_id, trial),
                sampled_by=sampled_by,
                temperature=temperature,
                model=model,
            )


def derive_seed(*parts: int | str) -> int:
    """A 31-bit seed from a run's seed and names, equal on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
