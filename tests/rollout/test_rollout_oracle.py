"""The scripted oracle: its plan, its answers, what it remembers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from occamy.contracts.task import (
    Budget,
    FieldEquals,
    FieldSpec,
    Grading,
    Metadata,
    TaskContract,
    ToolCall,
    WorldSpec,
)
from occamy.rollout.jobs import EpisodeJob, derive_seed, make_jobs
from occamy.rollout.oracle import OracleTeacher, Script, plan

UPDATE = ToolCall(name="crm_update", arguments={"id": "A01", "tier": "gold", "visits": 3})
CREATE = ToolCall(name="crm_create", arguments={"tier": "gold"})
WRITE = ToolCall(name="file_write", arguments={"path": "notes", "text": "12"})
GET = ToolCall(name="crm_get", arguments={"id": "A01"})


def contract(reference: tuple[ToolCall, ...], turns: int = 20, faults: tuple[int, ...] = ()) -> TaskContract:
    tier = FieldSpec(kind="enum", values=("gold", "basic"))
    world = WorldSpec(
        services={"crm": {"tier": tier, "visits": FieldSpec(kind="int")}},
        records={"crm": {"A01": {"tier": "basic", "visits": 1}}},
        fresh_ids=("F03",),
        faults=faults,
    )
    meta = Metadata(
        task_id="t-1",
        pool="short",
        split="train",
        route="environment_first",
        capabilities=("act",),
        templates=("set",),
        seed=1,
        budget=Budget(turns=turns, tool_calls=turns, tokens=999),
    )
    goal = FieldEquals(service="crm", id="A01", field="tier", value="gold")
    grading = Grading(goals=(goal,), reference=reference)
    return TaskContract(
        request="mark crm A01 as gold",
        world=world,
        tools=("crm_get", "crm_search", "crm_update", "crm_create", "file_write"),
        grading=grading,
        meta=meta,
    )


def said(message: dict[str, Any]) -> str:
    if message.get("tool_calls"):
        function = message["tool_calls"][0]["function"]
        return f"{function['name']}{function['arguments']}"
    return str(message["content"])


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "x", "content": content}


def test_reference_is_played_in_order_with_compact_arguments_then_answered() -> None:
    script = Script([GET, UPDATE], "done")
    history = [user("go")]
    assert said(script.reply(history)) == 'crm_get{"id":"A01"}'
    history = [*history, {"role": "assistant"}, tool('{"tier":"basic"}')]
    assert said(script.reply(history)) == 'crm_update{"id":"A01","tier":"gold","visits":3}'
    history = [*history, {"role": "assistant"}, tool("ok")]
    assert said(script.reply(history)) == "done"


def test_an_unavailable_call_and_a_repeated_request_give_the_same_call() -> None:
    script = Script([GET, UPDATE], "done")
    first = script.reply([user("go")])
    assert script.reply([user("go")]) == first
    again = [user("go"), {"role": "assistant"}, tool('{"error":"unavailable"}')]
    assert said(script.reply(again)) == said(first)
    assert said(script.reply([*again, {"role": "assistant"}, tool("{}")])).startswith("crm_update")


def test_summary_lists_successful_writes_and_survives_the_rewrite() -> None:
    script = Script([UPDATE, WRITE, CREATE, GET], "done")
    history = [user("go")]
    script.reply(history)
    assert said(Script([], "done").reply([user("go"), user("summary")])) == "none"
    for result in ("ok", "ok"):
        history = [*history, {"role": "assistant"}, tool(result)]
        script.reply(history)
    history = [*history, {"role": "assistant"}, tool('{"id":"F03"}')]
    assert said(script.reply([*history, user("summary")])) == "A01.tier=gold;A01.visits=3;notes=12;F03=new;"
    rewritten = [user("go"), user("summary:A01.tier=gold;"), {"role": "assistant"}, tool('{"id":"F03"}')]
    assert said(script.reply(rewritten)) == 'crm_get{"id":"A01"}'


def test_failed_writes_are_not_in_the_summary() -> None:
    script = Script([UPDATE, CREATE], "done")
    script.reply([user("go")])
    script.reply([user("go"), tool('{"error":"not_found"}')])
    assert said(script.reply([user("go"), tool('{"error":"conflict"}'), user("summary")])) == "none"


def test_redundant_reads_surround_updates_within_the_budget() -> None:
    rng = random.Random(1)
    assert plan(contract((UPDATE, CREATE)), 0.0, rng) == [UPDATE, CREATE]
    plans = [plan(contract((UPDATE, CREATE)), 1.0, rng) for _ in range(40)]
    assert {len(p) for p in plans} == {3, 4}  # always one before, half the time one after
    assert all(p[:2] == [GET, UPDATE] and p[-1] == CREATE for p in plans)
    assert plan(contract((GET, UPDATE, CREATE)), 1.0, rng)[:2] == [GET, UPDATE]  # already read: not twice
    tight = contract((UPDATE, UPDATE, CREATE), turns=8, faults=(0,))  # 3 calls, 1 fault, 4 spare turns: no room
    assert plan(tight, 1.0, rng) == [UPDATE, UPDATE, CREATE]


def test_jobs_are_named_and_seeded_per_attempt() -> None:
    task = contract((UPDATE,))
    jobs = list(make_jobs([task], trials=2, seed=5, sampled_by="policy", temperature=1.0, model="m"))
    assert [j.episode_id for j in jobs] == ["t-1.0", "t-1.1"]
    assert jobs[0].seed == derive_seed(5, "t-1", 0) != jobs[1].seed and 0 <= jobs[0].seed < 2**31
    assert jobs[0].digest() != jobs[1].digest() == jobs[1].digest()


def test_teacher_keeps_episodes_apart() -> None:
    teacher = OracleTeacher(0.0)
    for name, calls in (("a", (GET,)), ("b", (UPDATE,))):
        teacher.enrol(EpisodeJob(name, contract(calls), 0, 1, "teacher", 0.0, "oracle"))

    async def both() -> list[str]:
        return [said(await teacher.complete(n, {"messages": [user("go")]})) for n in ("a", "b", "a")]

    assert [s.partition("{")[0] for s in asyncio.run(both())] == ["crm_get", "crm_update", "crm_get"]
