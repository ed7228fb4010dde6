"""Middleware that goes on after a fault: retries of the endpoint, and recovery of the agent."""

from __future__ import annotations

import asyncio

from occamy.harness import parts
from occamy.harness.assignment import Observation
from occamy.harness.client import ContextExceeded, EndpointError
from occamy.harness.conversation import Call, Conversation, Reply
from occamy.harness.middleware import Act, Event, Turn


class CallsKeepFailing(Exception):
    """The agent was told that its calls fail, and they failed as many times again."""


class Recovering:
    """Rewrites a history that was refused, lets a cut turn go on, and stops a loop of failing calls."""

    def __init__(self, part: parts.Recovery, events: list[Event]) -> None:
        self._part = part
        self._events = events
        self._cuts_left = part.cut_turns
        self._failed = 0
        self._told = False

    def turn(self, inner: Turn) -> Turn:
        """Wrap the model turn. Raises CallsKeepFailing, and ContextExceeded when a rewrite did not help."""

        async def recovered(conversation: Conversation, max_tokens: int) -> Reply:
            if self._failed >= self._part.failing_calls:
                self._warn(conversation)
            reply = await self._fitted(inner, conversation, max_tokens)
            while self._cuts_left and reply.finish_reason == "length" and not reply.calls:
                self._cuts_left -= 1
                self._note("cut_turn")
                conversation.say(reply)
                conversation.tell(self._part.cut_message)
                reply = await self._fitted(inner, conversation, max_tokens)
            return reply

        return recovered

    def act(self, inner: Act) -> Act:
        """Wrap the tool call."""

        async def counted(call: Call) -> Observation:
            observation = await inner(call)
            self._failed = 0 if observation.ok else self._failed + 1
            return observation

        return counted

    async def _fitted(self, inner: Turn, conversation: Conversation, max_tokens: int) -> Reply:
        """Sample a turn; when the prompt is refused, rewrite and try once more."""
        try:
            return await inner(conversation, max_tokens)
        except ContextExceeded:
            keep = min(self._part.keep_last, conversation.steps - 1)
            if self._part.context == "end" or keep < 1:
                raise
            if self._part.context == "pruning":
                conversation.prune(keep)
            else:
                conversation.summarise(keep)
            self._note("context_length_exceeded")
        return await inner(conversation, max_tokens)

    def _warn(self, conversation: Conversation) -> None:
        if self._told:
            raise CallsKeepFailing(f"{self._failed} calls in a row failed, after as many before a warning")
        self._told, self._failed = True, 0
        self._note("failing_calls")
        conversation.tell(self._part.failing_message)

    def _note(self, after: str) -> None:
        self._events.append({"kind": "recovery", "after": after})


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
