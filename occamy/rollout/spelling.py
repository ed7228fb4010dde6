"""A teacher behind an agent program: it names tools as the world does, the program hears its own names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from occamy.capture.backends import Teacher
from occamy.harness.adapters.declaration import ToolSource

Message = dict[str, Any]


class SpelledTeacher:
    """Wraps a teacher that knows nothing of harnesses. Satisfies `capture.backends.Teacher`."""

    def __init__(self, teacher: Teacher, tools: ToolSource) -> None:
        self._teacher, self._tools = teacher, tools

    async def complete(self, episode_id: str, request: dict[str, Any]) -> Message:
        """The teacher's message for the request as the world would have put it, with the program's tool names."""
        messages = [plain_message(message, self._tools) for message in request["messages"]]
        said = await self._teacher.complete(episode_id, {**request, "messages": messages})
        return _renamed(said, lambda name: self._tools.prefix + name)


def plain_message(message: Message, tools: ToolSource) -> Message:
    """A message without what the program adds: prefixes of tool names, wrappers of tool answers."""
    if message["role"] == "tool":
        return {**message, "content": plain_answer(message["content"], tools)}
    return _renamed(message, lambda name: name.removeprefix(tools.prefix))


def plain_answer(content: str, tools: ToolSource) -> str:
    """The world's answer inside a tool message; the content itself where the program wrote something of its own."""
    found = re.search(tools.result, content, re.DOTALL) if tools.result else None
    if found is None:
        return content
    try:
        wrapped = json.loads(found[1])
    except ValueError:
        return content
    return next((str(wrapped[key]) for key in tools.keys if key in wrapped), content)


def _renamed(message: Message, rename: Callable[[str], str]) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    renamed = [{**c, "function": {**c["function"], "name": rename(c["function"]["name"])}} for c in calls]
    return {**message, "tool_calls": renamed}
