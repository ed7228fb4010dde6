"""Configuration of the local sandbox backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from occamy.contracts.record import Record
from occamy.sandboxes.protocol import Isolation, Network


class Limits(Record):
    """Resource limits: of one process by setrlimit, of a command's whole tree by its keeper. All defaults are ours."""

    cpu_seconds: int = Field(default=300, ge=1)
    """CPU time of one process, seconds."""
    memory_bytes: int = Field(default=4 << 30, ge=1 << 24)
    """Memory of a command's tree, bytes."""
    reserved_bytes: int | None = Field(default=None, ge=1 << 24)
    """What one process may reserve as private data, filled or not, bytes: each worker of a node program keeps half a
    GiB for code that it may compile. None for twice `memory_bytes`."""
    file_bytes: int = Field(default=256 << 20, ge=0)
    """Largest file that may be written, bytes."""
    workspace_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """Disk that a lease may fill, and size of the largest snapshot, bytes; each file counts as 4096 at least."""
    processes: int = Field(default=256, ge=1)
    """Processes and threads of a command's tree. The kernel refuses more, except to root; the keeper kills the tree."""
    open_files: int = Field(default=512, ge=16)
    """Open file descriptors of one process."""
    output_bytes: int = Field(default=8 << 20, ge=0)
    """Bytes kept of stdout, and of stderr; the rest is dropped and the result marked truncated."""


class LocalSandboxConfig(Record):
    """The local backend."""

    backend: Literal["local"] = "local"
    """Sandboxes of this machine."""
    isolation: Isolation | None = None
    """Level to give; None takes the strongest there is. `process` lets commands see all of the host's programs."""
    minimum_isolation: Isolation = Isolation.process
    """Weakest level that the recipe accepts; leasing is refused below it. Our choice."""
    env_allow: tuple[str, ...] = ("PATH", "LANG", "LC_ALL", "TZ")
    """Host environment variables that commands inherit; everything else must be given per command. Our choice."""
    network: Network | None = None
    """Network rule that the recipe demands; refused where the level cannot give it. None takes the strictest that
    the level has: proxy-only under bubblewrap, no rule at all under process."""
    min_free_bytes: int = Field(default=16 << 20, ge=0)
    """Free disk below which nothing runs and failures count as the host's, bytes. Our choice."""
    limits: Limits = Limits()
    """Resource limits of each command."""
