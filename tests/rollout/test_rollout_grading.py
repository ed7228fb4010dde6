"""The grader: weighted partial credit, forbidden effects, evidence in the log. Pure, by hand-computed values."""

from __future__ import annotations

from typing import Any

import pytest

from occamy.contracts.task import (
    Budget,
    CallLogged,
    FieldEquals,
    FieldSpec,
    FileEquals,
    Goal,
    Grading,
    Metadata,
    RecordCreated,
    TaskContract,
    ToolCall,
    WorldSpec,
)
from occamy.rollout.grading import grade
from occamy.worlds.world import Event

WORLD = WorldSpec(
    services={"crm": {"tier": FieldSpec(kind="enum", values=("gold", "silver")), "visits": FieldSpec(kind="int")}},
    records={"crm": {"A01": {"tier": "gold", "visits": 4}, "A02": {"tier": "silver", "visits": 9}}},
    files={"memo": "A02"},
    fresh_ids=("F01", "F02"),
)
SILVER = FieldEquals(service="crm", id="A01", field="tier", value="silver", weight=3.0)
SEVEN = FieldEquals(service="crm", id="A02", field="visits", value=7)
NEW = RecordCreated(service="crm", fields={"tier": "gold", "visits": 1})
NOTE = FileEquals(path="note", text="9")
LOOK = ToolCall(name="crm_get", arguments={"id": "A01"})


def contract(*goals: Goal, **grading: Any) -> TaskContract:
    budget = Budget(turns=8, tool_calls=8, tokens=100)
    meta = Metadata(
        task_id="train-short-00000",
        pool="short",
        split="train",
        route="environment_first",
        capabilities=("act",),
        templates=("set.train.0",),
        seed=0,
        budget=budget,
    )
    return TaskContract(request="", world=WORLD, tools=(), grading=Grading(goals=goals, **grading), meta=meta)


def state(**changes: dict[str, Any]) -> dict[str, Any]:
    """The initial state with rows of crm replaced or added, and files under `files`."""
    files = {"memo": "A02", **changes.pop("files", {})}
    return {"services": {"crm": {**WORLD.records["crm"], **changes}}, "files": files}


def event(ordinal: int, name: str, arguments: dict[str, Any], ok: bool = True) -> Event:
    return Event(ordinal, "2026-01-05T09:00:00Z", name, arguments, "ok", ok, None if ok else "unavailable")


def test_partial_credit_is_the_weighted_share_of_goals_met() -> None:
    judged = grade(contract(SILVER, SEVEN), state(A01={"tier": "silver", "visits": 4}), [], "done", True)
    assert (judged.score, judged.success, judged.goals_met) == (0.75, False, (True, False))


def test_success_needs_completion_and_the_threshold() -> None:
    end = state(A01={"tier": "silver", "visits": 4}, A02={"tier": "silver", "visits": 7})
    assert grade(contract(SILVER, SEVEN), end, [], "done", True).success
    assert not grade(contract(SILVER, SEVEN), end, [], "done", False).success
    partly = state(A01={"tier": "silver", "visits": 4})
    assert grade(contract(SILVER, SEVEN, pass_threshold=0.75), partly, [], "done", True).success


@pytest.mark.parametrize(
    ("changes", "forbidden"),
    [
        ({"A02": {"tier": "gold", "visits": 9}}, ("crm A02.tier",)),
        ({"A01": {"tier": "silver", "visits": 5}}, ("crm A01.visits",)),
        ({"F01": {"tier": "gold", "visits": 1}}, ("crm F01 created",)),
        ({"A02": {"tier": "silver"}}, ("crm A02.visits",)),
        ({"files": {"note": "9"}}, ("file note",)),
        ({"files": {"memo": "A01"}}, ("file memo",)),
    ],
)
def test_a_change_that_no_goal_asks_for_zeroes_the_score(changes: dict, forbidden: tuple[str, ...]) -> None:
    judged = grade(contract(SILVER), state(**{"A01": {"tier": "silver", "visits": 4}, **changes}), [], "done", True)
    assert (judged.score, judged.success, judged.forbidden) == (0.0, False, forbidden)


def test_a_removed_record_or_file_is_forbidden_too() -> None:
    end = {"services": {"crm": {"A01": {"tier": "silver", "visits": 4}}}, "files": {}}
    assert grade(contract(SILVER), end, [], "done", True).forbidden == ("crm A02 removed", "file memo")


def test_other_changes_may_be_allowed() -> None:
    end = state(A01={"tier": "silver", "visits": 5})
    assert grade(contract(SILVER, allow_other_changes=True), end, [], "done", True).score == 1.0


def test_a_wrong_value_in_the_right_place_is_unmet_and_not_forbidden() -> None:
    end = state(A01={"tier": "silver", "visits": 4}, A02={"tier": "silver", "visits": 8})
    judged = grade(contract(SILVER, SEVEN), end, [], "done", True)
    assert (judged.score, judged.forbidden) == (0.75, ())


def test_values_are_compared_with_their_type() -> None:
    assert grade(contract(SEVEN), state(A02={"tier": "silver", "visits": "7"}), [], "", True).goals_met == (False,)


def test_each_created_record_serves_one_goal_and_a_further_one_is_forbidden() -> None:
    one = state(F01={"tier": "gold", "visits": 1})
    two = state(F01={"tier": "gold", "visits": 1}, F02={"tier": "gold", "visits": 1})
    assert grade(contract(NEW, NEW), one, [], "done", True).goals_met == (True, False)
    assert grade(contract(NEW, NEW), two, [], "done", True).score == 1.0
    assert grade(contract(NEW), two, [], "done", True).forbidden == ("crm F02 created",)
    more = state(F01={"tier": "gold", "visits": 1, "note": "x"})
    assert grade(contract(NEW), more, [], "done", True).forbidden == ("crm F01 created",)


def test_a_file_is_compared_without_surrounding_whitespace() -> None:
    assert grade(contract(NOTE), state(files={"note": "9\n"}), [], "done", True).score == 1.0
    assert grade(contract(NOTE), state(files={"note": "19"}), [], "done", True).score == 0.0
    assert grade(contract(NOTE), state(), [], "done", True).score == 0.0


def test_evidence_counts_only_successful_calls_and_only_after_the_last_write() -> None:
    end = state(A01={"tier": "silver", "visits": 4})
    write = event(1, "crm_update", {"id": "A01", "tier": "silver"})
    task = contract(SILVER, CallLogged(call=LOOK, after_last_write=True))
    look = LOOK.arguments
    assert grade(task, end, [write, event(2, "crm_get", look)], "done", True).score == 1.0
    assert grade(task, end, [event(0, "crm_get", look), write], "done", True).score == 0.75
    assert grade(task, end, [write, event(2, "crm_get", look, ok=False)], "done", True).score == 0.75
    assert grade(task, end, [write, event(2, "crm_get", {"id": "A02"})], "done", True).score == 0.75
    assert grade(task, state(), [event(0, "crm_get", look)], "done", True).goals_met == (False, False)
    anytime = contract(SILVER, CallLogged(call=LOOK))
    assert grade(anytime, end, [event(0, "crm_get", look), write], "done", True).score == 1.0


def test_a_failed_write_does_not_reset_the_evidence() -> None:
    task = contract(SILVER, CallLogged(call=LOOK, after_last_write=True))
    log = [
        event(0, "crm_update", {"id": "A01", "tier": "silver"}),
        event(1, "crm_get", LOOK.arguments),
        event(2, "crm_update", {"id": "A01", "tier": "x"}, ok=False),
    ]
    assert grade(task, state(A01={"tier": "silver", "visits": 4}), log, "done", True).score == 1.0


def test_the_wording_of_the_answer_earns_nothing() -> None:
    assert grade(contract(SILVER), state(), [], "crm A01 tier is silver", True).score == 0.0
