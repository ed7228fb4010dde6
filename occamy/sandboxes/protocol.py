"""The Sandbox protocol that rollout sees, the same for every backend, with its typed outcomes and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from occamy.contracts.episode import Outcome


class Isolation(StrEnum):
    """How far a sandbox is kept from its host, weakest first."""

    process = "process"
    """Own session, allow-listed environment, resource limits; shares the host's files and network."""
    bubblewrap = "bubblewrap"
    """Own mount, process and network namespaces: no network, read-only system, private /tmp."""

    @property
    def rank(self) -> int:
        """Position from weakest (0) to strongest."""
        return list(Isolation).index(self)


class SandboxError(RuntimeError):
    """The sandbox itself failed: an infrastructure fault, never the agent's."""


class LeaseLost(SandboxError):
    """The lease was released or its deadline has passed."""


class SandboxFrozen(SandboxError):
    """The sandbox is frozen: it can be read and exported, nothing may run or change."""


class ShortWrite(SandboxError):
    """Fewer bytes arrived on disk than were given (full disk, file size limit)."""


class IsolationRefused(SandboxError):
    """The backend cannot give the isolation level that the recipe demands."""


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


@dataclass(frozen=True)
class Snapshot:
    """The workspace at one moment."""

    archive: bytes
    """Deterministic tar: sorted names, no times, no owners."""
    fingerprint: str
    """``sha256:<hex>`` of the archive."""


class Sandbox(Protocol):
    """A leased place to act. Every method raises LeaseLost after release or deadline, SandboxError on host faults."""

    @property
    def id(self) -> str:
        """Unique id of the lease."""

    @property
    def isolation(self) -> Isolation:
        """Level that this sandbox gives."""

    @property
    def workspace(self) -> Path:
        """Folder that holds the workspace, where the backend has it on this machine."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_s: float = 60.0,
    ) -> ExecResult:
        """Run a command to its end and return its outcome. Raises SandboxFrozen after freeze, PathRefused for `cwd`.

        Processes that it leaves behind live on until freeze or release; under bubblewrap they end with the command.
        """

    async def read(self, path: str) -> bytes:
        """Read a workspace file, byte for byte. Raises PathRefused, FileNotFoundError."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a workspace file whole, making folders as needed. Raises PathRefused, SandboxFrozen, ShortWrite."""

    async def freeze(self) -> None:
        """Kill every process that the sandbox started and refuse new ones and writes from now on."""

    async def snapshot(self) -> Snapshot:
        """Export the workspace."""

    async def restore(self, archive: bytes) -> None:
        """Replace the workspace by an archive. Raises SandboxFrozen, PathRefused for a member that escapes."""

    async def release(self) -> None:
        """Kill every process and remove everything. Safe to call twice."""


class SandboxBackend(Protocol):
    """Hands out sandboxes."""

    @property
    def isolation(self) -> Isolation:
        """Level that leases of this backend give."""

    async def lease(self, pool: str, owner: str, deadline_s: float) -> Sandbox:
        """Lease a sandbox for at most `deadline_s` seconds. Raises SandboxError when none can be had."""
