"""The local backend keeps every promise of the contract, at each level that this machine can give."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.local import LocalBackend
from occamy.sandboxes.protocol import Isolation, Sandbox

from .contract import LIMITS, PROMISES, Ground


@contextmanager
def squeeze(_: Sandbox, size: int) -> Iterator[None]:
    """This process is what writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("promise", PROMISES)
def test_the_local_backend_keeps_its_promise(promise: str, level: Isolation, tmp_path: Path) -> None:
    async def run() -> None:
        backend = LocalBackend(tmp_path / "leases", LocalSandboxConfig(isolation=level, limits=LIMITS))
        try:
            await PROMISES[promise](Ground(backend, squeeze))
        finally:
            await backend.close()

    asyncio.run(run())
