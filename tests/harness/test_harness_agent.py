"""The agent against a scripted endpoint: what it sends, when it rewrites, how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from aiohttp import web

from occamy.contracts.episode import Outcome
from occamy.contracts.task import Budget
from occamy.harness.agent import ComposedHarness
from occamy.harness.assignment import AgentRun, Assignment, Harness
from occamy.harness.client import open_http
from occamy.harness.compose import resolve
from occamy.harness.loading import load
from occamy.harness.middleware import TypedError

TOOLS = [{"type": "function", "function": {"name": "crm_get", "parameters": {"type": "object"}}}]


@dataclass(frozen=True)
class Result:
    content: str
    ok: bool = True
    error: str | None = None


@dataclass
class Endpoint:
    """Answers requests from a script; keeps what it was sent."""

    script: list[Any]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    rewrites: list[str | None] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        raw = await request.read()
        self.raw.append(raw)
        self.bodies.append(json.loads(raw))
        self.rewrites.append(request.headers.get("x-occamy-rewrite"))
        self.keys.append(request.headers.get("authorization"))
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, float):
            await asyncio.sleep(step)
            step = text("late")
        status, body = step if isinstance(step, tuple) else (200, step)
        return web.Response(status=status, body=body if isinstance(body, bytes) else orjson.dumps(body))


def calls(*pairs: tuple[str, str], prompt: int = 10, output: int = 5, finish: str = "tool_calls") -> dict[str, Any]:
    tool_calls = [
        {"id": f"call{n}{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(pairs)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": tool_calls}
    return completion(message, prompt, output, finish)


def text(content: str, prompt: int = 10, output: int = 5, finish: str = "stop") -> dict[str, Any]:
    return completion({"role": "assistant", "content": content}, prompt, output, finish)


def completion(message: dict[str, Any], prompt: int, output: int, finish: str) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}


GET = ("crm_get", '{"id":"A01"}')


def composed(data: dict[str, Any]) -> Harness:
    return ComposedHarness(resolve(data))


def play(
    script: Sequence[Any],
    harness: Harness | None = None,
    budget: Budget | None = None,
) -> tuple[AgentRun, Endpoint, list[tuple[str, str]]]:
    """Run an agent against a script. Returns its run, the endpoint and what was dispatched."""
    endpoint, dispatched = Endpoint(list(script)), []

    def dispatch(name: str, arguments: str) -> Result:
        dispatched.append((name, arguments))
        return Result("ok") if name != "crm_bad" else Result('{"error":"not_found"}', False, "not_found")

    async def run() -> AgentRun:
        app = web.Application()
        app.router.add_post("/episodes/e/root/v1/chat/completions", endpoint.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        task = Assignment(
            request="mark crm A01 as gold",
            tools=TOOLS,
            dispatch=dispatch,
            budget=budget or Budget(turns=20, tool_calls=20, tokens=1000),
            base_url=f"http://127.0.0.1:{port}/episodes/e/root/v1",
            api_key="key",
            model="nano",
            temperature=1.0,
            max_new_tokens=48,
            http=open_http(),
        )
        try:
            async with task.http:
                return await (harness or load("react")).run(task)
        finally:
            await runner.cleanup()

    return asyncio.run(run()), endpoint, dispatched


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
    stalling = composed({"name": "s", "middleware": [{"kind": "budgets", "stall_seconds": 0.1}]})
    run, _, _ = play([calls(GET), 5.0], stalling, budget)
    assert run.outcome is Outcome.infra_failed and "pending" in run.error


QUICK = composed({"name": "q", "middleware": [{"kind": "retry", "attempts": 3, "backoff_seconds": 0.001}]})


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
    refusal = (400, {"error": {"message": "maximum context length is 64", "code": "context_length_exceeded"}})
    run, _, _ = play([calls(GET), refusal])
    assert (run.outcome, run.turns, run.error) == (Outcome.timed_out, 1, "maximum context length is 64")


@pytest.mark.parametrize(("content", "finish"), [("dd d d", "length"), ("", "stop"), (" ", "stop")])
def test_a_cut_or_empty_answer_is_no_completion(content: str, finish: str) -> None:
    run, _, _ = play([text(content, finish=finish)])
    assert (run.outcome, run.answer) == (Outcome.agent_failed, "")


def compacting(mode: str, **more: Any) -> Harness:
    part = {"kind": "compaction", "mode": mode, "budget_tokens": 100, "trigger": 0.5, "characters_per_token": 2, **more}
    return composed({"name": "c", "middleware": [part, {"kind": "budgets"}, {"kind": "trace"}]})


def roles(body: dict[str, Any]) -> list[str]:
    return [f"{m['role']}:{m['content']}" for m in body["messages"]]


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
    assert roles(asked)[-1] == "user:summary" and len(asked["messages"]) == 8 and asked["tools"] == TOOLS
    assert asked["messages"][:-1] == endpoint.bodies[2]["messages"] + asked["messages"][5:7]
    step = ["assistant:None", "tool:ok"]
    assert roles(after) == ["user:mark crm A01 as gold", "user:summary:A01.tier=gold;", *step, *step]
    assert roles(later) == [*roles(after), *step]
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
    assert roles(endpoint.bodies[4])[1] == "user:summary:none"
    assert roles(endpoint.bodies[6])[:2] == ["user:mark crm A01 as gold", "user:summary:B02.qty=1;"]


def test_compactions_are_bounded_and_count_as_turns() -> None:
    run, endpoint, _ = play([calls(GET, prompt=90)], compacting("summary"), Budget(turns=15, tool_calls=99, tokens=999))
    assert run.outcome is Outcome.timed_out and run.compactions == 3 and run.turns == 15
    assert endpoint.rewrites.count("summary_replacement") == 3
    assert sum(roles(b)[-1] == "user:summary" for b in endpoint.bodies) == 3


def test_pruning_blanks_old_tool_results_without_a_model_turn() -> None:
    script = [calls(GET, prompt=10), calls(GET, prompt=20), calls(GET, prompt=60), text("done")]
    run, endpoint, _ = play(script, compacting("pruning"))
    assert (run.turns, run.compactions) == (4, 1)
    assert [m["content"] for m in endpoint.bodies[3]["messages"] if m["role"] == "tool"] == ["pruned", "ok", "ok"]
    assert endpoint.bodies[3]["messages"][2]["tool_call_id"] == "call0crm_get"
    assert endpoint.rewrites == [None, None, None, "history_pruning"]
