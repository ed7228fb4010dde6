"""Plan, then act: the plan is a plain turn, survives rewrites, and is replaced when calls keep failing."""

from __future__ import annotations

from typing import Any

from scripted_endpoint import BAD, GET, TOO_LONG, TOOLS, calls, composed, contents, play, text

from occamy.contracts.episode import Outcome
from occamy.contracts.task import Budget
from occamy.harness.assignment import Harness
from occamy.harness.loading import load

REQUEST = "user:mark crm A01 as gold"
STEP = ["assistant:None", "tool:ok"]
FAILED = ["assistant:None", 'tool:{"error":"not_found"}']


def planning(*middleware: dict[str, Any], **loop: Any) -> Harness:
    return composed(*middleware, loop={"kind": "plan_act", **loop})


def test_a_plan_comes_first_and_stays_in_the_context() -> None:
    run, endpoint, _ = play([text("get then mark"), calls(GET), text("done")], planning())
    assert (run.outcome, run.answer, run.turns) == (Outcome.completed, "done", 3)
    assert contents(endpoint.bodies[0]) == [REQUEST, "user:plan"]
    assert contents(endpoint.bodies[1]) == [REQUEST, "user:plan", "assistant:get then mark", "user:work"]
    assert contents(endpoint.bodies[2]) == [*contents(endpoint.bodies[1]), *STEP]
    assert all(body["tools"] == TOOLS for body in endpoint.bodies)  # so that all turns share one prefix


def test_a_planning_turn_that_calls_tools_acts_at_once() -> None:
    run, endpoint, dispatched = play([calls(GET), text("done")], planning())
    assert (run.outcome, dispatched) == (Outcome.completed, [GET])
    assert contents(endpoint.bodies[1]) == [REQUEST, "user:plan", *STEP]


def test_failing_calls_lead_to_a_new_plan_so_many_times() -> None:
    script = [text("a"), calls(BAD, BAD), text("b"), calls(BAD), calls(GET), calls(BAD), calls(BAD), text("done")]
    run, endpoint, _ = play(script, planning(ask="how", act="go", replan_after=2, max_plans=2))
    assert (run.outcome, run.answer) == (Outcome.completed, "done")
    first = [REQUEST, "user:how", "assistant:a", "user:go", "assistant:None", *FAILED[1:] * 2]
    assert contents(endpoint.bodies[2]) == [*first, "user:how"]
    assert contents(endpoint.bodies[3]) == [*first, "user:how", "assistant:b", "user:go"]
    assert sum(contents(body)[-1] == "user:how" for body in endpoint.bodies) == 2


def test_the_latest_plan_survives_every_rewrite() -> None:
    part = {"kind": "compaction", "mode": "summary", "budget_tokens": 100, "trigger": 0.5, "keep_last": 1}
    script = [
        text("old"),
        calls(BAD, BAD),
        text("new"),
        calls(GET),
        calls(GET, prompt=60),
        text("sum1"),
        calls(GET, prompt=60),
        text("sum2"),
        text("done"),
    ]
    run, endpoint, _ = play(script, planning(part, replan_after=2))
    assert (run.outcome, run.compactions) == (Outcome.completed, 2)
    assert contents(endpoint.bodies[6]) == [REQUEST, "user:summary:sum1", "user:plan:new", *STEP]
    assert contents(endpoint.bodies[8]) == [REQUEST, "user:summary:sum2", "user:plan:new", *STEP]


def test_the_composition_with_every_part_plans_delegates_recovers_and_finishes() -> None:
    """The root plans, delegates to a child that plans too, meets a full context and a cut turn, and finishes."""
    hand = ("delegate", '{"goal":"look at A01"}')
    child = [text("just look"), calls(GET), text("it is silver")]
    root = [text("look, then mark"), calls(hand), calls(GET), calls(GET), TOO_LONG, text("al", finish="length")]
    script = [*root[:2], *child, *root[2:], text("all done")]
    run, endpoint, _ = play(script, load("cowork"), Budget(turns=60, tool_calls=60, tokens=1000))
    assert (run.outcome, run.answer, run.children, run.compactions) == (Outcome.completed, "all done", 1, 1)
    assert endpoint.runs == ["root"] * 2 + ["sub"] * 3 + ["root"] * 5
    system, request, ask = contents(endpoint.bodies[0])
    assert system.startswith("system:You are an assistant") and "Delegate: when parts" in system
    assert request == REQUEST and ask.startswith("user:Write a short plan")
    assert contents(endpoint.bodies[2])[:2] == [system, "user:task 1: look at A01"]
    after = contents(endpoint.bodies[8])
    assert after[2] == 'user:summary:delegate{"goal":"look at A01"}=it is silver;'
    assert after[3] == "user:plan:look, then mark" and after[4:] == STEP * 2
    assert contents(endpoint.bodies[9])[-2] == "assistant:al"
    kinds = [event["kind"] for event in run.trace]
    assert kinds.count("recovery") == 2 and kinds.count("subagent") == 1
