from __future__ import annotations

from collections import Counter

import pytest

from occamy.contracts.manifest import Manifest
from occamy.contracts.release import Release
from occamy.contracts.task import Budget, FieldEquals, Grading, Metadata, Pool, Split, TaskContract, WorldSpec
from occamy.training.rl_tasks import plan_tasks, share_out


def task(task_id: str, pool: Pool, split: Split = "train") -> TaskContract:
    return TaskContract(
        request="do it",
        world=WorldSpec(services={}, records={}),
        tools=(),
        grading=Grading(goals=(FieldEquals(service="crm", id="A01", field="tier", value="gold"),)),
        meta=Metadata(
            task_id=task_id,
            pool=pool,
            split=split,
            route="environment_first",
            capabilities=(),
            templates=(),
            seed=0,
            budget=Budget(turns=1, tool_calls=1, tokens=1),
        ),
    )


RELEASE = Release(
    [task(f"long-{i}", "long") for i in range(5)]
    + [task(f"short-{i}", "short") for i in range(3)]
    + [task("hidden", "long", "test")],
    Manifest(kind="task_release", files={}),
)


def ids(step: int, **overrides: int) -> list[str]:
    settings = {"tasks": 4, "group": 2, "seed": 1} | overrides
    plan = plan_tasks(RELEASE, {"long": 3.0, "short": 1.0}, name="m", **settings)  # type: ignore[arg-type]
    return [job.episode_id for job in plan.jobs(step)]


def test_batches_depend_on_step_and_seed_alone() -> None:
    assert ids(2) == ids(2)
    assert ids(1) != ids(2)
    assert ids(1) != ids(1, seed=2)


def test_groups_have_distinct_ids_and_seeds() -> None:
    plan = plan_tasks(RELEASE, {"long": 1.0}, tasks=2, group=3, name="m", seed=1)
    jobs = list(plan.jobs(7))
    first = jobs[0].task.meta.task_id
    assert [j.episode_id for j in jobs[:3]] == [f"m-s00007-{first}-{trial}" for trial in range(3)]
    assert len({j.seed for j in jobs}) == 6
    assert {(j.temperature, j.sampled_by, j.model) for j in jobs} == {(1.0, "policy", "m")}


def test_every_training_task_is_seen_before_one_is_seen_again() -> None:
    plan = plan_tasks(RELEASE, {"long": 1.0}, tasks=1, group=1, name="m", seed=1)
    first, second = ([plan.batch(s)[0].meta.task_id for s in range(start, start + 5)] for start in (1, 6))
    assert sorted(first) == sorted(second) == [f"long-{i}" for i in range(5)]
    assert first != second


def test_a_task_drawn_twice_in_one_batch_gets_further_trials() -> None:
    plan = plan_tasks(RELEASE, {"short": 1.0}, tasks=6, group=2, name="m", seed=1)
    jobs = list(plan.jobs(1))
    assert len({j.episode_id for j in jobs}) == 12
    assert Counter(j.trial for j in jobs) == {0: 3, 1: 3, 2: 3, 3: 3}


def test_shares_are_rounded_by_largest_remainder() -> None:
    assert share_out({"long": 3.0, "short": 1.0}, 4) == {"long": 3, "short": 1}
    assert share_out({"long": 1.0, "short": 1.0}, 5) == {"long": 3, "short": 2}
    with pytest.raises(ValueError, match="no task of pool 'short'"):
        share_out({"long": 9.0, "short": 1.0}, 2)


def test_a_pool_without_training_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="pool 'short'"):
        plan_tasks(Release([task("a", "long")], RELEASE.manifest), {"short": 1.0}, tasks=1, group=1, name="m", seed=1)
