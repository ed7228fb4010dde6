"""Middleware against a scripted endpoint: compaction, recovery, tools that fail, garbage from the endpoint."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from scripted_endpoint import BAD, GET, TOO_LONG, TOOLS, Result, calls, composed, contents, play, text

from occamy.contracts.episode import Outcome
from occamy.contracts.task import Budget
from occamy.harness.assignment import Harness

STEP = ["assistant:None", "tool:ok"]
REQUEST = "user:mark crm A01 as gold"


def compacting(mode: str, **more: Any) -> Harness:
    part = {"kind": "compaction", "mode": mode, "budget_tokens": 100, "trigger": 0.5, "characters_per_token": 2, **more}
    return composed(part, {"kind": "budgets"}, {"kind": "trace"})


def test_summary_replaces_all_but_the_last_two_steps() -> None:
    script = [
        calls(GET, prompt=10),
        calls(GET, prompt=20),
        calls(GET, prompt=45),  # 45 + 5 sampled + "ok" (2 characters, 1 token) = 51 > 50, with 3 steps
        text("A01.tier=gold;", prompt=60),
        calls(GET, prompt=30),
        text("done", prompt=40),
    ]
    run, endpoint, _ = play(script, compacting("summary"))
    assert run.outcome is Outcome.completed and (run.turns, run.compactions, run.tool_calls) == (6, 1, 4)
    asked, after, later = endpoint.bodies[3], endpoint.bodies[4], endpoint.bodies[5]
    assert contents(asked)[-1] == "user:summary" and len(asked["messages"]) == 8 and asked["tools"] == TOOLS
    assert asked["messages"][:-1] == endpoint.bodies[2]["messages"] + asked["messages"][5:7]
    step = ["assistant:None", "tool:ok"]
    assert contents(after) == ["user:mark crm A01 as gold", "user:summary:A01.tier=gold;", *step, *step]
    assert contents(later) == [*contents(after), *step]
    assert endpoint.rewrites == [None, None, None, None, "summary_replacement", None]
    turns = [e for e in run.trace if e["kind"] == "turn"]
    assert [t["rewrite"] for t in turns] == [None, None, None, None, "summary_replacement", None]


def test_a_second_summary_replaces_the_first_and_an_empty_one_reads_none() -> None:
    script = [
        *[calls(GET, prompt=50)] * 3,
        text("", prompt=60),
        calls(GET, prompt=50),
        text("B02.qty=1;"),
        text("done"),
    ]
    run, endpoint, _ = play(script, compacting("summary"))
    assert run.compactions == 2
    assert contents(endpoint.bodies[4])[1] == "user:summary:none"
    assert contents(endpoint.bodies[6])[:2] == ["user:mark crm A01 as gold", "user:summary:B02.qty=1;"]


def test_compactions_are_bounded_and_count_as_turns() -> None:
    run, endpoint, _ = play([calls(GET, prompt=90)], compacting("summary"), Budget(turns=15, tool_calls=99, tokens=999))
    assert run.outcome is Outcome.timed_out and run.compactions == 3 and run.turns == 15
    assert endpoint.rewrites.count("summary_replacement") == 3
    assert sum(contents(b)[-1] == "user:summary" for b in endpoint.bodies) == 3


def test_pruning_blanks_old_tool_results_without_a_model_turn() -> None:
    script = [calls(GET, prompt=10), calls(GET, prompt=20), calls(GET, prompt=60), text("done")]
    run, endpoint, _ = play(script, compacting("pruning"))
    assert (run.turns, run.compactions) == (4, 1)
    assert [m["content"] for m in endpoint.bodies[3]["messages"] if m["role"] == "tool"] == ["pruned", "ok", "ok"]
    assert endpoint.bodies[3]["messages"][2]["tool_call_id"] == "call0crm_get"
    assert endpoint.rewrites == [None, None, None, "history_pruning"]


def test_a_summary_by_the_harness_lists_the_calls_without_a_model_turn() -> None:
    long = ("crm_get", '{"id":"' + "A" * 100 + '"}')
    script = [calls(GET, BAD, prompt=10), calls(long, prompt=20), calls(GET, prompt=60), text("done")]
    run, endpoint, _ = play(script, compacting("harness_summary", keep_last=1))
    assert (run.turns, run.compactions) == (4, 1) and endpoint.rewrites == [None, None, None, "summary_replacement"]
    first = 'crm_get{"id":"A01"}=ok;crm_bad{}={"error":"not_found"};'
    second = 'crm_get{"id":"' + "A" * 73 + "…=ok;"
    assert contents(endpoint.bodies[3]) == [REQUEST, f"user:summary:{first}{second}", *STEP]


def test_a_second_summary_by_the_harness_holds_what_the_first_did_up_to_24_calls() -> None:
    script = [calls(*[GET] * 15, prompt=90), calls(BAD, prompt=90), calls(GET, prompt=90), *[calls(*[GET] * 9)] * 2]
    harness = compacting("harness_summary", keep_last=1, max_times=9)
    _, endpoint, _ = play(
        [*script, calls(GET, prompt=90), text("done")], harness, Budget(turns=99, tool_calls=99, tokens=999)
    )
    one = 'crm_get{"id":"A01"}=ok;'
    bad = 'crm_bad{}={"error":"not_found"};'
    assert contents(endpoint.bodies[2])[1] == "user:summary:" + 15 * one
    assert contents(endpoint.bodies[3])[1] == "user:summary:" + 15 * one + bad
    assert contents(endpoint.bodies[6])[1] == "user:summary:11 before;" + 4 * one + bad + 19 * one


def recovering(**more: Any) -> Harness:
    return composed({"kind": "recovery", **more}, {"kind": "budgets"}, {"kind": "trace"})


@pytest.mark.parametrize(
    ("context", "rewrite", "after"),
    [
        ("harness_summary", "summary_replacement", [REQUEST, 'user:summary:crm_get{"id":"A01"}=ok;', *STEP]),
        ("pruning", "history_pruning", [REQUEST, "assistant:None", "tool:pruned", *STEP]),
    ],
)
def test_a_refused_prompt_is_rewritten_and_tried_once_more(context: str, rewrite: str, after: list[str]) -> None:
    harness = recovering(context=context)
    run, endpoint, _ = play([calls(GET), calls(GET), TOO_LONG, text("done")], harness)
    assert (run.outcome, run.turns, run.compactions) == (Outcome.completed, 3, 1)
    assert contents(endpoint.bodies[3]) == after and endpoint.rewrites == [None, None, None, rewrite]
    assert harness.rules.announced == (rewrite,)
    assert {"kind": "recovery", "after": "context_length_exceeded"} in run.trace
    run, endpoint, _ = play([calls(GET), calls(GET), TOO_LONG], harness)
    assert (run.outcome, run.turns, len(endpoint.bodies)) == (Outcome.timed_out, 2, 4)


@pytest.mark.parametrize(("context", "steps"), [("end", 2), ("harness_summary", 0), ("pruning", 1)])
def test_a_refused_prompt_ends_the_episode_when_nothing_may_or_can_be_cut(context: str, steps: int) -> None:
    run, endpoint, _ = play([calls(GET)] * steps + [TOO_LONG], recovering(context=context))
    assert (run.outcome, len(endpoint.bodies)) == (Outcome.timed_out, steps + 1)


def test_a_refused_summary_turn_is_recovered_without_the_policy() -> None:
    part = {"kind": "compaction", "mode": "summary", "budget_tokens": 100, "trigger": 0.5}
    harness = composed({"kind": "recovery"}, part, {"kind": "budgets"})
    run, endpoint, _ = play([*[calls(GET, prompt=60)] * 3, TOO_LONG, text("done")], harness)
    assert run.outcome is Outcome.completed
    assert contents(endpoint.bodies[3])[-1] == "user:summary"
    assert contents(endpoint.bodies[4]) == [REQUEST, "user:summary:" + 2 * 'crm_get{"id":"A01"}=ok;', *STEP]


def test_a_cut_turn_goes_on_once_and_then_fails() -> None:
    cut = text("first half", finish="length")
    run, endpoint, _ = play([cut, text("second half")], recovering(cut_message="more"))
    assert (run.outcome, run.answer, run.turns) == (Outcome.completed, "second half", 2)
    assert contents(endpoint.bodies[1]) == [REQUEST, "assistant:first half", "user:more"]
    run, endpoint, _ = play([cut], recovering())
    assert (run.outcome, len(endpoint.bodies)) == (Outcome.agent_failed, 2)
    run, endpoint, _ = play([cut], recovering(cut_turns=0))
    assert (run.outcome, len(endpoint.bodies)) == (Outcome.agent_failed, 1)


def test_a_cut_turn_with_calls_is_a_turn_like_any_other() -> None:
    run, endpoint, _ = play([calls(GET, finish="length"), text("done")], recovering())
    assert run.outcome is Outcome.completed and contents(endpoint.bodies[1]) == [REQUEST, *STEP]


def test_a_loop_of_failing_calls_is_warned_of_once_and_then_ended() -> None:
    harness = recovering(failing_calls=2, failing_message="stop")
    run, endpoint, dispatched = play([calls(BAD)], harness)
    assert (run.outcome, len(dispatched)) == (Outcome.agent_failed, 4) and "2 calls in a row failed" in run.error
    assert [contents(b)[-1] for b in endpoint.bodies] == [
        REQUEST,
        'tool:{"error":"not_found"}',
        "user:stop",
        'tool:{"error":"not_found"}',
    ]
    run, _, _ = play([calls(BAD), calls(BAD, GET), calls(BAD), calls(GET), calls(BAD), text("done")], harness)
    assert run.outcome is Outcome.completed and run.failed_calls == 4


def raising(name: str, arguments: str) -> Result:
    raise OSError("disk full")


@pytest.mark.parametrize(
    ("tool", "error"),
    [
        (raising, "tool crm_get failed: OSError: disk full"),
        (lambda name, arguments: None, "tool crm_get failed: AttributeError"),
        (lambda name, arguments: Result(b"x"), "tool crm_get failed: AttributeError"),  # type: ignore[arg-type]
        (lambda name, arguments: Result("\ud800"), "tool crm_get failed: UnicodeEncodeError"),
    ],
)
def test_a_tool_that_raises_or_answers_nonsense_is_infrastructure(tool: Any, error: str) -> None:
    run, _, _ = play([calls(GET)], tool=tool)
    assert run.outcome is Outcome.infra_failed and run.error.startswith(error) and run.turns == 1


def test_a_tool_that_hangs_is_given_up_after_wall_time() -> None:
    never = threading.Event()
    budget = Budget(turns=9, tool_calls=9, tokens=99, wall_seconds=0.2)
    harness = composed({"kind": "budgets", "stall_seconds": 0.1})
    try:
        run, endpoint, _ = play([calls(GET)], harness, budget, lambda name, arguments: never.wait() and Result("ok"))
    finally:
        never.set()
    assert (run.outcome, run.turns, len(endpoint.bodies)) == (Outcome.infra_failed, 1, 1)
    assert run.error == "tool crm_get was pending for 0 s when wall time ended"


def test_a_tool_under_way_when_wall_time_ends_finishes_first() -> None:
    """Nothing may change the world while it is graded."""
    done: list[str] = []

    def slow(name: str, arguments: str) -> Result:
        threading.Event().wait(0.3)
        done.append(name)
        return Result("ok")

    budget = Budget(turns=9, tool_calls=9, tokens=99, wall_seconds=0.2)
    run, endpoint, _ = play([calls(GET, GET)], composed({"kind": "budgets"}), budget, slow)
    assert (run.outcome, done, run.tool_calls, len(endpoint.bodies)) == (Outcome.timed_out, ["crm_get"], 1, 1)
    assert run.error == "wall time of 0.2 s is used up"


@pytest.mark.parametrize(
    "message",
    [
        {"content": 5},
        {"tool_calls": [{"id": None, "function": {"name": "crm_get", "arguments": "{}"}}]},
        {"tool_calls": [{"id": "a", "function": {"name": "crm_get", "arguments": {}}}]},
        {"tool_calls": "crm_get"},
        "hello",
    ],
)
def test_an_answer_of_the_wrong_shape_is_infrastructure(message: Any) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    answer = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
    run, _, _ = play([answer])
    assert run.outcome is Outcome.infra_failed and "no chat completion" in run.error


def test_a_fault_of_the_harness_itself_is_infrastructure_and_keeps_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, call: Any, content: str) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("occamy.harness.conversation.Conversation.observe", broken)
    run, _, _ = play([calls(GET)])
    assert (run.outcome, run.error) == (Outcome.infra_failed, "the harness failed: ZeroDivisionError: oops")
    assert (run.turns, run.tool_calls) == (1, 1) and len(run.trace) == 2
