"""Contamination: only what a training task really gives away is found, boilerplate never."""

from __future__ import annotations

from occamy.audit.contamination import Contamination, audit_release, check_contamination
from occamy.contracts.likeness import clause_skeletons, task_literals
from occamy.contracts.manifest import Manifest
from occamy.contracts.release import Release
from occamy.contracts.task import (
    Budget,
    FieldEquals,
    FieldSpec,
    Grading,
    Metadata,
    Split,
    TaskContract,
    ToolCall,
    WorldSpec,
)
from occamy.synthesis.author import Slot
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.variants import write_task


def task(task_id: str, split: Split, wording: str, key: str, before: int, after: int) -> TaskContract:
    """A task that changes the visits of one customer."""
    world = WorldSpec(services={"crm": {"visits": FieldSpec(kind="int")}}, records={"crm": {key: {"visits": before}}})
    grading = Grading(
        goals=(FieldEquals(service="crm", id=key, field="visits", value=after),),
        reference=(ToolCall(name="crm_update", arguments={"id": key, "visits": after}),),
    )
    meta = Metadata(
        task_id=task_id,
        pool="short",
        split=split,
        route="environment_first",
        capabilities=("act",),
        templates=("x",),
        seed=0,
        budget=Budget(turns=4, tool_calls=4, tokens=100),
    )
    request = wording.format(i=key, v=after)
    return TaskContract(request=request, world=world, tools=(), grading=grading, meta=meta)


def test_literals_are_the_entities_and_values_that_a_task_uses() -> None:
    assert task_literals(task("a", "train", "set visits of crm {i} to {v}", "A01", 3, 8)) == (8, "A01")


def test_a_skeleton_masks_names_and_values_and_keeps_the_phrasing() -> None:
    a = task("a", "train", "Set  visits of crm {i} to {v} ; add 5 to visits of crm {i}", "A01", 3, 8)
    assert clause_skeletons(a) == (
        "set <field> of <service> <literal> to <literal>",
        "add <literal> to <field> of <service> <literal>",
    )


def test_shared_ids_wordings_and_copies_are_found_by_name() -> None:
    train = [task("t", "train", "set visits of crm {i} to {v}", "A01", 3, 8)]
    held_out = [
        task("same-id", "test", "visits of crm {i} must be {v}", "A01", 5, 10),
        task("same-wording", "test", "set visits of crm {i} to {v}", "A05", 5, 10),
        task("copy", "test", "set visits of crm {i} to {v}", "A01", 3, 8),
        task("new", "test", "visits of crm {i} must be {v}", "A05", 5, 10),
    ]
    wording = "set <field> of <service> <literal> to <literal>"
    assert check_contamination(train, held_out).findings == (
        Contamination(task_id="same-id", literals=("A01",)),
        Contamination(task_id="same-wording", wordings=(wording,)),
        Contamination(task_id="copy", literals=("8", "A01"), wordings=(wording,), copies=("t",)),
    )


def test_a_shared_operand_or_service_is_boilerplate() -> None:
    train = [task("t", "train", "add 5 to visits of crm {i}", "A01", 3, 8)]
    held_out = [task("h", "test", "raise visits of crm {i} by 5", "A05", 5, 10)]
    assert check_contamination(train, held_out).clean


def test_metadata_that_hides_a_literal_does_not_help() -> None:
    train = [task("t", "train", "set visits of crm {i} to {v}", "A01", 3, 8)]
    hidden = task("h", "test", "visits of crm {i} must be {v}", "A01", 5, 10)
    assert hidden.meta.literals == ()
    assert not check_contamination(train, [hidden]).clean


def test_synthesised_splits_are_clean() -> None:
    splits: tuple[Split, ...] = ("train", "validation", "test")
    slots = [Slot(split, pool, k) for split in splits for pool in ("long", "short") for k in range(60)]
    tasks = [write_task(slot, SynthesisConfig(), 9) for slot in slots]
    report = audit_release(Release(tasks, Manifest(kind="task_release", files={})))
    assert (report.train_tasks, report.held_out_tasks, report.findings) == (120, 240, ())
