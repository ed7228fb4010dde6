"""The agent against a scripted endpoint: what it sends, when it rewrites, how it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_endpoint import GET, TOO_LONG, TOOLS, Result, calls, composed, play, text

from occamy.contracts.episode import Outcome
from occamy.contracts.task import Budget
from occamy.harness.assignment import AgentRun, Assignment
from occamy.harness.client import open_http
from occamy.harness.loading import load
from occamy.harness.middleware import TypedError


def test_calls_are_run_and_shown_until_a_plain_text() -> None:
    run, endpoint, dispatched = play([calls(GET, ("crm_bad", "{}")), text("done")])
    assert (run.outcome, run.answer, run.turns, run.tool_calls, run.failed_calls) == (
        Outcome.completed,
        "done",
        2,
        2,
        1,
    )
    assert dispatched == [GET, ("crm_bad", "{}")]
    first, second = endpoint.bodies
    assert first == {
        "model": "nano",
        "temperature": 1.0,
        "max_tokens": 48,
        "tools": TOOLS,
        "messages": [{"role": "user", "content": "mark crm A01 as gold"}],
    }
    assistant = calls(GET, ("crm_bad", "{}"))["choices"][0]["message"]
    assert second["messages"][1:] == [
        assistant,
        {"role": "tool", "tool_call_id": "call0crm_get", "content": "ok"},
        {"role": "tool", "tool_call_id": "call1crm_bad", "content": '{"error":"not_found"}'},
    ]
    assert endpoint.keys == ["Bearer key"] * 2 and endpoint.rewrites == [None, None]
    assert [e["kind"] for e in run.trace] == ["turn", "tool", "tool", "turn"]


def test_a_briefed_harness_opens_with_a_system_line() -> None:
    _, endpoint, _ = play([text("done")], load("briefed"))
    assert endpoint.bodies[0]["messages"][0] == {"role": "system", "content": "work"}


@pytest.mark.parametrize("arguments", ['{"id":', "[]", "", '"x"'])
def test_broken_arguments_become_a_typed_error_and_are_not_dispatched(arguments: str) -> None:
    run, endpoint, dispatched = play([calls(("crm_get", arguments)), text("done")])
    assert dispatched == [] and run.failed_calls == 1 and run.outcome is Outcome.completed
    assert endpoint.bodies[1]["messages"][-1]["content"] == TypedError("invalid_argument").content


@pytest.mark.parametrize(
    ("budget", "turns", "tool_calls", "error"),
    [
        (Budget(turns=3, tool_calls=9, tokens=999), 3, 3, "3 turns"),
        (Budget(turns=9, tool_calls=2, tokens=999), 3, 2, "2 tool_calls"),
        (Budget(turns=9, tool_calls=9, tokens=12), 3, 3, "12 tokens"),
    ],
)
def test_budgets_end_an_agent_that_never_finishes(budget: Budget, turns: int, tool_calls: int, error: str) -> None:
    run, endpoint, _ = play([calls(GET)], budget=budget)
    assert run.outcome is Outcome.timed_out and error in run.error
    assert (run.turns, run.tool_calls) == (turns, tool_calls)
    assert [b["max_tokens"] for b in endpoint.bodies] == ([12, 7, 2] if budget.tokens == 12 else [48] * turns)


def test_wall_time_is_the_agents_unless_the_endpoint_stalls() -> None:
    budget = Budget(turns=9, tool_calls=9, tokens=99, wall_seconds=0.2)
    run, _, _ = play([calls(GET), 5.0], budget=budget)
    assert (run.outcome, run.error) == (Outcome.timed_out, "wall time of 0.2 s is used up")
    stalling = composed({"kind": "budgets", "stall_seconds": 0.1})
    run, _, _ = play([calls(GET), 5.0], stalling, budget)
    assert run.outcome is Outcome.infra_failed and "pending" in run.error


QUICK = composed({"kind": "retry", "attempts": 3, "backoff_seconds": 0.001})


def test_server_errors_are_retried_byte_for_byte() -> None:
    run, endpoint, _ = play([(500, b"boom"), (503, {"error": {"message": "busy", "code": "x"}}), text("done")], QUICK)
    assert run.outcome is Outcome.completed and run.turns == 1
    assert len(endpoint.raw) == 3 and len(set(endpoint.raw)) == 1


@pytest.mark.parametrize(
    ("answer", "tries", "error"),
    [
        ((500, b"boom"), 3, "HTTP 500: boom"),
        ((401, {"error": {"message": "bad key", "code": "invalid_api_key"}}), 1, "HTTP 401: bad key"),
        ((503, {"error": {"message": "held", "code": "engine_unavailable"}}), 1, "HTTP 503: held"),
        ((200, b"no json"), 1, "no chat completion"),
        ((200, {"choices": []}), 1, "no chat completion"),
    ],
)
def test_an_endpoint_that_fails_is_infrastructure(answer: Any, tries: int, error: str) -> None:
    run, endpoint, _ = play([answer], QUICK)
    assert run.outcome is Outcome.infra_failed and error in run.error and len(endpoint.raw) == tries


def test_nobody_listening_is_infrastructure() -> None:
    async def run() -> AgentRun:
        budget = Budget(turns=9, tool_calls=9, tokens=99)
        async with open_http() as http:
            url = "http://127.0.0.1:1/v1"
            return await QUICK.run(Assignment("x", [], lambda n, a: Result("ok"), budget, url, "k", "m", 1.0, 8, http))

    assert asyncio.run(run()).outcome is Outcome.infra_failed


def test_context_limit_ends_the_episode_as_timed_out() -> None:
    run, _, _ = play([calls(GET), TOO_LONG])
    assert (run.outcome, run.turns, run.error) == (Outcome.timed_out, 1, "maximum context length is 64")


@pytest.mark.parametrize(("content", "finish"), [("dd d d", "length"), ("", "stop"), (" ", "stop")])
def test_a_cut_or_empty_answer_is_no_completion(content: str, finish: str) -> None:
    run, _, _ = play([text(content, finish=finish)])
    assert (run.outcome, run.answer) == (Outcome.agent_failed, "")
