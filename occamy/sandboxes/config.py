"""Configuration of the local sandbox backend."""

from __future__ import annotations

from pydantic import Field

from occamy.contracts.record import Record
from occamy.sandboxes.protocol import Isolation


class Limits(Record):
    """Resource limits of each command (setrlimit). All defaults are our choice."""

    cpu_seconds: int = Field(default=300, ge=1)
    """CPU time of one process, seconds."""
    memory_bytes: int = Field(default=4 << 30, ge=1 << 24)
    """Address space of one process, bytes."""
    file_bytes: int = Field(default=256 << 20, ge=0)
    """Largest file that may be written, bytes."""
    processes: int = Field(default=256, ge=1)
    """Processes and threads beyond those that the user already runs. The kernel does not enforce it for root."""
    open_files: int = Field(default=512, ge=16)
    """Open file descriptors of one process."""
    output_bytes: int = Field(default=8 << 20, ge=0)
    """Bytes kept of stdout, and of stderr; the rest is dropped and the result marked truncated."""


class LocalSandboxConfig(Record):
    """The local backend."""

    isolation: Isolation | None = None
    """Level to give; None takes the strongest there is. `process` lets commands see all of the host's programs."""
    minimum_isolation: Isolation = Isolation.process
    """Weakest level that the recipe accepts; leasing is refused below it. Our choice."""
    env_allow: tuple[str, ...] = ("PATH", "LANG", "LC_ALL", "TZ")
    """Host environment variables that commands inherit; everything else must be given per command. Our choice."""
    limits: Limits = Limits()
    """Resource limits of each command."""
