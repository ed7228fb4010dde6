"""The loops: when the model is asked, and what is done with what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from occamy.harness import parts
from occamy.harness.assignment import Observation
from occamy.harness.conversation import Call, Conversation, Reply
from occamy.harness.middleware import Act, Turn


@dataclass(frozen=True)
class Chain:
    """The middleware composed around the bare model turn and the bare tool call, for one agent."""

    turn: Turn
    act: Act
    delegate: str | None = None
    """Name of the tool whose calls may run at the same time."""


async def play(loop: parts.Loop, conversation: Conversation, chain: Chain, max_tokens: int) -> Reply:
    """Run the agent until a turn asks for no tools; return that turn."""
    match loop:
        case parts.ReactLoop():
            return await _react(conversation, chain, max_tokens)
        case parts.PlanActLoop():
            return await _plan_act(loop, conversation, chain, max_tokens)


async def _react(conversation: Conversation, chain: Chain, max_tokens: int) -> Reply:
    while True:
        reply = await chain.turn(conversation, max_tokens)
        conversation.say(reply)
        if not reply.calls:
            return reply
        await _act_on(reply.calls, conversation, chain)


async def _plan_act(part: parts.PlanActLoop, conversation: Conversation, chain: Chain, max_tokens: int) -> Reply:
    plans, failed = 0, part.replan_after  # so that the first turn plans
    while True:
        planning = failed >= part.replan_after and plans < part.max_plans
        if planning:
            plans, failed = plans + 1, 0
            conversation.tell(part.ask)
        reply = await chain.turn(conversation, max_tokens)
        conversation.say(reply)
        if planning and not reply.calls:
            conversation.keep_plan(reply.text)
            conversation.tell(part.act)
        elif not reply.calls:
            return reply
        for observation in await _act_on(reply.calls, conversation, chain):
            failed = 0 if observation.ok else failed + 1


async def _act_on(calls: Sequence[Call], conversation: Conversation, chain: Chain) -> list[Observation]:
    """Run the calls of a turn in order, neighbouring delegations at the same time, and show the results in order."""
    observations: list[Observation] = []
    for together, group in groupby(calls, key=lambda call: call.name == chain.delegate):
        batch = list(group)
        if together:
            results = await _all(chain.act, batch)
        else:
            results = [await chain.act(call) for call in batch]
        observations += results
    for call, observation in zip(calls, observations):
        conversation.observe(call, observation.content)
    return observations


async def _all(act: Act, calls: Sequence[Call]) -> list[Observation]:
    """Run calls at the same time, each to its end; then raise the first error in their order, if any."""
    results = await asyncio.gather(*(act(call) for call in calls), return_exceptions=True)
    observations: list[Observation] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        observations.append(result)
    return observations
