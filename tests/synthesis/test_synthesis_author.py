"""The programmatic author and its variants."""

from __future__ import annotations

from random import Random

import pytest

from occamy.contracts.likeness import CLAUSE, changed_elements, task_literals
from occamy.contracts.task import Split, TaskContract
from occamy.rollout.grading import grade
from occamy.synthesis.author import GRAPHS, Slot, SynthesisError, build, carriers, draft_seed, realise
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.goals import CAPABILITIES
from occamy.synthesis.office import draw_office
from occamy.synthesis.variants import finish_variant, realise_anew, reword, write_task
from occamy.synthesis.wordings import ENUM_VALUES, WORDINGS, entity_ids, numbers
from occamy.worlds.workspace import MemoryWorkspace
from occamy.worlds.world import World

CONFIG = SynthesisConfig()


def tasks(split: Split, pool: str, n: int = 150, config: SynthesisConfig = CONFIG, seed: int = 3) -> list[TaskContract]:
    return [write_task(Slot(split, pool, index), config, seed) for index in range(n)]


def test_the_same_slot_and_seed_give_the_same_task_and_another_seed_another() -> None:
    slot = Slot("train", "long", 17)
    assert slot.task_id == "train-long-00017"
    assert write_task(slot, CONFIG, 3) == write_task(slot, CONFIG, 3)
    assert write_task(slot, CONFIG, 3) != write_task(slot, CONFIG, 4)


@pytest.mark.parametrize("pool", ["long", "short"])
def test_the_gold_path_meets_every_goal_and_nothing_else(pool: str) -> None:
    for task in tasks("validation", pool, config=SynthesisConfig(fault_share=0.0)):
        world = World(task.world, MemoryWorkspace())
        for call in task.grading.reference:
            assert world.call(call.name, dict(call.arguments)).ok, task.request
        assert grade(task, world.state(), world.events, "done", True).success, task.request


def test_pools_have_their_goal_and_call_counts() -> None:
    long, short = tasks("train", "long"), tasks("train", "short")
    assert {len(t.request.split(CLAUSE)) for t in long} == {2, 3}
    assert {len(t.grading.reference) for t in long} == {4, 5, 6, 7, 8}
    assert {len(t.request.split(CLAUSE)) for t in short} == {1}
    assert {len(t.grading.reference) for t in short} == {1, 2}
    kinds = {t.split(".")[0] for task in long + short for t in task.meta.templates}
    assert kinds == set(WORDINGS)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_whole_world_keeps_to_its_split(split: Split) -> None:
    words = set(ENUM_VALUES[split]) | set(entity_ids(split))
    for task in tasks(split, "long", 40) + tasks(split, "short", 40):
        rows = [row for records in task.world.records.values() for row in records.values()]
        values = [value for row in rows for value in row.values()] + list(task.world.fresh_ids)
        goals = [g.value for g in task.grading.goals if g.kind == "field_equals"]
        assert {v for v in values + goals if isinstance(v, str)} <= words
        assert {v for v in values + goals if isinstance(v, int)} <= set(numbers(split))
        assert task.meta.literals == task_literals(task)


def test_about_a_tenth_of_tasks_meet_a_fault_on_their_gold_path() -> None:
    faulty = [t for t in tasks("train", "short", 400) if t.world.faults]
    assert 24 <= len(faulty) <= 56
    assert all(t.world.faults[0] < len(t.grading.reference) for t in faulty)
    assert all(t.meta.capabilities[-1] == "recover" for t in faulty)


def test_a_capability_graph_is_carried_by_goal_kinds_that_spell_it() -> None:
    assert set(carriers(("locate", "act"))) == {("search",)}
    assert set(carriers(("act", "verify"))) == {("verify",)}
    assert ("trace", "add") in carriers(("locate", "resolve", "act", "compute", "act"))
    for graphs in GRAPHS.values():
        for graph in graphs:
            for kinds in carriers(graph):
                assert tuple(node for kind in kinds for node in CAPABILITIES[kind]) == graph


def test_capability_first_tasks_have_a_frozen_graph() -> None:
    config = SynthesisConfig(capability_first_share=1.0, fault_share=0.0, variant_share=0.0)
    for task in tasks("train", "long", 30, config):
        assert task.meta.route == "capability_first"
        assert task.meta.capabilities in GRAPHS["long"]


def test_goals_that_no_office_can_carry_are_refused_by_name() -> None:
    with pytest.raises(SynthesisError, match=r"train-long-00000.*memo, memo, memo, memo"):
        realise(Random(0), Slot("train", "long", 0), ("memo",) * 4, CONFIG)


def test_numbers_and_references_of_a_field_are_distinct_so_a_search_finds_one() -> None:
    office = draw_office(Random(1), "test", 6)
    for service in office.schema:
        for name in office.names(service, "int", "ref"):
            values = [row[name] for row in office.records[service].values()]
            assert len(set(values)) == len(values)


def test_a_presentation_variant_changes_the_wording_only() -> None:
    parent = draft_seed(Slot("train", "long", 0), CONFIG, 3)
    slot = Slot("train", "long", 1)
    variant = finish_variant(build(parent), reword(Random(0), parent, slot, 3), "presentation")
    assert variant.meta.changed == ("wording",)
    assert variant.meta.parent == "train-long-00000"
    assert variant.grading == build(parent).grading


def test_a_realisation_variant_keeps_graph_and_wording_and_changes_the_world() -> None:
    parent = draft_seed(Slot("train", "long", 0), CONFIG, 3)
    variant = finish_variant(
        build(parent), realise_anew(Random(0), parent, Slot("train", "long", 1), CONFIG, 3), "realisation"
    )
    assert {"backend", "grading"} <= set(variant.meta.changed)
    assert "wording" not in variant.meta.changed
    assert variant.meta.templates == build(parent).meta.templates


def test_a_variant_that_changes_nothing_is_refused() -> None:
    parent = draft_seed(Slot("train", "short", 0), CONFIG, 3)
    with pytest.raises(SynthesisError, match="changes neither"):
        finish_variant(build(parent), parent, "presentation")


def test_swapping_names_alone_is_no_change_of_wording() -> None:
    task = write_task(Slot("train", "short", 0), CONFIG, 3)
    words = task.world.services["crm"]["tier"].values
    a = task.model_copy(update={"request": f"set tier of crm {next(iter(task.world.records['crm']))} to {words[0]}"})
    b = task.model_copy(update={"request": f"set tier of crm {list(task.world.records['crm'])[1]} to {words[1]}"})
    c = task.model_copy(update={"request": f"tier of crm {list(task.world.records['crm'])[1]} must be {words[1]}"})
    assert changed_elements(a, b) == ()
    assert changed_elements(a, c) == ("wording",)
