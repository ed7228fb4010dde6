"""Middleware: each part wraps the model turn, the tool call, or both. Wrappers live for one agent."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from occamy.harness import parts
from occamy.harness.assignment import Observation
from occamy.harness.conversation import Call, Conversation, Reply

Turn = Callable[[Conversation, int], Awaitable[Reply]]
"""Samples one assistant turn of at most so many tokens."""

Act = Callable[[Call], Awaitable[Observation]]
"""Runs one tool call. Never raises for the agent's mistakes."""

Event = dict[str, Any]
"""One event of the trace."""


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

    def __init__(self, events: list[Event]) -> None:
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

        async def traced(call: Call) -> Observation:
            observation = await inner(call)
            self._events.append({"kind": "tool", "name": call.name, "error": observation.error})
            return observation

        return traced


class Compacting:
    """Rewrites history before a turn that would pass the trigger."""

    def __init__(self, part: parts.Compaction) -> None:
        self._part = part
        self._times = 0

    def turn(self, inner: Turn) -> Turn:
        """Wrap the model turn. A policy's summary is an ordinary turn at the end of the segment that it closes."""

        async def compacted(conversation: Conversation, max_tokens: int) -> Reply:
            if self._due(conversation):
                self._times += 1
                if self._part.mode == "summary":
                    conversation.ask_summary()
                    summary = await inner(conversation, max_tokens)
                    conversation.replace_by_summary(summary.text, self._part.keep_last)
                elif self._part.mode == "harness_summary":
                    conversation.summarise(self._part.keep_last)
                else:
                    conversation.prune(self._part.keep_last)
            return await inner(conversation, max_tokens)

        return compacted

    def _due(self, conversation: Conversation) -> bool:
        part = self._part
        if self._times >= part.max_times or conversation.steps <= part.keep_last:
            return False
        expected = conversation.known_tokens + conversation.new_characters / part.characters_per_token
        return conversation.known_tokens > 0 and expected > part.trigger * part.budget_tokens


def normalising(inner: Act) -> Act:
    """Wrap the tool call: arguments that are no JSON object are answered with `invalid_argument`."""

    async def normalised(call: Call) -> Observation:
        try:
            sound = isinstance(orjson.loads(call.arguments), dict)
        except orjson.JSONDecodeError:
            sound = False
        return await inner(call) if sound else TypedError("invalid_argument")

    return normalised
