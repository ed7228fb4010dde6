"""Which tasks a batch is sampled from: a pure function of the release, the mix, the step and the seed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np

from occamy.contracts.release import Release
from occamy.contracts.task import Pool, TaskContract
from occamy.rollout.jobs import EpisodeJob, derive_seed


@dataclass(frozen=True)
class TaskPlan:
    """Batches of one stage."""

    tasks: Mapping[Pool, Sequence[TaskContract]]
    """Training tasks of each pool in the mix, in order of task id."""
    counts: Mapping[Pool, int]
    """Tasks of each pool in one batch."""
    group: int
    """Episodes per task."""
    name: str
    """Prefix of episode ids and name of the policy in the records."""
    seed: int

    def batch(self, step: int) -> list[TaskContract]:
        """Tasks of batch `step` (from 1), pools interleaved. Every pool is gone through in a new order each time."""
        columns = [self._from_pool(pool, step) for pool in self.counts]
        return [task for task in chain.from_iterable(zip_longest(*columns)) if task is not None]

    def jobs(self, step: int) -> Iterator[EpisodeJob]:
        """Attempts of batch `step`, group by group. A task drawn twice in one batch gets further trials."""
        drawn: dict[str, int] = {}
        for task in self.batch(step):
            task_id = task.meta.task_id
            first = drawn.get(task_id, 0)
            drawn[task_id] = first + self.group
            for trial in range(first, first + self.group):
                yield self.job(f"{self.name}-s{step:05d}-{task_id}-{trial}", task, trial)

    def job(self, episode_id: str, task: TaskContract, trial: int) -> EpisodeJob:
        """One attempt by the policy at temperature 1: the behaviour log-probs are those of the policy itself."""
        return EpisodeJob(
            episode_id=episode_id,
            task=task,
            trial=trial,
            seed=derive_seed(self.seed, episode_id),
            sampled_by="policy",
            temperature=1.0,
            model=self.name,
        )

    def _from_pool(self, pool: Pool, step: int) -> list[TaskContract]:
        tasks, n = self.tasks[pool], self.counts[pool]
        chosen = []
        for position in range((step - 1) * n, step * n):
            epoch, index = divmod(position, len(tasks))
            order = np.random.default_rng([self.seed, zlib.crc32(pool.encode()), epoch]).permutation(len(tasks))
            chosen.append(tasks[order[index]])
        return chosen


def plan_tasks(
    release: Release, mix: Mapping[Pool, float], *, tasks: int, group: int, name: str, seed: int
) -> TaskPlan:
    """Lay out batches of `tasks` training tasks, shared over the pools as `mix` says.

    Raises ValueError when a pool of the mix has no training task in the release, or gets none in a batch.
    """
    by_pool = {pool: release.select(pool=pool, split="train") for pool in mix}
    if empty := [pool for pool, found in by_pool.items() if not found]:
        raise ValueError(f"mix draws from pool {empty[0]!r}, of which the release holds no training task; change mix")
    return TaskPlan(by_pool, share_out(mix, tasks), group, name, seed)


def share_out(mix: Mapping[Pool, float], n: int) -> dict[Pool, int]:
    """Split n by shares (largest remainders, first named wins a tie). Raises ValueError when a pool would get none."""
    total = sum(mix.values())
    exact = {pool: n * share / total for pool, share in mix.items()}
    counts = {pool: int(x) for pool, x in exact.items()}
    for pool in sorted(mix, key=lambda p: counts[p] - exact[p])[: n - sum(counts.values())]:
        counts[pool] += 1
    if none := [pool for pool, count in counts.items() if count == 0]:
        raise ValueError(f"mix {dict(mix)} leaves no task of pool {none[0]!r} in a batch of {n}; raise its share")
    return counts
