"""The local sandbox: processes, files, freeze, snapshots. Everything real; nothing sleeps longer than it must."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from occamy.contracts.episode import Outcome
from occamy.sandboxes import bubblewrap
from occamy.sandboxes.config import Limits, LocalSandboxConfig
from occamy.sandboxes.local import LocalBackend, LocalSandbox
from occamy.sandboxes.protocol import (
    Isolation,
    IsolationRefused,
    LeaseLost,
    ShortWrite,
)

PROCESS = LocalSandboxConfig(isolation=Isolation.process)


Within = Callable[..., None]
Alive = Callable[[str], list[str]]


def test_exec_returns_bytes_exit_and_typed_outcome(within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        done = await sandbox.exec(["cat"], stdin=b"\x00\xff\n")
        assert (done.outcome, done.exit_code, done.stdout, done.stderr) == (Outcome.completed, 0, b"\x00\xff\n", b"")
        failed = await sandbox.exec(["sh", "-c", "echo no >&2; exit 3"])
        assert (failed.outcome, failed.exit_code, failed.stderr) == (Outcome.agent_failed, 3, b"no\n")
        missing = await sandbox.exec(["no-such-program"])
        assert (missing.outcome, missing.exit_code) == (Outcome.agent_failed, 127)
        killed = await sandbox.exec(["sh", "-c", "kill -9 $$"])
        assert (killed.outcome, killed.exit_code) == (Outcome.agent_failed, 137)

    within(body)


def test_environment_is_an_allow_list_and_home_lies_in_the_lease(
    monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")

    async def body(sandbox: LocalSandbox) -> None:
        done = await sandbox.exec(["env"], env={"GIVEN": "1"})
        seen = dict(line.split("=", 1) for line in done.stdout.decode().splitlines())
        assert seen["GIVEN"] == "1" and "SECRET_TOKEN" not in seen
        lease = sandbox.workspace.parent
        assert (seen["HOME"], seen["TMPDIR"], seen["PWD"]) == (
            str(lease / "home"),
            str(lease / "tmp"),
            str(sandbox.workspace),
        )
        where = await sandbox.exec(["pwd"], cwd="a/b")
        assert where.stdout.decode().strip() == str(sandbox.workspace / "a/b")

    within(body)


def test_limits_hold(within: Within) -> None:
    config = LocalSandboxConfig(
        isolation=Isolation.process,
        limits=Limits(cpu_seconds=1, memory_bytes=512 << 20, file_bytes=1000, output_bytes=10, open_files=32),
    )

    async def body(sandbox: LocalSandbox) -> None:
        spun = await sandbox.exec(["sh", "-c", "while :; do :; done"], timeout_s=30)
        assert spun.outcome is Outcome.agent_failed and spun.exit_code in (128 + 24, 137)  # SIGXCPU, or SIGKILL
        big = await sandbox.exec(["dd", "if=/dev/zero", "of=big", "bs=2000", "count=1"])
        assert big.outcome is Outcome.agent_failed and len(await sandbox.read("big")) == 1000
        fat = await sandbox.exec([sys.executable, "-c", "x = bytearray(1 << 30)"])
        assert fat.outcome is Outcome.agent_failed
        long = await sandbox.exec(["sh", "-c", "echo 0123456789abcdef"])
        assert (long.stdout, long.truncated) == (b"0123456789", True)
        files = await sandbox.exec(["sh", "-c", "ulimit -n"])
        assert files.stdout == b"32\n"
        data = await sandbox.exec(["sh", "-c", "ulimit -d"])
        assert data.stdout == b"1048576\n"  # KiB: twice the memory

    within(body, config)


def test_what_may_be_reserved_can_be_more_than_what_may_be_filled(within: Within) -> None:
    limits = Limits(memory_bytes=128 << 20, reserved_bytes=1 << 30)
    config = LocalSandboxConfig(isolation=Isolation.process, limits=limits)
    reserve = "import mmap; mmap.mmap(-1, 512 << 20, flags=mmap.MAP_PRIVATE)"
    fill = "import time; x = b'x' * (512 << 20); time.sleep(30)"

    async def body(sandbox: LocalSandbox) -> None:
        assert (await sandbox.exec([sys.executable, "-c", reserve])).outcome is Outcome.completed
        filled = await sandbox.exec([sys.executable, "-c", fill])
        assert (filled.outcome, filled.limit) == (Outcome.agent_failed, "memory")

    within(body, config)


def test_thirty_mebibytes_go_round_and_a_short_write_is_an_error(within: Within) -> None:
    data = random.Random(1).randbytes(30 << 20)

    async def body(sandbox: LocalSandbox) -> None:
        await sandbox.write("deep/er/blob", data)
        assert hashlib.sha256(await sandbox.read("deep/er/blob")).digest() == hashlib.sha256(data).digest()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(ShortWrite, match="1048576 of 31457280 bytes"):
                await sandbox.write("deep/er/blob", data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(await sandbox.read("deep/er/blob")) == len(data)  # the old content stands
        assert [p.name for p in (sandbox.workspace / "deep/er").iterdir()] == ["blob"]

    within(body)


def test_expired_lease_and_command_bounded_by_it(tmp_path: Path) -> None:
    async def run() -> None:
        backend = LocalBackend(tmp_path / "leases", PROCESS)
        sandbox = await backend.lease("p", "o", 0.3)
        done = await sandbox.exec(["sleep", "615.5"], timeout_s=60.0)
        assert done.outcome is Outcome.timed_out
        with pytest.raises(LeaseLost, match="deadline"):
            await sandbox.exec(["true"])
        await sandbox.release()

    asyncio.run(run())


def test_minimum_isolation_is_demanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    bubblewrap.available.cache_clear()
    try:
        with pytest.raises(IsolationRefused, match="'bubblewrap' is required, 'process' is what can be given"):
            LocalBackend(tmp_path / "x", LocalSandboxConfig(minimum_isolation=Isolation.bubblewrap))
        with pytest.raises(IsolationRefused, match="'bubblewrap' is required"):
            LocalBackend(tmp_path / "x", LocalSandboxConfig(isolation=Isolation.bubblewrap))
        assert LocalBackend(tmp_path / "y", LocalSandboxConfig()).isolation is Isolation.process
    finally:
        bubblewrap.available.cache_clear()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no memory-backed folder, where leases should be")
def test_a_lease_without_commands_costs_under_a_millisecond() -> None:
    async def run() -> float:
        backend = LocalBackend(Path("/dev/shm") / f"leases-{os.getpid()}", PROCESS)
        spent = []
        for _ in range(50):
            began = time.process_time()
            sandbox = await backend.lease("p", "o", 60.0)
            await sandbox.freeze()
            await sandbox.release()
            spent.append(time.process_time() - began)
        await backend.close()
        return statistics.median(spent)

    assert asyncio.run(run()) < 1e-3
