"""The world's tools as an agent program gets them: counted, traced, within budget, and given up when one hangs."""

from __future__ import annotations

import json
import time
from typing import Any

from occamy.harness.assignment import AgentRun, Assignment, Observation
from occamy.harness.conversation import Call
from occamy.harness.dispatch import ToolBroken, dispatching
from occamy.harness.middleware import TypedError


class ServedTools:
    """Runs the tool calls of one episode for its agent program."""

    def __init__(self, task: Assignment, run: AgentRun) -> None:
        self._act = dispatching(task)
        self._allowed = task.budget.tool_calls
        self._run = run
        self._since: float | None = None
        self._last = time.monotonic()
        self.used_up = ""
        """What of the budget a call was refused for, "" while none was."""
        self.broken = ""
        """Why a tool cannot be trusted any more, "" while none raised."""

    async def call(self, name: str, arguments: dict[str, Any]) -> Observation:
        """Run one call. One beyond the budget, or of a broken tool, is answered with a typed error."""
        run = self._run
        if run.tool_calls >= self._allowed:
            self.used_up = f"budget of {self._allowed} tool_calls is used up"
            return TypedError("budget_used_up")
        run.tool_calls += 1
        self._since = time.monotonic()
        said: Observation
        try:
            said = await self._act(Call("", name, json.dumps(arguments)))
        except ToolBroken as e:
            self.broken, said = str(e), TypedError("tool_broken")
        self._since, self._last = None, time.monotonic()
        run.failed_calls += not said.ok
        run.trace.append({"kind": "tool", "name": name, "error": said.error})
        return said

    def pending(self) -> float:
        """Seconds that a call has been pending, 0 when none is."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def idle(self) -> float:
        """Seconds since the last call ended, or serving began."""
        return time.monotonic() - self._last
