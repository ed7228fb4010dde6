"""Delegation against a scripted endpoint: what children see, how they run side by side, what they may spend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_endpoint import GET, REQUEST, TOO_LONG, TOOLS, Result, calls, composed, contents, play, text

from occamy.contracts.episode import Outcome
from occamy.contracts.task import Budget
from occamy.harness.agent import ComposedHarness
from occamy.harness.assignment import Harness
from occamy.harness.compose import CompositionError, resolve
from occamy.harness.conversation import Conversation, Reply
from occamy.harness.subagents import Rounds

WIDE = Budget(turns=100, tool_calls=100, tokens=10_000)


def delegating(**part: Any) -> Harness:
    return composed({"kind": "subagents", **part}, {"kind": "budgets"}, {"kind": "trace"}, prompt={"layout": "briefed"})


def hand(goal: str, **more: str) -> tuple[str, str]:
    return ("delegate", json.dumps({"goal": goal, **more}))


def goal_of(body: dict[str, Any]) -> str | None:
    """The goal that a child's request shows, None for the root's."""
    first = next((m["content"] for m in body["messages"] if str(m["content"]).startswith("task ")), None)
    return None if first is None else first.partition(": ")[2]


def cast(**scripts: list[Any]) -> Callable[[dict[str, Any]], Any]:
    """A brain: `root` and each goal follow a script of their own."""
    left: dict[str, Iterator[Any]] = {name: iter(steps) for name, steps in scripts.items()}
    return lambda body: next(left[goal_of(body) or "root"])


def test_an_isolated_child_sees_its_goal_only_and_hands_its_text_back() -> None:
    brain = cast(root=[calls(hand("look")), text("done")], look=[calls(GET), text("A01 is silver")])
    run, endpoint, dispatched = play(brain, delegating())
    assert (run.outcome, run.answer, dispatched) == (Outcome.completed, "done", [GET])
    assert (run.turns, run.children, run.tool_calls) == (2, 1, 2)
    assert endpoint.runs == ["root", "sub", "sub", "root"] and endpoint.keys == ["Bearer key"] * 4
    root, child, child_later, root_later = endpoint.bodies
    assert contents(child) == ["system:work", "user:task 1: look"]
    assert contents(child_later)[2:] == ["assistant:None", "tool:ok"]
    assert root_later["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "call0delegate",
        "content": "A01 is silver",
    }
    assert root["tools"][:1] == TOOLS and root["tools"][1]["function"]["name"] == "delegate"
    assert root["tools"][1]["function"]["parameters"]["properties"] == {"goal": {"type": "string"}}
    assert child["tools"] == TOOLS  # too deep to delegate
    [event] = [e for e in run.trace if e["kind"] == "subagent"]
    assert (event["number"], event["mode"], event["outcome"], event["turns"]) == (1, "isolated", "completed", 2)
    assert [e["kind"] for e in event["events"]] == ["turn", "tool", "turn"]


def test_a_fork_starts_from_its_parents_history_before_the_turn_that_called_it() -> None:
    brain = cast(root=[calls(GET), calls(GET, hand("look")), text("done")], look=[text("seen")])
    run, endpoint, _ = play(brain, delegating(modes=["fork"]))
    _, parent, child, _ = endpoint.bodies
    assert run.answer == "done" and endpoint.runs == ["root", "root", "sub", "root"]
    assert child["messages"] == [*parent["messages"], {"role": "user", "content": "task 1: look"}]
    assert child["tools"] == parent["tools"]  # so that the prompts share a prefix


def test_a_rewrite_in_a_fork_keeps_what_it_was_forked_from() -> None:
    part = {"kind": "compaction", "mode": "harness_summary", "budget_tokens": 100, "trigger": 0.5, "keep_last": 1}
    harness = composed({"kind": "subagents", "modes": ["fork"]}, part, {"kind": "budgets"})
    child = [calls(GET), calls(GET, prompt=60), text("seen")]
    _, endpoint, _ = play(cast(root=[calls(GET), calls(hand("look")), text("done")], look=child), harness)
    step = ["assistant:None", "tool:ok"]
    history = [f"user:{REQUEST}", *step, "user:task 1: look"]
    assert contents(endpoint.bodies[2]) == history
    assert contents(endpoint.bodies[4]) == [*history, 'user:summary:crm_get{"id":"A01"}=ok;', *step]
    assert endpoint.rewrites == [None, None, None, None, "summary_replacement", None]


def test_the_model_chooses_the_mode_when_both_are_offered() -> None:
    brain = cast(root=[calls(hand("a"), hand("b", mode="fork")), text("done")], a=[text("1")], b=[text("2")])
    run, endpoint, _ = play(brain, delegating(modes=["isolated", "fork"]))
    assert run.outcome is Outcome.completed
    modes = endpoint.bodies[0]["tools"][1]["function"]["parameters"]["properties"]["mode"]
    assert modes == {"type": "string", "enum": ["isolated", "fork"]}
    children = sorted((contents(body) for body in endpoint.bodies[1:3]), key=len)
    assert children == [["system:work", "user:task 1: a"], ["system:work", f"user:{REQUEST}", "user:task 2: b"]]


def test_neighbouring_delegations_run_side_by_side_and_act_in_their_order() -> None:
    """Both children are asked before either is answered; the first is answered last and still acts first."""
    seen: list[str] = []
    late = {"a": 0.05, "b": 0.0}

    def brain(body: dict[str, Any]) -> Any:
        goal = goal_of(body)
        if goal is None:
            results = [m["content"] for m in body["messages"] if m["role"] == "tool"]
            return text("|".join(results)) if results else calls(hand("a"), hand("b"), GET)
        turn = sum(m["role"] == "assistant" for m in body["messages"])
        seen.append(f"{goal}{turn}")
        step = calls(("crm_get", json.dumps({"id": f"{goal}{turn}"}))) if turn < 2 else text(f"{goal} done")
        return (200, step, late[goal])

    run, _, dispatched = play(brain, delegating())
    assert run.answer == "a done|b done|ok"
    assert [json.loads(arguments)["id"] for _, arguments in dispatched] == ["a0", "b0", "a1", "b1", "A01"]
    assert seen[:2] == ["a0", "b0"]


def test_no_more_children_run_at_once_than_declared() -> None:
    running, most = set(), 0

    def brain(body: dict[str, Any]) -> Any:
        nonlocal most
        goal = goal_of(body)
        if goal is None:
            return text("done") if len(body["messages"]) > 2 else calls(*[hand(g) for g in "abcde"])
        running.add(goal)
        most = max(most, len(running))
        if len(body["messages"]) > 2:
            running.discard(goal)
            return (200, text(goal), 0.01)
        return (200, calls(GET), 0.01)

    run, endpoint, _ = play(brain, delegating(max_parallel=2), WIDE)
    assert (run.outcome, run.children, most) == (Outcome.completed, 5, 2)
    assert [m["content"] for m in endpoint.bodies[-1]["messages"][3:]] == list("abcde")


def test_a_child_is_lent_a_share_and_gives_back_what_it_does_not_use() -> None:
    """Of 9 turns the root uses 1 and lends a child a quarter of 8, 2; it has 6 left, and uses 6 of what came back."""
    budget = Budget(turns=9, tool_calls=40, tokens=1000)
    brain = cast(root=[calls(hand("a")), *[calls(GET)] * 9], a=[calls(GET)] * 9)
    run, endpoint, _ = play(brain, delegating(), budget)
    assert (run.outcome, run.turns, endpoint.runs.count("sub")) == (Outcome.timed_out, 7, 2)
    assert "budget of 9 turns" in run.error
    assert endpoint.bodies[3]["messages"][-1]["content"] == '{"error":"timed_out"}'
    [event] = [e for e in run.trace if e["kind"] == "subagent"]
    assert event["error"] == "budget of 2 turns is used up"
    brain = cast(root=[calls(hand("a")), *[calls(GET)] * 9], a=[text("at once")])
    run, _, _ = play(brain, delegating(), budget)
    assert (run.outcome, run.turns) == (Outcome.timed_out, 8)


def test_tokens_and_calls_of_children_come_out_of_their_parents() -> None:
    """Of 100 tokens the root samples 5 and lends 95 / 4 = 23; of 8 calls it uses 1 to delegate and lends 7 / 4 = 1."""
    brain = cast(root=[calls(hand("a")), text("done")], a=[calls(GET), calls(GET), text("x")])
    run, endpoint, dispatched = play(brain, delegating(), Budget(turns=50, tool_calls=8, tokens=100))
    assert [body["max_tokens"] for body in endpoint.bodies] == [48, 23, 18, 48]
    assert run.outcome is Outcome.completed and len(dispatched) == 1 and run.tool_calls == 2


def test_a_call_budget_bounds_delegations() -> None:
    brain = cast(root=[calls(hand("a"), hand("b"))], a=[text("x")])
    run, _, _ = play(brain, delegating(), Budget(turns=50, tool_calls=1, tokens=1000))
    assert (run.outcome, run.children) == (Outcome.timed_out, 1) and "1 tool_calls" in run.error


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (("delegate", "{"), "invalid_argument"),
        (("delegate", "[]"), "invalid_argument"),
        (("delegate", "{}"), "invalid_argument"),
        (hand(" "), "invalid_argument"),
        (("delegate", '{"goal":5}'), "invalid_argument"),
        (hand("a", mode="fork"), "invalid_argument"),
        (hand("a", mode="fokr"), "invalid_argument"),
        (hand("a", when="now"), "invalid_argument"),
    ],
)
def test_a_delegation_that_makes_no_sense_is_a_typed_error(call: tuple[str, str], error: str) -> None:
    run, endpoint, dispatched = play([calls(call), text("done")], delegating())
    assert (run.outcome, run.children, run.failed_calls, dispatched) == (Outcome.completed, 0, 1, [])
    assert endpoint.bodies[1]["messages"][-1]["content"] == f'{{"error":"{error}"}}'
    assert {"kind": "tool", "name": "delegate", "error": error} in run.trace


def test_too_many_children_and_too_little_budget_are_typed_errors() -> None:
    brain = cast(root=[calls(hand("a"), hand("b")), text("done")], a=[text("x")])
    _, endpoint, _ = play(brain, delegating(max_children=1))
    assert contents(endpoint.bodies[-1])[-2:] == ["tool:x", 'tool:{"error":"too_many"}']
    _, endpoint, _ = play([calls(hand("a")), text("done")], delegating(), Budget(turns=4, tool_calls=9, tokens=999))
    assert contents(endpoint.bodies[-1])[-1] == 'tool:{"error":"no_budget"}'


def test_depth_is_limited_and_numbers_run_over_the_whole_family() -> None:
    brain = cast(
        root=[calls(hand("a")), calls(hand("c")), text("done")],
        a=[calls(hand("b")), text("a done")],
        b=[calls(hand("x")), text("b done")],
        c=[text("c done")],
    )
    run, endpoint, _ = play(brain, delegating(max_depth=2, share=0.5, modes=["isolated"]), WIDE)
    assert (run.outcome, run.children) == (Outcome.completed, 3)
    firsts = [contents(b)[1] for b, r in zip(endpoint.bodies, endpoint.runs) if r == "sub" and len(b["messages"]) == 2]
    assert firsts == ["user:task 1: a", "user:task 2: b", "user:task 3: c"]
    grandchild = endpoint.bodies[2]
    assert grandchild["tools"] == TOOLS
    assert contents(endpoint.bodies[3])[-1] == 'tool:{"error":"too_deep"}'


@pytest.mark.parametrize(
    ("child", "error"),
    [
        ([text("")], "agent_failed"),
        ([text("cut", finish="length")], "agent_failed"),
        ([calls(GET), TOO_LONG], "timed_out"),
    ],
)
def test_a_child_that_does_not_complete_is_a_typed_error_for_its_parent(child: list[Any], error: str) -> None:
    run, endpoint, _ = play(cast(root=[calls(hand("a")), text("done")], a=child), delegating())
    assert run.outcome is Outcome.completed and run.failed_calls == 1
    assert endpoint.bodies[-1]["messages"][-1]["content"] == f'{{"error":"{error}"}}'


def broken(name: str, arguments: str) -> Result:
    raise OSError("disk full")


@pytest.mark.parametrize(
    ("child", "error"),
    [([(500, b"boom")], "subagent 1: .*HTTP 500: boom"), ([calls(GET)], "subagent 1: tool crm_get failed")],
)
def test_a_child_that_fails_on_infrastructure_fails_the_episode(child: list[Any], error: str) -> None:
    brain = cast(root=[calls(hand("a"), hand("b"))], a=child, b=[text("x")])
    run, _, _ = play(brain, delegating(), tool=broken)
    assert run.outcome is Outcome.infra_failed and run.children == 2
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(run.error)


def test_wall_time_ends_parent_and_children_together() -> None:
    brain = cast(root=[calls(hand("a"), hand("b"))], a=[9.0], b=[text("x")])
    run, _, _ = play(brain, delegating(), Budget(turns=20, tool_calls=20, tokens=1000, wall_seconds=0.2))
    assert (run.outcome, run.turns, run.children) == (Outcome.timed_out, 1, 2) and "wall time" in run.error


def test_a_task_with_a_tool_of_that_name_is_refused() -> None:
    with pytest.raises(CompositionError, match="'crm_get' of its own"):
        play([text("done")], delegating(name="crm_get"))


def test_rules_and_manifest_declare_subagents() -> None:
    assert delegating().rules.subagents and not composed({"kind": "budgets"}).rules.subagents
    plain = {"name": "c", "middleware": [{"kind": "subagents"}, {"kind": "budgets"}]}
    forks = {"name": "c", "middleware": [{"kind": "subagents", "modes": ["fork"]}, {"kind": "budgets"}]}
    assert ComposedHarness(resolve(plain)).digest != ComposedHarness(resolve(forks)).digest


def test_rounds_order_children_whatever_the_timing() -> None:
    """Width 2. Child 4 hangs and is cancelled, 2 takes its place; 2 samples before 1 does; 3 takes the place of 2."""
    acted: list[str] = []
    rounds = Rounds(2)

    async def child(number: int, delays: list[int]) -> None:
        async def sample(conversation: Conversation, delay: int) -> Reply:
            for _ in range(delay):
                await asyncio.sleep(0)
            return Reply("", (), "stop", 1, 1)

        try:
            await rounds.enter(number)
            for turn, delay in enumerate(delays):
                await rounds.turn(number, sample)(Conversation("", "x"), delay)
                acted.append(f"{number}.{turn}")
                await asyncio.sleep(0)
        finally:
            rounds.leave(number)

    async def main() -> None:
        stuck = asyncio.create_task(child(4, [10**9]))
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(child(n, d)) for n, d in ((1, [30, 0]), (2, [0]), (3, [10, 0]))]
        await asyncio.sleep(0)
        stuck.cancel()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert acted == ["1.0", "2.0", "1.1", "3.0", "3.1"]
