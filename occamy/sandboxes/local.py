"""The local backend: one folder per lease, one supervised process tree per command."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from occamy.contracts.episode import Outcome
from occamy.sandboxes import archive, paths
from occamy.sandboxes.bubblewrap import available, wrap
from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.process import Command, start
from occamy.sandboxes.protocol import (
    ExecResult,
    Isolation,
    IsolationRefused,
    LeaseLost,
    SandboxError,
    SandboxFrozen,
    Snapshot,
)

MARKER = "OCCAMY_LEASE"
"""Environment variable that names the lease in every process it starts."""


class LocalBackend:
    """Leases folders below `root`, best on a memory-backed file system. `root` is emptied when the backend starts."""

    def __init__(self, root: Path, config: LocalSandboxConfig) -> None:
        """Raises IsolationRefused when this machine cannot give the level that `config` asks for."""
        self._root = root
        self._config = config
        self._numbers = itertools.count()
        strongest = Isolation.bubblewrap if available() else Isolation.process
        self.isolation = strongest if config.isolation is None else config.isolation
        required = max(self.isolation, config.minimum_isolation, key=lambda level: level.rank)
        given = min(self.isolation, strongest, key=lambda level: level.rank)
        if given.rank < required.rank:
            raise IsolationRefused(
                f"isolation {required.value!r} is required, {given.value!r} is what can be given here; "
                "install bubblewrap, or lower sandbox.isolation and sandbox.minimum_isolation"
            )
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)

    async def lease(self, pool: str, owner: str, deadline_s: float) -> LocalSandbox:
        """Make a lease folder. Nothing else happens until a command runs."""
        folder = self._root / f"{pool}-{next(self._numbers):06d}"
        try:
            folder.mkdir()
            workspace = folder / "workspace"
            workspace.mkdir()
        except OSError as e:
            raise SandboxError(f"lease for {owner}: cannot make {folder}: {e.strerror}") from e
        return LocalSandbox(folder, owner, time.monotonic() + deadline_s, self.isolation, self._config)

    def close(self) -> None:
        """Remove the root folder with all that leases left."""
        shutil.rmtree(self._root, ignore_errors=True)


class LocalSandbox:
    """One lease. See `Sandbox` for the contract of each method."""

    def __init__(
        self, folder: Path, owner: str, deadline: float, isolation: Isolation, config: LocalSandboxConfig
    ) -> None:
        self.id = secrets.token_hex(8)
        self.owner = owner
        self.isolation = isolation
        self.workspace = folder / "workspace"
        self._folder = folder
        self._deadline = deadline
        self._config = config
        self._commands: list[Command] = []
        self._ran = False
        self._frozen = False
        self._released = False

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_s: float = 60.0,
    ) -> ExecResult:
        self._writable("run a command")
        where = self._cwd(cwd)
        began = time.monotonic()
        command = await self._start(argv, dict(env or {}), where)
        self._commands.append(command)
        try:
            code = await command.finish(stdin, min(timeout_s, self._deadline - began))
        except BaseException:
            await self._kill_all()
            raise
        if code is None:
            await command.kill()
            outcome = Outcome.timed_out
        else:
            outcome = Outcome.completed if code == 0 else Outcome.agent_failed
        out, err = command.output()
        return ExecResult(outcome, code, out, err, time.monotonic() - began, command.truncated)

    async def read(self, path: str) -> bytes:
        self._alive()
        return paths.read_file(self.workspace, path)

    async def write(self, path: str, data: bytes) -> None:
        self._writable("write")
        paths.write_file(self.workspace, path, data)

    async def freeze(self) -> None:
        self._frozen = True
        await self._kill_all()

    async def snapshot(self) -> Snapshot:
        self._alive()
        return archive.pack(self.workspace)

    async def restore(self, archive_bytes: bytes) -> None:
        self._writable("restore")
        await self._kill_all()
        shutil.rmtree(self.workspace)
        self.workspace.mkdir()
        archive.unpack(archive_bytes, self.workspace)

    async def release(self) -> None:
        if not self._released:
            self._released = True
            await self._kill_all()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _alive(self) -> None:
        if self._released or time.monotonic() > self._deadline:
            state = "was released" if self._released else "is past its deadline"
            raise LeaseLost(f"lease {self.id} of {self.owner} {state}; take a new lease")

    def _writable(self, what: str) -> None:
        self._alive()
        if self._frozen:
            raise SandboxFrozen(f"lease {self.id} of {self.owner} is frozen; cannot {what}")

    def _cwd(self, cwd: str) -> Path:
        parts = paths.parts_of(cwd)
        if parts:
            paths.make_folder(self.workspace, cwd)
        return self.workspace.joinpath(*parts)

    async def _start(self, argv: Sequence[str], env: dict[str, str], where: Path) -> Command:
        home, temporary = self._folder / "home", self._folder / "tmp"
        if not self._ran:
            home.mkdir(exist_ok=True)
            temporary.mkdir(exist_ok=True)
            self._ran = True
        inherited = {name: os.environ[name] for name in self._config.env_allow if name in os.environ}
        own = {"HOME": str(home), "TMPDIR": str(temporary), "PWD": str(where), MARKER: self.id}
        line = list(argv)
        if self.isolation is Isolation.bubblewrap:
            line = wrap(line, writable=(self.workspace, home, temporary), cwd=where)
        return await start(line, inherited | own | env, where, self._config.limits)

    async def _kill_all(self) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            await command.kill()
        if self._ran:
            await _kill_marked(self.id)
        for command in commands:
            await command.collect()


async def _kill_marked(lease: str) -> None:
    """Second line of defence, for a tree whose keeper was killed by it: whoever carries the lease's marker dies."""
    marker = f"{MARKER}={lease}".encode()
    while pids := [pid for pid in _pids() if marker in _environment(pid)]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.001)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
