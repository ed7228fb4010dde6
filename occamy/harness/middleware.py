"""Middleware: each part wraps the model turn, the tool call, or both. Wrappers live for one run and keep its counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from occamy.contracts.task import Budget
from occamy.harness import parts
from occamy.harness.assignment import Observation
from occamy.harness.client import EndpointError
from occamy.harness.conversation import Call, Conversation, Reply

Turn = Callable[[Conversation, int], Awaitable[Reply]]
"""Samples one assistant turn of at most so many tokens."""


Act = Callable[[Call], Observation]
"""Runs one tool call. Never raises for the agent's mistakes."""


class BudgetEnded(Exception):
    """A budget of the episode is used up."""


class Stalled(Exception):
    """Wall time ended while the endpoint kept a call pending."""


@dataclass(frozen=True)
class TypedError:
    """An observation that the harness makes itself."""

    error: str
    ok: bool = False

    @property
    def content(self) -> str:
        """Compact JSON, as the dispatcher would answer."""
        return f'{{"error":"{self.error}"}}'


class Tracing:
    """Appends one event per model turn and tool call."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self._events = events

    def turn(self, inner: Turn) -> Turn:
        """Wrap the model turn."""

        async def traced(conversation: Conversation, max_tokens: int) -> Reply:
            began, rewrite = time.monotonic(), conversation.rewrite
            reply = await inner(conversation, max_tokens)
            self._events.append(
                {
                    "kind": "turn",
                    "rewrite": rewrite,
                    "ms": round(1000 * (time.monotonic() - began), 1),
                    "input": reply.prompt_tokens,
                    "output": reply.output_tokens,
                    "calls": len(reply.calls),
                    "finish": reply.finish_reason,
                }
            )
            return reply

        return traced

    def act(self, inner: Act) -> Act:
        """Wrap the tool call."""

        def traced(call: Call) -> Observation:
            observation = inner(call)
            self._events.append({"kind": "tool", "name": call.name, "error": observation.error})
            return observation

        return traced


class Compacting:
    """Rewrites history before a turn that would pass the trigger."""

    def __init__(self, part: parts.Compaction) -> None:
        self._part = part
        self.times = 0

    def turn(self, inner: Turn) -> Turn:
        """Wrap the model turn. A summary is an ordinary turn at the end of the segment that it closes."""

        async def compacted(conversation: Conversation, max_tokens: int) -> Reply:
            if self._due(conversation):
                self.times += 1
                if self._part.mode == "summary":
                    conversation.ask_summary()
                    summary = await inner(conversation, max_tokens)
                    conversation.replace_by_summary(summary.text, self._part.keep_last)
                else:
                    conversation.prune(self._part.keep_last)
            return await inner(conversation, max_tokens)

        return compacted

    def _due(self, conversation: Conversation) -> bool:
        part = self._part
        if self.times >= part.max_times or conversation.steps <= part.keep_last:
            return False
        expected = conversation.known_tokens + conversation.new_characters / part.characters_per_token
        return conversation.known_tokens > 0 and expected > part.trigger * part.budget_tokens


class Budgeting:
    """Counts turns, sampled tokens and tool calls against the task's budget, and watches wall time."""

    def __init__(self, part: parts.Budgets, budget: Budget) -> None:
        self._part = part
        self._budget = budget
        self._ends = time.monotonic() + budget.wall_seconds
        self._turns = self._tokens = self._calls = 0

    def turn(self, inner: Turn) -> Turn:
        """Wrap the model turn. Raises BudgetEnded, or Stalled when it is the endpoint that used up the wall time."""

        async def budgeted(conversation: Conversation, max_tokens: int) -> Reply:
            self._check("turns", self._turns, self._budget.turns)
            self._check("tokens", self._tokens, self._budget.tokens)
            self._turns += 1
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._ends - began):
                    reply = await inner(conversation, min(max_tokens, self._budget.tokens - self._tokens))
            except TimeoutError as e:
                pending = time.monotonic() - began
                if pending >= self._part.stall_seconds:
                    raise Stalled(f"a model call was pending for {pending:.0f} s when wall time ended") from e
                raise BudgetEnded(f"wall time of {self._budget.wall_seconds:g} s is used up") from e
            self._tokens += reply.output_tokens
            return reply

        return budgeted

    def act(self, inner: Act) -> Act:
        """Wrap the tool call. Raises BudgetEnded."""

        def budgeted(call: Call) -> Observation:
            self._check("tool_calls", self._calls, self._budget.tool_calls)
            self._calls += 1
            return inner(call)

        return budgeted

    def _check(self, what: str, used: int, allowed: int) -> None:
        if used >= allowed:
            raise BudgetEnded(f"budget of {allowed} {what} is used up")


def retrying(part: parts.Retry, inner: Turn) -> Turn:
    """Wrap the model turn: repeat it after a retryable endpoint error, with doubling pauses."""

    async def retried(conversation: Conversation, max_tokens: int) -> Reply:
        for attempt in range(1, part.attempts):
            try:
                return await inner(conversation, max_tokens)
            except EndpointError as e:
                if not e.retryable:
                    raise
            await asyncio.sleep(part.backoff_seconds * 2 ** (attempt - 1))
        return await inner(conversation, max_tokens)

    return retried


def normalising(inner: Act) -> Act:
    """Wrap the tool call: arguments that are no JSON object are answered with `invalid_argument`."""

    def normalised(call: Call) -> Observation:
        try:
            sound = isinstance(orjson.loads(call.arguments), dict)
        except orjson.JSONDecodeError:
            sound = False
        return inner(call) if sound else TypedError("invalid_argument")

    return normalised
