"""Each gate refuses what it is for, with its own reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from occamy.admission.attempts import attempt, collateral, negatives
from occamy.admission.judge import judge
from occamy.admission.receipts import Reason, Receipt
from occamy.contracts.likeness import task_literals
from occamy.contracts.release import contract_bytes, contract_path
from occamy.contracts.task import CallLogged, FieldEquals, FileEquals, RecordCreated, TaskContract, ToolCall

Judge = Callable[[TaskContract], Receipt]


@pytest.fixture
def judged(tmp_path: Path) -> Judge:
    def run(task: TaskContract) -> Receipt:
        path = contract_path(tmp_path, task.meta.task_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contract_bytes(task))
        return judge(tmp_path, task.meta.task_id)[0]

    return run


def altered(task: TaskContract, **changes: Any) -> TaskContract:
    """A copy with changes to request, tools, or parts of world, grading and meta; literals brought up to date."""
    for part in ("world", "grading", "meta"):
        if part in changes:
            changes[part] = getattr(task, part).model_copy(update=changes[part])
    copy = task.model_copy(update=changes)
    return copy.model_copy(update={"meta": copy.meta.model_copy(update={"literals": task_literals(copy)})})


def single(task: TaskContract, request: str, calls: tuple[ToolCall, ...], *goals: Any, **changes: Any) -> TaskContract:
    """A one-clause task over the same world."""
    grading = {"goals": goals, "reference": calls}
    return altered(task, request=request, grading=grading, meta={"templates": ("one",)}, **changes)


def update(service: str, key: str, **values: Any) -> ToolCall:
    return ToolCall(name=f"{service}_update", arguments={"id": key, **values})


def test_a_good_task_passes_five_gates_with_evidence(good: TaskContract, judged: Judge) -> None:
    receipt = judged(good)
    assert receipt.reason is None, receipt.detail
    assert [g.gate for g in receipt.gates] == ["canonical", "feasible", "discoverable", "reference", "negatives"]
    assert receipt.gates[2].evidence == {"literals_from": {"request": 4, "observation": 1, "computed": 0}}
    assert len(set(receipt.gates[3].evidence["fingerprints"])) == 1
    assert receipt.gates[4].evidence["scores"] == {
        "no_op": 0.0,
        "finish_at_once": 0.0,
        "answer_without_action": 0.0,
        "guessing_text": 0.0,
        "touch_only_first": 0.25,
        "skip_call_0": 0.75,
        "near_miss": 0.25,
        "wrong_entity": 0.0,
        "collateral": 0.0,
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"meta": {"schema_version": 2}}, Reason.not_canonical),
        ({"grading": {"pass_threshold": 0.0}}, Reason.not_canonical),
        ({"meta": {"templates": ("set.train.0",)}}, Reason.not_canonical),
        ({"world": {"fresh_ids": ("A01",)}}, Reason.invalid_world),
        ({"world": {"files": {"../out": "x"}}}, Reason.invalid_world),
        ({"world": {"files": {"a" * 256: "x"}}}, Reason.invalid_world),
        ({"tools": ("crm_update", "orders_get", "crm_delete")}, Reason.tool_unavailable),
        ({"tools": ("crm_update",)}, Reason.tool_unavailable),
        ({"grading": {"reference": ()}}, Reason.misaligned),
        ({"request": "set tier of crm A02 to silver ; copy qty of orders B02 to visits of crm A01"}, Reason.misaligned),
        (
            {"request": "set tier of crm A01 to gold ; copy qty of orders B01 to visits of crm A02"},
            Reason.undiscoverable,
        ),
        ({"world": {"faults": (9,)}}, Reason.reference_failed),
    ],
)
def test_refusals(good: TaskContract, judged: Judge, changes: dict, reason: Reason) -> None:
    receipt = judged(altered(good, **changes))
    assert (receipt.reason, receipt.gates[-1].passed) == (reason, False), receipt.detail


def test_stale_literals_are_refused(good: TaskContract, judged: Judge) -> None:
    stale = good.model_copy(update={"meta": good.meta.model_copy(update={"literals": ("A01",)})})
    assert judged(stale).reason is Reason.not_canonical


def test_bytes_that_hold_no_contract_are_refused_and_keep_their_digest(tmp_path: Path) -> None:
    path = contract_path(tmp_path, "x")
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"request":')
    receipt, contract = judge(tmp_path, "x")
    assert (receipt.reason, contract) == (Reason.not_a_contract, None)
    assert receipt.task_digest.startswith("sha256:")


def test_a_missing_package_is_an_infrastructure_fault_and_no_verdict(tmp_path: Path) -> None:
    receipt, _ = judge(tmp_path, "gone")
    assert receipt.reason is Reason.infra_failed
    assert "FileNotFoundError" in receipt.detail


@pytest.mark.parametrize(
    ("goal", "reason"),
    [
        (FieldEquals(service="crm", id="A09", field="tier", value="gold"), Reason.infeasible_goal),
        (FieldEquals(service="crm", id="A01", field="tier", value="diamond"), Reason.infeasible_goal),
        (FieldEquals(service="orders", id="B01", field="customer", value="A09"), Reason.infeasible_goal),
        (FieldEquals(service="crm", id="A01", field="visits", value=100), Reason.infeasible_goal),
        (RecordCreated(service="crm", fields={"colour": "red"}), Reason.infeasible_goal),
        (FieldEquals(service="crm", id="A01", field="tier", value="bronze"), Reason.contradictory_goals),
        (FieldEquals(service="crm", id="A02", field="tier", value="gold"), Reason.met_at_start),
        (FieldEquals(service="crm", id="A02", field="tier", value="bronze"), Reason.misaligned),
    ],
)
def test_goals_that_cannot_or_need_not_be_met(good: TaskContract, judged: Judge, goal: Any, reason: Reason) -> None:
    receipt = judged(altered(good, grading={"goals": (*good.grading.goals, goal)}))
    assert receipt.reason is reason, receipt.detail


def test_a_gold_write_without_a_goal_is_misaligned(good: TaskContract, judged: Judge) -> None:
    gold = (*good.grading.reference, update("orders", "B01", qty=5))
    assert judged(altered(good, grading={"reference": gold})).reason is Reason.misaligned


def test_a_search_that_finds_two_records_is_ambiguous_unless_all_are_looked_at(
    good: TaskContract, judged: Judge
) -> None:
    find = ToolCall(name="crm_search", arguments={"field": "tier", "value": "gold"})
    goal = FieldEquals(service="crm", id="A02", field="visits", value=7)
    request = "set visits of the crm with tier gold to 7"
    picked = single(good, request, (find, update("crm", "A02", visits=7)), goal)
    assert judged(picked).reason is Reason.ambiguous
    looks = tuple(ToolCall(name="crm_get", arguments={"id": key}) for key in ("A01", "A02"))
    compared = single(good, f"{request} if it has visits 9", (find, *looks, update("crm", "A02", visits=7)), goal)
    assert judged(compared).reason is None


def test_a_value_that_two_fields_could_hold_needs_its_field_named(good: TaskContract, judged: Judge) -> None:
    colour = good.world.services["crm"]["tier"]
    services = {**good.world.services, "crm": {**good.world.services["crm"], "rank": colour}}
    goal = FieldEquals(service="crm", id="A01", field="tier", value="silver")
    calls = (update("crm", "A01", tier="silver"),)
    assert judged(single(good, "mark crm A01 as silver", calls, goal)).reason is None
    twofold = single(good, "mark crm A01 as silver", calls, goal, world={"services": services})
    assert judged(twofold).reason is Reason.ambiguous
    named = single(good, "mark tier of crm A01 as silver", calls, goal, world={"services": services})
    assert judged(named).reason is None


def test_a_sum_is_discoverable_only_after_its_number_was_read(good: TaskContract, judged: Judge) -> None:
    goal = FieldEquals(service="crm", id="A01", field="visits", value=9)
    look, write = ToolCall(name="crm_get", arguments={"id": "A01"}), update("crm", "A01", visits=9)
    assert judged(single(good, "add 5 to visits of crm A01", (look, write), goal)).reason is None
    assert judged(single(good, "add 5 to visits of crm A01", (write,), goal)).reason is Reason.undiscoverable
    assert judged(single(good, "add 6 to visits of crm A01", (look, write), goal)).reason is Reason.undiscoverable


def test_a_gold_path_with_an_error_or_beyond_the_budget_is_refused(good: TaskContract, judged: Judge) -> None:
    lost = ToolCall(name="crm_get", arguments={"id": "B01"})
    assert (
        judged(altered(good, grading={"reference": (lost, *good.grading.reference)})).reason is Reason.reference_failed
    )
    for tight in ({"turns": 3}, {"tool_calls": 2}, {"tokens": 3}, {"wall_seconds": 0.0}):
        budget = good.meta.budget.model_copy(update=tight)
        assert judged(altered(good, meta={"budget": budget})).reason is Reason.reference_failed


def test_a_scheduled_fault_is_ridden_out(good: TaskContract, judged: Judge) -> None:
    receipt = judged(altered(good, world={"faults": (1,)}))
    assert receipt.reason is None
    assert receipt.gates[3].evidence["calls"] == 4


def test_a_reward_without_any_effect_is_refused(good: TaskContract, judged: Judge) -> None:
    look = ToolCall(name="crm_get", arguments={"id": "A01"})
    receipt = judged(single(good, "look up crm A01", (look,), CallLogged(call=look)))
    assert receipt.reason is Reason.negative_passed
    assert "answer_without_action" in receipt.detail


def test_a_threshold_that_half_the_work_reaches_is_refused(good: TaskContract, judged: Judge) -> None:
    receipt = judged(altered(good, grading={"pass_threshold": 0.25}))
    assert receipt.reason is Reason.negative_passed
    assert receipt.gates[-1].evidence["scores"]["touch_only_first"] == 0.25


def test_a_threshold_that_leaves_out_an_early_write_is_refused(good: TaskContract, judged: Judge) -> None:
    receipt = judged(altered(good, grading={"pass_threshold": 0.5}))
    assert receipt.reason is Reason.negative_passed
    assert "skip_call_0 scored 0.75" in receipt.detail


def test_creating_and_writing_files_have_their_negatives(good: TaskContract, judged: Judge) -> None:
    fields: dict[str, Any] = {"customer": "A01", "qty": 50}
    make = ToolCall(name="orders_create", arguments=fields)
    note = ToolCall(name="file_write", arguments={"path": "note", "text": "done"})
    task = single(
        good,
        "create orders with customer A01 and qty 50 and write done to note",
        (make, note),
        RecordCreated(service="orders", fields=fields),
        FileEquals(path="note", text="done"),
    )
    receipt = judged(task)
    assert receipt.reason is None, receipt.detail
    assert receipt.gates[-1].evidence["scores"]["wrong_entity"] == 0.0
    assert receipt.gates[-1].evidence["scores"]["near_miss"] == 0.5


def test_evidence_after_the_last_write_is_part_of_the_near_miss(good: TaskContract, judged: Judge) -> None:
    look = ToolCall(name="crm_get", arguments={"id": "A01"})
    goals = (good.grading.goals[0], CallLogged(call=look, after_last_write=True))
    task = single(good, "set tier of crm A01 to silver and check it", (good.grading.reference[0], look), *goals)
    receipt = judged(task)
    assert receipt.reason is None, receipt.detail
    assert receipt.gates[-1].evidence["scores"]["unverified"] == 0.5
    assert receipt.gates[-1].evidence["scores"]["near_miss"] == 0.0


def test_collateral_touches_a_record_that_no_goal_names(good: TaskContract) -> None:
    extra = collateral(good)
    assert extra == update("crm", "A03", tier="gold")
    assert attempt(good, (*good.grading.reference, extra), "done").grade.forbidden == ("crm A03.tier",)


def test_negatives_are_scripted_from_the_gold_path(good: TaskContract) -> None:
    by_name = {n.name: n for n in negatives(good)}
    assert by_name["near_miss"].calls == good.grading.reference[:2]
    assert by_name["near_miss"].expected == 0.25
    assert by_name["answer_without_action"].calls == (good.grading.reference[1],)
    assert not by_name["no_op"].completed
