"""A sandbox from within its pod: commands, files, freeze, snapshots. Standard library only; runs in the pod.

It does what the local backend does, by the same code, and owns every process that is not its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from occamy.sandboxes import archive, paths, roots, tree
from occamy.sandboxes.process import Command, Keeper, Launch, start, start_keeper
from occamy.sandboxes.protocol import DiskFull, SandboxDied, SandboxError, SandboxFrozen

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_KILL_WAIT_S = 10.0


@dataclass(frozen=True)
class Order:
    """A command as the client orders it, which has checked all of it."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    timeout_s: float
    """Seconds until it is ended, at most."""
    lease_s: float
    """Seconds until the lease ends, and all that the command leaves behind with it."""
    limits: dict[str, int]
    """Fields of `occamy.sandboxes.config.Limits`."""
    min_free_bytes: int


@dataclass(frozen=True)
class Done:
    """What the command did; see `ExecResult`."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    limit: str


class Inside:
    """The one sandbox of this pod. What may block for long runs in a thread."""

    def __init__(self, workspace: Path, home: Path) -> None:
        self.workspace = workspace
        self._home = home
        self._commands: list[Command] = []
        self._spare: asyncio.Task[Keeper] | None = None
        """The next command's keeper, started ahead: a command waits for nothing but itself."""
        self._starting = asyncio.Lock()
        self._frozen = False
        self._still = False
        """Whether freeze has seen every process gone."""
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # commands have the same user, and must not trace or read this process

    def prepare(self) -> None:
        """Start the next command's keeper in the background."""
        if not self._frozen:
            self._spare = asyncio.create_task(start_keeper(self.workspace, "the next command"))

    async def exec(self, order: Order, stdin: bytes) -> Done:
        """Run a command to its end; cancelling kills it. Raises as `Sandbox.exec` does."""
        async with self._starting:  # freeze waits for a start in progress, and none follows it
            self._writable("run a command")
            self._check_room(order.min_free_bytes)
            command = await self._start(order)
        try:
            code = await command.finish(stdin, order.timeout_s)
        except SandboxError:
            await self._kill_all()
            raise
        except BaseException:
            await command.kill()
            raise
        if command.killed:
            self._writable("finish a command")
        if code is None:
            await command.kill()
        if code and not command.limit:
            self._check_room(order.min_free_bytes)
        return Done(code, *command.output(), command.truncated, command.limit)

    async def read(self, path: str, limit: int) -> bytes:
        """Raises as `Sandbox.read` does."""
        return await asyncio.to_thread(paths.read_file, self.workspace, path, limit)

    async def write(self, path: str, data: bytes) -> None:
        """Raises as `Sandbox.write` does."""
        async with self._starting:
            self._writable("write")
            await asyncio.to_thread(paths.write_file, self.workspace, path, data)

    async def remove(self, path: str) -> None:
        """Raises as `Sandbox.remove` does."""
        async with self._starting:
            self._writable("remove")
            await asyncio.to_thread(paths.remove_file, self.workspace, path)

    async def files(self, limit: int) -> list[str]:
        """Raises as `Sandbox.files` does."""
        return await asyncio.to_thread(archive.files, self.workspace, limit)

    async def freeze(self, limit: int) -> None:
        """Kill every process but this one, for good. Raises as `Sandbox.freeze` does. Safe to repeat."""
        async with self._starting:
            self._frozen = True
            if not self._still:
                await self._kill_all()
                self._still = True
        await asyncio.to_thread(archive.survey, self.workspace, limit)

    async def snapshot(self, limit: int, sink: IO[bytes]) -> None:
        """Write the archive to `sink`, from a thread. Raises as `Sandbox.snapshot` does, before the first byte."""
        await asyncio.to_thread(archive.stream, self.workspace, limit, sink)

    async def restore(self, packed: bytes, limit: int) -> None:
        """Raises as `Sandbox.restore` does."""
        async with self._starting:
            self._writable("restore")
            await self._kill_all()
            await asyncio.to_thread(self._replace, packed, limit)

    async def end(self) -> None:
        """Kill every process."""
        async with self._starting:
            await self._kill_all()

    def _replace(self, packed: bytes, limit: int) -> None:
        """The workspace is a mount, so its content is replaced and not the folder."""
        incoming = self.workspace / f".{secrets.token_hex(8)}.incoming"
        incoming.mkdir()
        try:
            archive.unpack(packed, incoming, limit)
            for old in os.scandir(self.workspace):
                if old.name == incoming.name:
                    continue
                if old.is_dir(follow_symlinks=False):
                    roots.remove(Path(old.path))
                else:
                    os.unlink(old.path)
            for new in os.scandir(incoming):
                os.rename(new.path, self.workspace / new.name)
        finally:
            roots.remove(incoming)

    def _writable(self, what: str) -> None:
        if self._frozen:
            raise SandboxFrozen(f"is frozen; cannot {what}")

    def _check_room(self, needed: int) -> None:
        at = os.statvfs(self.workspace)
        if (free := at.f_bavail * at.f_frsize) < needed:
            raise DiskFull(f"{free} bytes free in the workspace, {needed} needed")

    async def _start(self, order: Order) -> Command:
        await self._collect([c for c in self._commands if c.gone])
        parts = paths.parts_of(order.cwd)
        if parts:
            paths.make_folder(self.workspace, order.cwd)
        where = self.workspace.joinpath(*parts)
        temporary = self._home.parent / "scratch"
        for folder in (self._home, temporary):
            folder.mkdir(parents=True, exist_ok=True)
        own = {"HOME": str(self._home), "TMPDIR": str(temporary), "PWD": str(where)}
        limits: Any = SimpleNamespace(**order.limits)
        command = await start(
            Launch(
                argv=order.argv,
                env=dict(os.environ) | own | order.env,
                cwd=where,
                limits=limits,
                folder=self.workspace,
                seconds=order.lease_s,
                own_user=False,  # the pods of a node share theirs
            ),
            await self._take_spare(),
        )
        self._commands.append(command)
        self.prepare()
        return command

    async def _take_spare(self) -> Keeper | None:
        """The keeper that was started ahead, unless there is none, or it is gone."""
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        with contextlib.suppress(SandboxError):
            keeper = await spare
            if keeper.waits:
                return keeper
            await keeper.end()
        return None

    async def _kill_all(self) -> None:
        """End every process but this one, however it came here. Raises SandboxDied where one is left."""
        if keeper := await self._take_spare():
            await keeper.end()
        commands = list(self._commands)
        for command in commands:
            await command.kill()
        await self._collect(commands)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_WAIT_S):
                while left := _others():
                    await asyncio.to_thread(_kill_others)
                return
        raise SandboxDied(f"processes {sorted(left)[:10]} cannot be killed")

    async def _collect(self, commands: list[Command]) -> None:
        for command in commands:
            await command.collect()
            if command in self._commands:
                self._commands.remove(command)


def _others() -> set[int]:
    """Living processes that are not this one: all of the pod's, where this one is the first of them."""
    if os.getpid() != 1:
        return set(tree.descendants())
    return {pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != 1 and _lives(pid)}


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as f:
        return f.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return False


def _kill_others() -> None:
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # at once: the kernel lets nobody fork meanwhile
    tree.kill_tree(0)
    time.sleep(0.001)
