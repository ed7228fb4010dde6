"""The local backend: one folder per lease, one supervised process tree per command."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import os
import secrets
import signal
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from occamy.contracts.episode import Outcome
from occamy.sandboxes import archive, paths, roots
from occamy.sandboxes.bubblewrap import View, available, wrap, write_etc
from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.process import Command, Launch, start
from occamy.sandboxes.protocol import (
    DiskFull,
    ExecResult,
    Isolation,
    IsolationRefused,
    LeaseExpired,
    LeaseLost,
    Network,
    SandboxDied,
    SandboxError,
    SandboxFrozen,
    Snapshot,
)

MARKER = "OCCAMY_LEASE"
"""Environment variable that names the lease in every process it starts."""
_KILL_WAIT_S = 10.0
_STATUS_FD = 3


class LocalBackend:
    """Leases folders below `root`, best on a memory-backed file system.

    `root` is emptied when the backend starts, and removed by `close`, or when this process dies.
    """

    def __init__(self, root: Path, config: LocalSandboxConfig) -> None:
        """Raises IsolationRefused when this machine cannot give the level that `config` asks for."""
        self.config = config
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
        if config.network is not None and given is Isolation.process:
            raise IsolationRefused(
                f"sandbox.network {config.network.value!r} cannot be kept by isolation 'process'; "
                "set sandbox.isolation to bubblewrap, or leave sandbox.network out"
            )
        self._root = roots.Root(root)
        self._etc = self._root.folder / "etc"
        write_etc(self._etc)

    async def lease(
        self,
        pool: str,
        owner: str,
        deadline_s: float,
        *,
        reach: Sequence[tuple[str, int]] = (),
        readable: Sequence[Path] = (),
    ) -> LocalSandbox:
        """Make a lease folder. Nothing else happens until a command runs."""
        for host, port in reach:
            _check_address(host, port)
        for path in readable:
            self._check_readable(path)
        if reach and self.config.network is Network.none:
            raise IsolationRefused(
                f"lease for {owner}: has to reach {reach[0][0]}:{reach[0][1]}, and sandbox.network is 'none'; "
                "set it to proxy-only, or use a harness that runs outside of the sandbox"
            )
        folder = self._root.folder / f"{pool}-{next(self._numbers):06d}"
        self.check_room(f"lease for {owner}")
        try:
            folder.mkdir()
            (folder / "workspace").mkdir()
        except OSError as e:
            raise _refusal(f"lease for {owner}: cannot make {folder}", e) from e
        return LocalSandbox(self, folder, owner, time.monotonic() + deadline_s, reach, readable)

    async def check(self) -> None:
        """Raises DiskFull; a level that cannot be had was refused before."""
        self.check_room("the first lease")

    async def close(self) -> None:
        """Remove the root folder with all that leases left."""
        self._root.close()

    def view(self, folder: Path, readable: Sequence[Path]) -> View:
        """What commands of the lease in `folder` see under bubblewrap."""
        own = tuple(folder / name for name in ("workspace", "home", "tmp"))
        return View(writable=own, readable=tuple(readable), etc=self._etc)

    def check_room(self, who: str) -> None:
        """Raise DiskFull when the file system of the leases has next to nothing left, SandboxDied when it is gone."""
        try:
            at = os.statvfs(self._root.folder)
        except OSError as e:
            raise SandboxDied(f"{who}: {self._root.folder}: {e.strerror}") from e
        if (free := at.f_bavail * at.f_frsize) < self.config.min_free_bytes:
            raise DiskFull(
                f"{who}: {free} bytes free under {self._root.folder}, {self.config.min_free_bytes} needed; "
                "free some, or lower sandbox.min_free_bytes"
            )

    def _check_readable(self, path: Path) -> None:
        root, real = self._root.folder.resolve(), path.resolve()
        if not path.is_absolute() or not path.exists():
            raise ValueError(f"readable path {str(path)!r}: not an absolute path of something that exists")
        if root.is_relative_to(real) or real.is_relative_to(root):
            raise ValueError(f"readable path {str(path)!r}: holds the leases; name the folders that are needed instead")


class LocalSandbox:
    """One lease. See `Sandbox` for the contract of each method."""

    def __init__(
        self,
        backend: LocalBackend,
        folder: Path,
        owner: str,
        deadline: float,
        reach: Sequence[tuple[str, int]],
        readable: Sequence[Path],
    ) -> None:
        self.id = secrets.token_hex(8)
        self.owner = owner
        self._name = f"lease {self.id} of {owner}"
        self.isolation = backend.isolation
        self.workspace = folder / "workspace"
        """For who works on this machine; see `paths` for how to touch what an agent may touch too."""
        self._backend = backend
        self._config = backend.config
        self._folder = folder
        self._deadline = deadline
        self._reach = tuple(reach)
        self._view = backend.view(folder, readable)
        self._place = _identity(self.workspace)
        self._commands: list[Command] = []
        self._starting = asyncio.Lock()
        self._ran = False
        self._certain = True
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
        began = time.monotonic()
        async with self._starting:  # freeze waits for a start in progress, and none follows it
            self._writable("run a command")
            self._backend.check_room(self._name)
            command = await self._start(argv, dict(env or {}), self._cwd(cwd))
        try:
            code = await command.finish(stdin, min(timeout_s, self._deadline - began))
        except SandboxError:
            await self._kill_all()
            raise
        except BaseException:
            await command.kill()
            raise
        if command.killed:
            self._writable("finish a command", expired=False)
        if code is None:
            await command.kill()
        out, err = command.output()
        if code and not command.limit:
            self._backend.check_room(self._name)
        return ExecResult(
            outcome=Outcome.timed_out if code is None else Outcome.agent_failed if code else Outcome.completed,
            exit_code=code,
            stdout=out,
            stderr=err,
            seconds=time.monotonic() - began,
            truncated=command.truncated,
            limit=command.limit,
        )

    async def read(self, path: str) -> bytes:
        self._alive()
        return paths.read_file(self.workspace, path, self._config.limits.workspace_bytes)

    async def write(self, path: str, data: bytes) -> None:
        self._writable("write")
        paths.write_file(self.workspace, path, data)

    async def remove(self, path: str) -> None:
        self._writable("remove")
        paths.remove_file(self.workspace, path)

    async def files(self) -> list[str]:
        self._alive()
        return archive.files(self.workspace, self._config.limits.workspace_bytes)

    async def freeze(self) -> None:
        async with self._starting:
            self._frozen = True
            await self._kill_all()
        if not self._certain:
            raise SandboxDied(f"{self._name}: a keeper was killed, processes may have outlived it")
        self._check_place()
        archive.survey(self.workspace, self._config.limits.workspace_bytes)

    async def snapshot(self) -> Snapshot:
        self._alive()
        self._check_place()
        return archive.pack(self.workspace, self._config.limits.workspace_bytes)

    async def restore(self, archive_bytes: bytes) -> None:
        async with self._starting:
            self._writable("restore")
            await self._kill_all()
            incoming = self._folder / "incoming"
            incoming.mkdir()
            try:
                archive.unpack(archive_bytes, incoming, self._config.limits.workspace_bytes)
                roots.remove(self.workspace)
                incoming.rename(self.workspace)
            finally:
                roots.remove(incoming)
            self._place = _identity(self.workspace)

    async def release(self) -> None:
        async with self._starting:
            if not self._released:
                self._released = True
                await self._kill_all()
                roots.remove(self._folder)

    def _alive(self, *, expired: bool = True) -> None:
        if self._released:
            raise LeaseLost(f"{self._name} was released; take a new lease")
        if expired and time.monotonic() > self._deadline:
            raise LeaseExpired(f"{self._name} is past its deadline; take a new lease")

    def _writable(self, what: str, *, expired: bool = True) -> None:
        self._alive(expired=expired)
        if self._frozen:
            raise SandboxFrozen(f"{self._name} is frozen; cannot {what}")

    def _check_place(self) -> None:
        """A process-level agent can move its workspace away and put something else there."""
        if _identity(self.workspace) != self._place:
            raise SandboxDied(f"{self._name}: its workspace was removed or replaced")

    def _cwd(self, cwd: str) -> Path:
        parts = paths.parts_of(cwd)
        if parts:
            paths.make_folder(self.workspace, cwd)
        return self.workspace.joinpath(*parts)

    async def _start(self, argv: Sequence[str], env: dict[str, str], where: Path) -> Command:
        await self._collect([c for c in self._commands if c.gone])
        inherited = {name: os.environ[name] for name in self._config.env_allow if name in os.environ}
        home, temporary = self._folder / "home", self._folder / "tmp"
        try:
            home.mkdir(exist_ok=True)
            temporary.mkdir(exist_ok=True)
        except OSError as e:
            raise _refusal(f"{self._name}: cannot make {home}", e) from e
        own = {"HOME": str(home), "TMPDIR": str(temporary), "PWD": str(where), MARKER: self.id}
        wrapped = self.isolation is Isolation.bubblewrap
        reach = self._reach if wrapped else ()
        status_fd = _STATUS_FD if wrapped else None
        line = wrap(argv, self._view, where, own_network=not reach, status_fd=status_fd) if wrapped else list(argv)
        self._ran = True
        command = await start(
            Launch(
                argv=line,
                env=inherited | own | env,
                cwd=where,
                limits=self._config.limits,
                folder=self._folder,
                seconds=self._deadline - time.monotonic(),
                reach=reach,
                status_fd=status_fd,
            )
        )
        self._commands.append(command)
        return command

    async def _kill_all(self) -> None:
        commands = list(self._commands)
        for command in commands:
            await command.kill()
        if self._ran:
            self._certain &= await _kill_marked(self.id)
        await self._collect(commands)

    async def _collect(self, commands: list[Command]) -> None:
        for command in commands:
            self._certain &= await command.collect()
            if command in self._commands:
                self._commands.remove(command)


def _check_address(host: str, port: int) -> None:
    try:
        near = host == "localhost" or ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        near = False
    if not near or not 0 < port < 1 << 16:
        raise ValueError(f"cannot reach {host}:{port} from a sandbox; serve it on a port of 127.0.0.1")


def _refusal(what: str, error: OSError) -> SandboxError:
    kind = DiskFull if error.errno in paths.FULL else SandboxError
    return kind(f"{what}: {error.strerror}")


def _identity(folder: Path) -> tuple[int, int] | None:
    """Which folder this is; None when there is no folder, or a link to one."""
    try:
        at = folder.lstat()
    except OSError:
        return None
    return (at.st_dev, at.st_ino) if stat.S_ISDIR(at.st_mode) else None


async def _kill_marked(lease: str) -> bool:
    """Second line of defence, for a tree whose keeper was killed by it: whoever carries the lease's marker dies.

    Returns False when one of them does not.
    """
    marker = f"{MARKER}={lease}".encode()
    end = time.monotonic() + _KILL_WAIT_S
    while pids := [pid for pid in _pids() if marker in _environment(pid)]:
        if time.monotonic() > end:
            return False
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.001)
    return True


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
