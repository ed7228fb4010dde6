"""The world of one episode over its sandbox's workspace: on this machine, or in a pod that threads wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from occamy.contracts.task import WorldSpec
from occamy.harness.dispatch import in_thread
from occamy.sandboxes import archive
from occamy.sandboxes.local import LocalSandbox
from occamy.sandboxes.protocol import PathRefused, Sandbox, SandboxError
from occamy.worlds.workspace import FolderWorkspace, check_new_path, check_path, is_text
from occamy.worlds.world import Event, ToolResult, World

T = TypeVar("T")


class SandboxWorkspace:
    """The files of a sandbox anywhere, for threads other than that of its event loop. Satisfies `Workspace`.

    Bytes that are not UTF-8 read as backslash escapes. A link that an agent made is no file, and a write takes its
    place. After a fault of the sandbox nobody knows what arrived: every later call raises the same fault.
    """

    def __init__(self, sandbox: Sandbox, loop: asyncio.AbstractEventLoop) -> None:
        self._sandbox, self._loop = sandbox, loop
        self._fault: SandboxError | None = None

    def read(self, path: str) -> str:
        try:
            data = self._wait_for(self._sandbox.read(check_path(path)))
        except PathRefused:  # a folder, a link, a name that no disk takes
            raise FileNotFoundError(path) from None
        return _text(data)

    def write(self, path: str, text: str) -> None:
        self._wait_for(self._sandbox.write(check_new_path(path), text.encode()))

    def remove(self, path: str) -> None:
        try:
            self._wait_for(self._sandbox.remove(check_path(path)))
        except PathRefused:
            raise FileNotFoundError(path) from None

    def list(self) -> list[str]:
        return [path for path in self._wait_for(self._sandbox.files()) if is_text(path)]

    def texts(self) -> dict[str, str]:
        """One request, however many files an agent has made."""
        exported = archive.contents(self._wait_for(self._sandbox.snapshot()).archive)
        return {path: _text(data) for path, data in exported.items() if is_text(path)}

    def check(self) -> None:
        """Raise the fault that a call has met, if any."""
        if self._fault is not None:
            raise self._fault

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the loop's work. Raises what it raises."""
        try:
            self.check()
        except SandboxError:
            work.close()
            raise
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except SandboxError as e:
            self._fault = e
            raise


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="backslashreplace")


class LiveWorld:
    """A world that an agent acts in. One call at a time, and none after the end."""

    def __init__(self, world: World, check: Callable[[], None] | None = None) -> None:
        """`check` is that of the world's workspace, where that is not on this machine."""
        self.may_block = check is not None
        """Whether its calls wait for another machine, and may not be made from the event loop."""
        self._world, self._check = world, check
        self._busy = threading.Lock()
        self._ended = False

    @property
    def events(self) -> Sequence[Event]:
        """The dispatcher's log until now."""
        return tuple(self._world.events)

    def call(self, name: str, arguments: str) -> ToolResult:
        """`World.call`. Raises SandboxError for a fault of the workspace, RuntimeError after the end."""
        with self._busy:
            if self._ended:
                raise RuntimeError(f"the episode has ended; {name} was not called")
            return self._world.call(name, arguments)

    async def end(self) -> None:
        """Wait for a call that nobody waits for any more, and take no other: what is graded stands still.

        Raises SandboxError when a call has met a fault of the workspace.
        """
        await self._do(self._end)
        if self._check is not None:
            self._check()

    async def state(self) -> dict[str, Any]:
        """`World.state`. Raises SandboxError."""
        return await self._do(self._world.state)

    def close(self) -> None:
        """Free the databases. The log stays readable."""
        self._world.close()

    def _end(self) -> None:
        with self._busy:
            self._ended = True

    async def _do(self, work: Callable[[], T]) -> T:
        return await in_thread(work) if self.may_block else work()


async def open_world(spec: WorldSpec, sandbox: Sandbox) -> LiveWorld:
    """Build a world whose files are those of the sandbox. Raises WorldError, SandboxError.

    A workspace on this machine is used as the folder that it is, without threads.
    """
    if isinstance(sandbox, LocalSandbox):
        return LiveWorld(World(spec, FolderWorkspace(sandbox.workspace)))
    workspace = SandboxWorkspace(sandbox, asyncio.get_running_loop())
    return LiveWorld(await in_thread(lambda: World(spec, workspace)), workspace.check)
