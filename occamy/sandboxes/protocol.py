"""The Sandbox protocol that rollout sees, the same for every backend, with its typed outcomes and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol

from occamy.contracts.outcome import Outcome


class Isolation(StrEnum):
    """How far a sandbox is kept from its host, weakest first."""

    process = "process"
    """Own session, allow-listed environment, resource limits; shares the host's files and network."""
    bubblewrap = "bubblewrap"
    """Own mount, process and network namespaces: no network, read-only system, private /tmp."""
    container = "container"
    """A hardened pod: own everything but the kernel, no capabilities, a network policy."""
    gvisor = "gvisor"
    """A hardened pod with a kernel in user space."""
    kata = "kata"
    """A hardened pod in a virtual machine."""

    @property
    def rank(self) -> int:
        """Position from weakest (0) to strongest."""
        return list(Isolation).index(self)


class Network(StrEnum):
    """What of the network commands may reach, strictest first."""

    none = "none"
    """Nothing but their own loopback."""
    proxy_only = "proxy-only"
    """Also the addresses that the lease names: the recording proxy, a tool server."""


class SandboxError(RuntimeError):
    """The sandbox cannot go on. `outcome` is how the episode ended; none of these is ever a reward of 0."""

    outcome: ClassVar[Outcome] = Outcome.infra_failed


class SandboxDied(SandboxError):
    """What supervises the sandbox's processes is gone, or its workspace is: nothing that it says can be trusted."""


class DiskFull(SandboxError):
    """The file system that holds the leases is full."""


class ShortWrite(DiskFull):
    """Fewer bytes arrived on disk than were given (full disk, file size limit)."""


class LeaseLost(SandboxError):
    """The lease was released."""


class LeaseExpired(LeaseLost):
    """The deadline of the lease has passed."""

    outcome = Outcome.timed_out


class SandboxFrozen(SandboxError):
    """The sandbox is frozen: it can be read and exported, nothing may run or change."""


class WorkspaceRefused(SandboxError):
    """The agent left a workspace that cannot be exported: too large, too deep, or unreadable."""

    outcome = Outcome.agent_failed


class IsolationRefused(SandboxError):
    """The backend cannot give the isolation or the network rule that the recipe demands."""


class PathRefused(ValueError):
    """A path leaves the workspace or goes through a symbolic link. The caller's mistake, not infrastructure's."""


@dataclass(frozen=True)
class ExecResult:
    """What one command did."""

    outcome: Outcome
    """completed (exit 0), agent_failed (other exit, or killed by a limit), timed_out (wall deadline)."""
    exit_code: int | None
    """Exit status, 128 + signal when a signal ended it, None when the deadline did."""
    stdout: bytes
    stderr: bytes
    seconds: float
    """Wall time in seconds."""
    truncated: bool = False
    """True when output beyond the limit was dropped."""
    limit: str = ""
    """What the command's tree had too much of when it was killed for it: processes, memory or disk; else empty."""


@dataclass(frozen=True)
class Snapshot:
    """The workspace at one moment."""

    archive: bytes
    """Deterministic tar: sorted names, no times, no owners."""
    fingerprint: str
    """``sha256:<hex>`` of the archive."""


class Sandbox(Protocol):
    """A leased place to act. Every method raises LeaseLost after release, LeaseExpired after the deadline (freeze and
    release never), and SandboxError on faults of the host."""

    @property
    def id(self) -> str:
        """Unique id of the lease."""

    @property
    def isolation(self) -> Isolation:
        """Level that this sandbox gives."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_s: float = 60.0,
    ) -> ExecResult:
        """Run a command to its end and return its outcome.

        Raises SandboxFrozen after (or by) freeze, PathRefused for `cwd`, DiskFull when there was no room to run in,
        SandboxDied when its supervisor was killed. Processes that it leaves behind live on until freeze, release or
        the lease's deadline; under bubblewrap they end with the command.
        """

    async def read(self, path: str) -> bytes:
        """Read a workspace file, byte for byte. Raises PathRefused, FileNotFoundError, WorkspaceRefused (too large)."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a workspace file whole, making folders as needed. Raises PathRefused, SandboxFrozen, ShortWrite."""

    async def remove(self, path: str) -> None:
        """Remove a workspace file, or a link itself. Raises PathRefused, FileNotFoundError, SandboxFrozen."""

    async def files(self) -> list[str]:
        """Paths of all regular files, sorted; bytes that are no UTF-8 as surrogate escapes. Raises WorkspaceRefused."""

    async def freeze(self) -> None:
        """Kill every process that the sandbox started and refuse new ones and writes from now on.

        When it returns, no process is left, and what the workspace holds can be read in bounded time and memory.
        Raises SandboxDied where the first cannot be known, WorkspaceRefused without the second: never grade then.
        """

    async def snapshot(self) -> Snapshot:
        """Export the workspace. Raises WorkspaceRefused. Before freeze, files that vanish meanwhile are left out."""

    async def restore(self, archive: bytes) -> None:
        """Kill every process and replace the workspace by a snapshot's archive, or leave the old one.

        Raises SandboxFrozen, PathRefused for a member that escapes, ValueError for what is no such archive.
        """

    async def release(self) -> None:
        """Kill every process and remove everything. Safe to call twice."""


class SandboxBackend(Protocol):
    """Hands out sandboxes."""

    @property
    def isolation(self) -> Isolation:
        """Level that leases of this backend give."""

    async def lease(
        self,
        pool: str,
        owner: str,
        deadline_s: float,
        *,
        reach: Sequence[tuple[str, int]] = (),
        readable: Sequence[Path] = (),
    ) -> Sandbox:
        """Lease a sandbox for at most `deadline_s` seconds. Raises SandboxError when none can be had.

        `reach`: host and port of each server that commands connect to, under the same host and port. On this machine
        they are on the loopback, and nothing else can be reached; in a pod they are not, and its pool's network rule
        has to let it reach them.
        `readable`: files and folders of the host that commands may read, at their own paths: an agent program and
        what it needs, links resolved by the caller. A pod has none of the host's, only those of its image.
        The process level stops no connection and hides no file.
        Raises ValueError for a server that cannot be reached so, and for a path that is absent or holds leases.
        """

    async def check(self) -> None:
        """Raise SandboxError when no lease can be had, for a reason that does not pass by itself."""

    async def close(self) -> None:
        """Release every lease that is left. Safe to call twice."""
