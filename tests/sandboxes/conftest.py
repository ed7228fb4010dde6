"""Leases for tests, at every level that this machine can give."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from occamy.sandboxes import bubblewrap
from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.local import LocalBackend, LocalSandbox
from occamy.sandboxes.protocol import Isolation

needs_bubblewrap = pytest.mark.skipif(
    not bubblewrap.available(), reason="bubblewrap is not installed or may not make namespaces here"
)


@pytest.fixture(params=[Isolation.process, pytest.param(Isolation.bubblewrap, marks=needs_bubblewrap)])
def level(request: pytest.FixtureRequest) -> Isolation:
    """Each isolation level in turn."""
    given: Isolation = request.param
    return given


@pytest.fixture
def python() -> tuple[str, Path]:
    """An interpreter that runs at both levels, and the folder that has to be readable for it."""
    return str(Path(sys.executable).resolve()), Path(sys.base_prefix).resolve()


@pytest.fixture
def within(tmp_path: Path) -> Callable[..., None]:
    """Runs a body with a fresh lease (process level unless the configuration says otherwise), in a fresh loop."""

    def run(
        body: Callable[[LocalSandbox], Awaitable[None]],
        config: LocalSandboxConfig | None = None,
        deadline_s: float = 60.0,
        **terms: Sequence[Any],
    ) -> None:
        async def session() -> None:
            backend = LocalBackend(tmp_path / "leases", config or LocalSandboxConfig(isolation=Isolation.process))
            sandbox = await backend.lease("test", "owner", deadline_s, **terms)
            try:
                await body(sandbox)
            finally:
                await sandbox.release()
                await backend.close()

        asyncio.run(session())

    return run


@pytest.fixture
def alive() -> Callable[[str], list[str]]:
    """Finds living processes whose command line holds a marker."""

    def find(marker: str) -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                except OSError:
                    continue
                if marker in line and not dead:
                    found.append(line)
        return found

    return find
