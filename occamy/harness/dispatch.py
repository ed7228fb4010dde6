"""The bare tool call: a tool that raises, hangs or answers nonsense must not take the event loop or a record along."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from occamy.harness.assignment import Assignment, Observation
from occamy.harness.conversation import Call
from occamy.harness.middleware import Act

T = TypeVar("T")


class ToolBroken(RuntimeError):
    """A tool raised, or answered something that is no observation: an infrastructure fault."""


def dispatching(task: Assignment) -> Act:
    """The innermost tool call. Where tools may block each runs in a thread, so that one that hangs can be given up.

    A thread that hangs cannot be ended; it is a daemon and keeps no process alive. Raises ToolBroken.
    """

    async def dispatched(call: Call) -> Observation:
        try:
            if task.tools_may_block:
                observation = await in_thread(lambda: task.dispatch(call.name, call.arguments))
            else:
                observation = task.dispatch(call.name, call.arguments)
            observation.content.encode()
        except Exception as e:
            raise ToolBroken(f"tool {call.name} failed: {type(e).__name__}: {e}") from e
        return observation

    return dispatched


async def in_thread(work: Callable[[], T]) -> T:
    """The result of what may block, from a thread of its own: however many wait, none waits for a free one.

    Cancelling leaves the thread alone. Raises what `work` raises.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[T] = loop.create_future()

    def settle(how: Callable[[], None]) -> None:
        if not answered.done():  # else given up
            how()

    def run() -> None:
        try:
            how = partial(answered.set_result, work())
        except BaseException as e:
            how = partial(answered.set_exception, e)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, how)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await answered
