"""Gate 6: who owns a literal or a wording, lineage, duplicates."""

from __future__ import annotations

from typing import Any

from occamy.admission.crosscheck import crosscheck
from occamy.admission.receipts import Reason, Receipt
from occamy.contracts.task import FieldEquals, TaskContract


def variant(base: TaskContract, task_id: str, request: str, literals: tuple[str, ...], **meta: Any) -> TaskContract:
    fresh = {"task_id": task_id, "split": task_id.split("-")[0], "literals": literals, **meta}
    return base.model_copy(update={"request": request, "meta": base.meta.model_copy(update=fresh)})


def verdicts(*contracts: TaskContract) -> dict[str, Reason | None]:
    judged = [(Receipt(task_id=c.meta.task_id, task_digest="", gates=()), c) for c in contracts]
    return {receipt.task_id: receipt.reason for receipt in crosscheck(judged)}


def test_a_literal_belongs_to_the_split_that_uses_it_most_so_a_stray_evicts_nobody(good: TaskContract) -> None:
    assert verdicts(
        variant(good, "train-a", "make it so", ("A01",)),
        variant(good, "train-b", "make it right", ("A01", "B01")),
        variant(good, "test-a", "do that", ("A01", "C05")),
        variant(good, "test-b", "do this", ("C05",)),
    ) == {"train-a": None, "train-b": None, "test-a": Reason.contaminated, "test-b": None}


def test_a_literal_used_equally_often_belongs_to_the_held_out_split(good: TaskContract) -> None:
    assert verdicts(
        variant(good, "train-a", "make it so", ("A01",)), variant(good, "validation-a", "do that", ("A01",))
    ) == {"train-a": Reason.contaminated, "validation-a": None}


def test_a_stray_goes_before_ties_are_settled_and_spares_what_it_copies(good: TaskContract) -> None:
    assert verdicts(
        variant(good, "train-a", "make it so", ("A01", "gold")),
        variant(good, "train-b", "make it right", ("A02", "gold")),
        variant(good, "validation-a", "do that", ("A01", "gold")),
    ) == {"train-a": None, "train-b": None, "validation-a": Reason.contaminated}


def test_a_shared_way_of_asking_is_contamination_whatever_the_names(good: TaskContract) -> None:
    assert verdicts(
        variant(good, "train-a", "set tier of crm A01 to gold ; make it so", ("A01",)),
        variant(good, "test-a", "do that ; set visits of crm A02 to 7", ("A02",)),
    ) == {"train-a": Reason.contaminated, "test-a": None}


def test_the_first_of_two_equal_tasks_stays(good: TaskContract) -> None:
    assert verdicts(
        variant(good, "train-a", "make it so", ("A01",)), variant(good, "train-b", "Make  it so", ("A01",))
    ) == {"train-a": None, "train-b": Reason.duplicate}


def test_lineage_must_be_known_and_true(good: TaskContract) -> None:
    seed = variant(good, "train-a", "make it so", ("A01",))
    claim: dict[str, Any] = {"variation": "presentation", "parent": "train-a", "changed": ("wording",)}
    grading = good.grading.model_copy(
        update={"goals": (FieldEquals(service="crm", id="A01", field="tier", value="bronze"),)}
    )
    false = variant(good, "train-d", "make it hers", ("A01",), **claim).model_copy(update={"grading": grading})
    assert verdicts(
        seed,
        variant(good, "train-b", "make it mine", ("A01",), **claim),
        variant(good, "train-c", "make it yours", ("A01",), **{**claim, "parent": "train-z"}),
        false,
        variant(good, "train-e", "make it theirs", ("A01",), parent="train-a"),
        variant(good, "test-f", "do that", ("B05",), **claim),
    ) == {
        "train-a": None,
        "train-b": None,
        "train-c": Reason.broken_lineage,
        "train-d": Reason.broken_lineage,
        "train-e": Reason.broken_lineage,
        "test-f": Reason.broken_lineage,
    }


def test_a_task_that_failed_before_is_left_as_it_was(good: TaskContract) -> None:
    failed = Receipt(task_id="train-a", task_digest="", gates=(), reason=Reason.misaligned, detail="why")
    assert crosscheck([(failed, variant(good, "train-a", "make it so", ()))]) == [failed]


def test_a_refused_package_that_borrows_an_id_does_not_stand_in_for_its_owner(good: TaskContract) -> None:
    owner = variant(good, "train-a", "make it so", ("A01",))
    thief = Receipt(task_id="train-b", task_digest="", gates=(), reason=Reason.not_canonical)
    twin = variant(good, "train-c", "make it right", ("A05",))
    held_out = variant(good, "test-a", "do that", ("A05",))
    judged = [(Receipt(task_id=c.meta.task_id, task_digest="", gates=()), c) for c in (owner, twin, held_out)]
    borrowed = variant(good, "train-a", "do that", ("A05",))
    reasons = {r.task_id: r.reason for r in crosscheck([*judged, (thief, borrowed)])}
    assert reasons["train-a"] is None
    assert reasons["train-c"] is Reason.contaminated
