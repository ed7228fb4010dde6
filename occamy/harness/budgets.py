"""Budgets: what an agent has left, what it lends its children, and how it ends when something is used up."""

from __future__ import annotations

import asyncio
import time
from typing import Self

from occamy.contracts.task import Budget
from occamy.harness import parts
from occamy.harness.assignment import Observation
from occamy.harness.conversation import Call, Conversation, Reply
from occamy.harness.middleware import Act, Turn


class BudgetEnded(Exception):
    """A budget of the episode is used up."""


class Stalled(Exception):
    """Wall time ended while the endpoint or a tool kept a call pending."""


class Purse:
    """Turns, tool calls and tokens left to one agent, and when its wall time ends (on the monotonic clock)."""

    def __init__(self, budget: Budget, ends: float | None = None) -> None:
        """`ends` is the parent's for a child; by default the budget's wall time begins now."""
        self.budget = budget
        self.ends = time.monotonic() + budget.wall_seconds if ends is None else ends
        self.turns, self.tool_calls, self.tokens = budget.turns, budget.tool_calls, budget.tokens

    def lend(self, share: float) -> Self:
        """Take `share` of each budget out, rounded down, and return it as a child's purse."""
        turns, calls, tokens = (int(n * share) for n in (self.turns, self.tool_calls, self.tokens))
        self.turns -= turns
        self.tool_calls -= calls
        self.tokens -= tokens
        lent = Budget(turns=turns, tool_calls=calls, tokens=tokens, wall_seconds=self.budget.wall_seconds)
        return type(self)(lent, self.ends)

    def take_back(self, lent: Purse) -> None:
        """Put back what a child has not used."""
        self.turns += lent.turns
        self.tool_calls += lent.tool_calls
        self.tokens += lent.tokens


class Budgeting:
    """Counts turns, sampled tokens and tool calls against a purse, and watches wall time."""

    def __init__(self, part: parts.Budgets, purse: Purse) -> None:
        self._part = part
        self._purse = purse

    def turn(self, inner: Turn) -> Turn:
        """Wrap the model turn. Raises BudgetEnded, or Stalled when it is the endpoint that used up the wall time."""

        async def budgeted(conversation: Conversation, max_tokens: int) -> Reply:
            purse = self._purse
            self._check("turns", purse.turns)
            self._check("tokens", purse.tokens)
            began = self._check_wall()
            try:
                async with asyncio.timeout(purse.ends - began):
                    reply = await inner(conversation, min(max_tokens, purse.tokens))
            except TimeoutError as e:
                pending = time.monotonic() - began
                if pending >= self._part.stall_seconds:
                    raise Stalled(f"a model call was pending for {pending:.0f} s when wall time ended") from e
                raise self._late() from e
            purse.turns -= 1
            purse.tokens -= reply.output_tokens
            return reply

        return budgeted

    def act(self, inner: Act) -> Act:
        """Wrap the tool call. Raises BudgetEnded.

        A call under way when wall time ends may finish, so that nothing changes the world while it is graded. Raises
        Stalled when it has not after `stall_seconds`.
        """

        async def budgeted(call: Call) -> Observation:
            self._check("tool_calls", self._purse.tool_calls)
            began = self._check_wall()
            self._purse.tool_calls -= 1
            try:
                async with asyncio.timeout(max(self._purse.ends - began, self._part.stall_seconds)):
                    return await inner(call)
            except TimeoutError as e:
                pending = time.monotonic() - began
                raise Stalled(f"tool {call.name} was pending for {pending:.0f} s when wall time ended") from e

        return budgeted

    def _check(self, what: str, left: int) -> None:
        if left <= 0:
            raise BudgetEnded(f"budget of {getattr(self._purse.budget, what)} {what} is used up")

    def _check_wall(self) -> float:
        """Return the time on the monotonic clock."""
        now = time.monotonic()
        if now >= self._purse.ends:
            raise self._late()
        return now

    def _late(self) -> BudgetEnded:
        return BudgetEnded(f"wall time of {self._purse.budget.wall_seconds:g} s is used up")
