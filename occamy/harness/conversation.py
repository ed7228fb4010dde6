"""The history an agent sees: a head that stays, then steps. Messages are serialised once, when they are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

PRUNED = "pruned"
"""What a pruned tool result reads."""
SUMMARY_REQUEST = "summary"
"""User message that asks the policy for a summary."""
SUMMARY_MARK = "summary:"
"""How the user message that carries a summary begins."""
EMPTY_SUMMARY = "none"
"""Summary taken when the policy writes no text."""


@dataclass(frozen=True)
class Call:
    """One tool call that the model asks for."""

    id: str
    name: str
    arguments: str
    """Raw, possibly broken, JSON text."""


@dataclass(frozen=True)
class Reply:
    """One sampled assistant turn."""

    text: str
    calls: tuple[Call, ...]
    finish_reason: str
    """stop, tool_calls or length."""
    prompt_tokens: int
    output_tokens: int


@dataclass
class _Step:
    """An assistant turn and what followed it."""

    assistant: bytes
    results: list[tuple[str, bytes]] = field(default_factory=list)
    """(tool call id, serialised message) in order."""


class Conversation:
    """The messages of one run, with what is known about their size."""

    def __init__(self, system: str, request: str) -> None:
        self._system = [_message("system", system)] if system else []
        self._head = [_message("user", request)]
        self._steps: list[_Step] = []
        self._asked: list[bytes] = []
        self.rewrite: str | None = None
        """Rewrite that the next call must declare."""
        self.known_tokens = 0
        """Prompt plus answer of the last turn, tokens; 0 when there was none since the last rewrite."""
        self.new_characters = 0
        """Characters of content added since."""

    @property
    def steps(self) -> int:
        """Number of steps in the history."""
        return len(self._steps)

    def messages(self) -> list[orjson.Fragment]:
        """The history as OpenAI messages, ready for orjson."""
        raw = [*self._system, *self._head]
        for step in self._steps:
            raw.append(step.assistant)
            raw += [result for _, result in step.results]
        return [orjson.Fragment(m) for m in raw + self._asked]

    def say(self, reply: Reply) -> None:
        """Add a sampled turn."""
        self._steps.append(_Step(_assistant(reply)))

    def observe(self, call: Call, content: str) -> None:
        """Add a tool result to the current step."""
        message = {"role": "tool", "tool_call_id": call.id, "content": content}
        self._steps[-1].results.append((call.id, orjson.dumps(message)))
        self.new_characters += len(content)

    def measured(self, reply: Reply) -> None:
        """Take over the size that the server reports for a turn."""
        self.known_tokens = reply.prompt_tokens + reply.output_tokens
        self.new_characters = 0

    def ask_summary(self) -> None:
        """Append the request for a summary."""
        self._asked = [_message("user", SUMMARY_REQUEST)]

    def replace_by_summary(self, text: str, keep_last: int) -> None:
        """Rewrite: original request, summary, last steps. Raises nothing; an empty summary reads `none`."""
        summary = SUMMARY_MARK + (text.strip() or EMPTY_SUMMARY)
        self._head = [self._head[0], _message("user", summary)]
        self._steps = self._steps[-keep_last:]
        self._rewritten("summary_replacement")

    def prune(self, keep_last: int) -> None:
        """Rewrite: tool results before the last steps read `pruned`."""
        for step in self._steps[:-keep_last]:
            step.results = [(i, _pruned(i)) for i, _ in step.results]
        self._rewritten("history_pruning")

    def _rewritten(self, kind: str) -> None:
        self._asked = []
        self.rewrite = kind
        self.known_tokens = self.new_characters = 0


def _message(role: str, content: str) -> bytes:
    return orjson.dumps({"role": role, "content": content})


def _pruned(call_id: str) -> bytes:
    return orjson.dumps({"role": "tool", "tool_call_id": call_id, "content": PRUNED})


def _assistant(reply: Reply) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
    if reply.calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in reply.calls
        ]
    return orjson.dumps(message)


def serialise_tools(tools: Sequence[dict[str, Any]]) -> orjson.Fragment | None:
    """Tool schemas serialised once for all turns, None when there are none."""
    return orjson.Fragment(orjson.dumps(list(tools))) if tools else None
