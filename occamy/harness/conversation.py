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
PLAN_MARK = "plan:"
"""How the user message that carries a plan over a rewrite begins."""
EMPTY_SUMMARY = "none"
"""Summary taken when nobody writes any text."""
_NOTED_CALLS = 24  # calls that a harness-written summary lists, the latest ones
_NOTED_CHARACTERS = 80  # of a call's arguments and of its result


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
    following: list[tuple[str | None, bytes]] = field(default_factory=list)
    """(tool call id or None, serialised message) in order."""
    notes: list[str] = field(default_factory=list)
    """Its calls with their results, for a harness-written summary."""


class Conversation:
    """The messages of one agent, with what is known about their size."""

    def __init__(self, system: str, request: str) -> None:
        self._opening = [_message("system", system)] if system else []
        self._opening.append(_message("user", request))
        self._head = list(self._opening)
        self._steps: list[_Step] = []
        self._asked: list[bytes] = []
        self._plan: str | None = None
        self._notes: list[str] = []
        self.rewrite: str | None = None
        """Rewrite that the next call must declare."""
        self.rewrites = 0
        """Rewrites so far."""
        self.known_tokens = 0
        """Prompt plus answer of the last turn, tokens; 0 when there was none since the last rewrite."""
        self.new_characters = 0
        """Characters of content added since."""

    def fork(self, goal: str) -> Conversation:
        """A child's conversation: this history before its last step, then the goal; rewrites keep all of that."""
        child = Conversation("", goal)
        child._opening = [*self._serialised(self._steps[:-1]), *child._opening]
        child._head = list(child._opening)
        return child

    @property
    def steps(self) -> int:
        """Number of steps in the history."""
        return len(self._steps)

    def messages(self) -> list[orjson.Fragment]:
        """The history as OpenAI messages, ready for orjson."""
        return [orjson.Fragment(m) for m in self._serialised(self._steps) + self._asked]

    def say(self, reply: Reply) -> None:
        """Add a sampled turn."""
        self._steps.append(_Step(_assistant(reply)))

    def observe(self, call: Call, content: str) -> None:
        """Add a tool result to the current step."""
        message = {"role": "tool", "tool_call_id": call.id, "content": content}
        self._steps[-1].following.append((call.id, orjson.dumps(message)))
        self._steps[-1].notes.append(f"{call.name}{_short(call.arguments)}={_short(content)};")
        self.new_characters += len(content)

    def tell(self, text: str) -> None:
        """Add a user message of the harness's own after the current step, or after the head when there is none."""
        if self._steps:
            self._steps[-1].following.append((None, _message("user", text)))
        else:
            self._head.append(_message("user", text))
        self.new_characters += len(text)

    def keep_plan(self, text: str) -> None:
        """Carry this plan over every later rewrite, instead of an earlier one."""
        self._plan = text.strip() or None

    def measured(self, reply: Reply) -> None:
        """Take over the size that the server reports for a turn."""
        self.known_tokens = reply.prompt_tokens + reply.output_tokens
        self.new_characters = 0

    def ask_summary(self) -> None:
        """Append the request for a summary."""
        self._asked = [_message("user", SUMMARY_REQUEST)]

    def replace_by_summary(self, text: str, keep_last: int) -> None:
        """Rewrite: original request, summary, plan, last steps. Raises nothing; an empty summary reads `none`."""
        self._notes = self._noted(keep_last)
        self._head = [*self._opening, _message("user", SUMMARY_MARK + (text.strip() or EMPTY_SUMMARY))]
        if self._plan is not None:
            self._head.append(_message("user", PLAN_MARK + self._plan))
        self._steps = self._steps[-keep_last:]
        self._rewritten("summary_replacement")

    def summarise(self, keep_last: int) -> None:
        """Rewrite as `replace_by_summary` with a summary made of the calls that it replaces, those of earlier rewrites
        included: ``crm_get{"id":"A01"}={"tier":"gold"};`` and so on, the latest 24, each cut at 80 characters."""
        notes = self._noted(keep_last)
        earlier = [f"{len(notes) - _NOTED_CALLS} before;"] if len(notes) > _NOTED_CALLS else []
        self.replace_by_summary("".join(earlier + notes[-_NOTED_CALLS:]), keep_last)

    def prune(self, keep_last: int) -> None:
        """Rewrite: tool results before the last steps read `pruned`."""
        for step in self._steps[:-keep_last]:
            step.following = [(i, _pruned(i) if i is not None else m) for i, m in step.following]
        self._rewritten("history_pruning")

    def _serialised(self, steps: Sequence[_Step]) -> list[bytes]:
        raw = list(self._head)
        for step in steps:
            raw.append(step.assistant)
            raw += [message for _, message in step.following]
        return raw

    def _noted(self, keep_last: int) -> list[str]:
        return self._notes + [note for step in self._steps[:-keep_last] for note in step.notes]

    def _rewritten(self, kind: str) -> None:
        self._asked = []
        self.rewrite = kind
        self.rewrites += 1
        self.known_tokens = self.new_characters = 0


def _short(text: str) -> str:
    return text if len(text) <= _NOTED_CHARACTERS else text[:_NOTED_CHARACTERS] + "…"


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
