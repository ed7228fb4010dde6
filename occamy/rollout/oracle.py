"""The scripted oracle: plays a contract's reference path as a teacher behind the recording proxy."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from occamy.contracts.task import TaskContract, ToolCall
from occamy.rollout.jobs import EpisodeJob

_UNAVAILABLE = '{"error":"unavailable"}'
_SUMMARY = "summary"
_SPARE_TURNS = 4  # three compactions and the answer

Message = dict[str, Any]


class OracleTeacher:
    """Answers each episode's requests from its script. Satisfies `capture.proxy.Teacher`."""

    def __init__(self, wasteful: float) -> None:
        """`wasteful` is the chance of a redundant read before an update; see `DemonstrationConfig`."""
        self._wasteful = wasteful
        self._scripts: dict[str, Script] = {}

    def enrol(self, job: EpisodeJob) -> None:
        """Prepare (anew) for an episode."""
        calls = plan(job.task, self._wasteful, random.Random(job.seed))
        self._scripts[job.episode_id] = Script(calls, job.task.grading.answer)

    async def complete(self, episode_id: str, request: dict[str, Any]) -> Message:
        """Next assistant message. Raises KeyError for an episode that was not enrolled."""
        return self._scripts[episode_id].reply(request["messages"])


class Script:
    """Where one demonstration stands."""

    def __init__(self, calls: Sequence[ToolCall], answer: str) -> None:
        self._calls = calls
        self._answer = answer
        self._next = 0
        self._pending: ToolCall | None = None
        self._writes: list[str] = []
        self._last: tuple[list[Message], Message] | None = None

    def reply(self, messages: list[Message]) -> Message:
        """Assistant message for a history; the same message again when the same history is sent again."""
        if self._last is not None and self._last[0] == messages:
            return self._last[1]
        self._learn(messages)
        if messages[-1]["role"] == "user" and messages[-1]["content"] == _SUMMARY and len(messages) > 1:
            message: Message = {"role": "assistant", "content": "".join(self._writes) or "none"}
        elif self._next < len(self._calls):
            self._pending = self._calls[self._next]
            message = _calling(self._pending, f"step{len(messages)}x{self._next}")
        else:
            message = {"role": "assistant", "content": self._answer}
        self._last = (messages, message)
        return message

    def _learn(self, messages: list[Message]) -> None:
        """Take in the result of the pending call, which is the latest tool message."""
        result = next((m["content"] for m in reversed(messages) if m["role"] == "tool"), None)
        if self._pending is None or result is None:
            return
        if result != _UNAVAILABLE:
            self._next += 1
            self._writes += _written(self._pending, result)
        self._pending = None


def plan(task: TaskContract, wasteful: float, random_: random.Random) -> list[ToolCall]:
    """The reference path with redundant reads around updates, as many as the task's budget has room for."""
    budget, path = task.meta.budget, task.grading.reference
    need = len(path) + len(task.world.faults)
    room = min(budget.tool_calls - need, budget.turns - need - _SPARE_TURNS)
    calls: list[ToolCall] = []
    for call in path:
        service, _, verb = call.name.rpartition("_")
        read = ToolCall(name=f"{service}_get", arguments={"id": call.arguments.get("id", "")})
        around = verb == "update" and read.name in task.tools
        if around and room > 0 and random_.random() < wasteful and calls[-1:] != [read]:
            calls.append(read)
            room -= 1
        calls.append(call)
        if around and room > 0 and random_.random() < wasteful / 2:
            calls.append(read)
            room -= 1
    return calls


def _calling(call: ToolCall, call_id: str) -> Message:
    arguments = json.dumps(call.arguments, separators=(",", ":"))
    function = {"name": call.name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def _written(call: ToolCall, result: str) -> list[str]:
    """Summary entries of a successful write: ``A01.tier=gold;``, ``F03=new;``, ``notes=12;``."""
    arguments = call.arguments
    if call.name.endswith("_create"):
        new = json.loads(result).get("id")
        return [f"{new}=new;"] if new else []
    if result != "ok":
        return []
    if call.name == "file_write":
        return [f"{arguments['path']}={arguments['text']};"]
    return [f"{arguments['id']}.{field}={value};" for field, value in arguments.items() if field != "id"]
