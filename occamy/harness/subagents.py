"""Middleware that lets a model delegate: children with budgets of their own, run side by side, results handed off."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from occamy.contracts.episode import Outcome
from occamy.harness import parts
from occamy.harness.assignment import AgentRun, Observation
from occamy.harness.budgets import BudgetEnded, Purse
from occamy.harness.conversation import Call, Conversation, Reply
from occamy.harness.middleware import Act, Event, Turn, TypedError


class ChildFailed(RuntimeError):
    """A child failed on infrastructure, and with it the episode."""


Spawn = Callable[[Conversation, Purse, Callable[[Turn], Turn]], Awaitable[AgentRun]]
"""Runs a child on a conversation and a purse, its model turn wrapped outermost by the last argument."""


@dataclass(frozen=True)
class Report:
    """What a child hands back."""

    content: str
    ok: bool = True
    error: str | None = None


class Rounds:
    """Keeps children that run at the same time in step: all sample, then each acts in the order of numbers.

    What a child does to the world and when it ends are then fixed by its numbers, whatever the timing.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._live: set[int] = set()
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._sampled: dict[int, asyncio.Future[None]] = {}
        self._order: list[int] = []
        self._acting: int | None = None

    async def enter(self, number: int) -> None:
        """Take part, once fewer than `width` others do."""
        if len(self._live) < self._width:
            self._live.add(number)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((number, place))
        await place

    def turn(self, number: int, inner: Turn) -> Turn:
        """Wrap a child's model turn: it comes back when it is the child's time to act."""

        async def stepped(conversation: Conversation, max_tokens: int) -> Reply:
            self._acted(number)
            reply = await inner(conversation, max_tokens)
            self._sampled[number] = asyncio.get_running_loop().create_future()
            self._advance()
            await self._sampled[number]
            del self._sampled[number]
            return reply

        return stepped

    def leave(self, number: int) -> None:
        """Take part no longer; the next in the queue does."""
        self._live.discard(number)
        self._sampled.pop(number, None)
        while self._queue and len(self._live) < self._width:
            following, place = self._queue.popleft()
            if not place.done():  # cancelled
                self._live.add(following)
                place.set_result(None)
        self._acted(number)

    def _acted(self, number: int) -> None:
        if self._acting == number:
            self._acting = None
        self._advance()

    def _advance(self) -> None:
        """Let the next child act; begin a new round once all have sampled."""
        waiting = {n for n, time in self._sampled.items() if not time.done()}
        if self._acting is None and not self._order and waiting == self._live:
            self._order = sorted(waiting)
        while self._acting is None and self._order:
            number = self._order.pop(0)
            if number in waiting:
                self._acting = number
                self._sampled[number].set_result(None)


@dataclass
class Family:
    """All agents of an episode."""

    children: int = 0
    """Children so far; the next one's number is one more."""


class Delegating:
    """Runs the delegations of one agent."""

    def __init__(
        self,
        part: parts.Subagents,
        *,
        system: str,
        conversation: Conversation,
        purse: Purse,
        run: AgentRun,
        depth: int,
        family: Family,
        spawn: Spawn,
        events: list[Event],
    ) -> None:
        """`system` opens an isolated child's conversation; `depth` is the agent's own, 0 for the root."""
        self._part, self._system, self._conversation, self._purse, self._run = part, system, conversation, purse, run
        self._depth, self._family, self._spawn, self._events = depth, family, spawn, events
        self._rounds = Rounds(part.max_parallel)

    def schemas(self) -> list[dict[str, Any]]:
        """The tool that the model is offered. A child too deep to delegate is offered none, unless it may be a fork:
        then its tools stay its parent's, so that their prompts share a prefix, and calls are refused."""
        part = self._part
        if self._depth >= part.max_depth and "fork" not in part.modes:
            return []
        properties: dict[str, Any] = {"goal": {"type": "string"}}
        if len(part.modes) > 1:
            properties["mode"] = {"type": "string", "enum": list(part.modes)}
        parameters = {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
            "required": ["goal"],
        }
        function = {"name": part.name, "description": part.description, "parameters": parameters}
        return [{"type": "function", "function": function}]

    def act(self, inner: Act) -> Act:
        """Wrap the tool call. Raises BudgetEnded, and ChildFailed for a child's infrastructure."""

        async def delegated(call: Call) -> Observation:
            if call.name != self._part.name:
                return await inner(call)
            if self._purse.tool_calls <= 0:
                raise BudgetEnded(f"budget of {self._purse.budget.tool_calls} tool_calls is used up")
            self._purse.tool_calls -= 1
            asked = self._read(call.arguments)
            if isinstance(asked, TypedError):
                self._events.append({"kind": "tool", "name": call.name, "error": asked.error})
                return asked
            return await self._delegate(*asked)

        return delegated

    def _read(self, arguments: str) -> tuple[str, str] | TypedError:
        """The goal and the mode that a call asks for, or why it gets no child."""
        try:
            asked = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            asked = None
        if not isinstance(asked, dict) or asked.keys() - {"goal", "mode"}:
            return TypedError("invalid_argument")
        goal, mode = asked.get("goal"), asked.get("mode", self._part.modes[0])
        if not isinstance(goal, str) or not goal.strip() or mode not in self._part.modes:
            return TypedError("invalid_argument")
        if self._depth >= self._part.max_depth:
            return TypedError("too_deep")
        if self._family.children >= self._part.max_children:
            return TypedError("too_many")
        return goal.strip(), mode

    async def _delegate(self, goal: str, mode: str) -> Observation:
        """Run a child. Up to the first await all happens in the order of the calls: numbers, and what is lent."""
        lent = self._purse.lend(self._part.share)
        if lent.turns <= 0 or lent.tokens <= 0:
            self._purse.take_back(lent)
            return TypedError("no_budget")
        self._family.children += 1
        number = self._family.children
        first = f"task {number}: {goal}"  # so that no two children begin with the same messages
        conversation = self._conversation.fork(first) if mode == "fork" else Conversation(self._system, first)
        try:
            await self._rounds.enter(number)
            child = await self._spawn(conversation, lent, lambda turn: self._rounds.turn(number, turn))
            self._take_over(number, mode, child)
        finally:
            self._rounds.leave(number)
            self._purse.take_back(lent)
        match child.outcome:
            case Outcome.completed:
                return Report(child.answer)
            case Outcome.infra_failed:
                raise ChildFailed(f"subagent {number}: {child.error}")
            case outcome:
                return TypedError(outcome.value)

    def _take_over(self, number: int, mode: str, child: AgentRun) -> None:
        self._run.children += 1 + child.children
        self._run.tool_calls += child.tool_calls
        self._run.failed_calls += child.failed_calls
        self._events.append(
            {
                "kind": "subagent",
                "number": number,
                "mode": mode,
                "outcome": child.outcome.value,
                "error": child.error or None,
                "turns": child.turns,
                "events": child.trace,
            }
        )


def child_url(base_url: str) -> str:
    """Endpoint of the children of a run: the recording proxy's run ``sub``; another endpoint's stays the same."""
    root = base_url.removesuffix("/root/v1")
    return base_url if root == base_url else root + "/sub/v1"
