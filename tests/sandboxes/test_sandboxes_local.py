"""The local sandbox: processes, files, freeze, snapshots. Everything real; nothing sleeps longer than it must."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import random
import resource
import subprocess
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable
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
    PathRefused,
    SandboxError,
    SandboxFrozen,
    ShortWrite,
)

PROCESS = LocalSandboxConfig(isolation=Isolation.process)


def within(
    tmp_path: Path, body: Callable[[LocalSandbox], Awaitable[None]], config: LocalSandboxConfig | None = None
) -> None:
    """Run `body` with a fresh lease."""

    async def run() -> None:
        backend = LocalBackend(tmp_path / "leases", config or PROCESS)
        sandbox = await backend.lease("test", "owner", 60.0)
        try:
            await body(sandbox)
        finally:
            await sandbox.release()

    asyncio.run(run())


def alive(marker: str) -> list[str]:
    """Processes whose command line holds a marker."""
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


def test_exec_returns_bytes_exit_and_typed_outcome(tmp_path: Path) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        done = await sandbox.exec(["cat"], stdin=b"\x00\xff\n")
        assert (done.outcome, done.exit_code, done.stdout, done.stderr) == (Outcome.completed, 0, b"\x00\xff\n", b"")
        failed = await sandbox.exec(["sh", "-c", "echo no >&2; exit 3"])
        assert (failed.outcome, failed.exit_code, failed.stderr) == (Outcome.agent_failed, 3, b"no\n")
        missing = await sandbox.exec(["no-such-program"])
        assert (missing.outcome, missing.exit_code) == (Outcome.agent_failed, 127)
        killed = await sandbox.exec(["sh", "-c", "kill -9 $$"])
        assert (killed.outcome, killed.exit_code) == (Outcome.agent_failed, 137)

    within(tmp_path, body)


def test_environment_is_an_allow_list_and_home_lies_in_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    within(tmp_path, body)


def test_deadline_kills_the_whole_tree(tmp_path: Path) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        script = "(setsid sleep 611.5 &) ; setsid sh -c 'sleep 611.5; true' & sleep 611.5"
        done = await sandbox.exec(["sh", "-c", script], timeout_s=0.3)
        assert (done.outcome, done.exit_code) == (Outcome.timed_out, None)
        assert alive("sleep 611.5") == []

    within(tmp_path, body)


def test_daemons_live_until_freeze_then_nothing_runs_or_changes(tmp_path: Path) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        # a double fork in its own session, environment wiped: found as a descendant of its keeper
        done = await sandbox.exec(
            ["sh", "-c", "setsid env -i sh -c 'sleep 612.5 & sleep 612.5' >/dev/null 2>&1 & echo up"]
        )
        assert done.stdout == b"up\n"
        while len(alive("sleep 612.5")) < 2:
            await asyncio.sleep(0.01)
        await sandbox.write("before", b"1")
        await sandbox.freeze()
        assert alive("sleep 612.5") == []
        with pytest.raises(SandboxFrozen):
            await sandbox.exec(["true"])
        with pytest.raises(SandboxFrozen):
            await sandbox.write("after", b"2")
        assert await sandbox.read("before") == b"1"

    within(tmp_path, body)


def test_killed_keeper_does_not_save_its_tree(tmp_path: Path) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        with pytest.raises(SandboxError, match="keeper"):
            await sandbox.exec(["sh", "-c", "setsid sleep 613.5 & kill -9 $PPID; sleep 613.5"])
        await sandbox.freeze()
        assert alive("sleep 613.5") == []

    within(tmp_path, body)


def test_death_of_the_rollout_process_ends_the_tree(tmp_path: Path) -> None:
    code = f"""
import asyncio
from pathlib import Path
from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.local import LocalBackend
async def main():
    sandbox = await LocalBackend(Path({str(tmp_path / "leases")!r}), LocalSandboxConfig()).lease("p", "o", 60.0)
    print("go", flush=True)
    await sandbox.exec(["sh", "-c", "setsid sleep 614.5 & sleep 614.5"])
asyncio.run(main())
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}
    )
    deadline = time.monotonic() + 20
    while len(alive("sleep 614.5")) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    child.kill()
    child.communicate()
    while alive("sleep 614.5") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive("sleep 614.5") == []


def test_limits_hold(tmp_path: Path) -> None:
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

    within(tmp_path, body, config)


def test_thirty_mebibytes_go_round_and_a_short_write_is_an_error(tmp_path: Path) -> None:
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

    within(tmp_path, body)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "link/x", "link", "loop/x", "", ".", "a\0b"])
def test_paths_do_not_escape(tmp_path: Path, path: str) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        outside = tmp_path / "outside"
        outside.mkdir(exist_ok=True)
        (outside / "x").write_text("private")
        (sandbox.workspace / "link").symlink_to(outside)
        (sandbox.workspace / "loop").symlink_to("loop")
        with pytest.raises(PathRefused):
            await sandbox.read(path)
        if path != "link":  # a link under the written name itself is replaced, not followed
            with pytest.raises(PathRefused):
                await sandbox.write(path, b"gone")
        if path not in ("", "."):  # the workspace itself is a fine place to run in
            with pytest.raises(PathRefused):
                await sandbox.exec(["true"], cwd=path)
        assert (outside / "x").read_text() == "private"

    within(tmp_path, body)


def test_writing_over_a_link_replaces_the_link(tmp_path: Path) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        outside = tmp_path / "secret"
        outside.write_text("private")
        (sandbox.workspace / "f").symlink_to(outside)
        with pytest.raises(PathRefused):
            await sandbox.read("f")
        await sandbox.write("f", b"mine")
        assert outside.read_text() == "private" and await sandbox.read("f") == b"mine"
        os.mkfifo(sandbox.workspace / "pipe")
        with pytest.raises(PathRefused):
            await sandbox.read("pipe")
        with pytest.raises(FileNotFoundError):
            await sandbox.read("none")

    within(tmp_path, body)


def test_snapshot_is_deterministic_and_restore_brings_it_back(tmp_path: Path) -> None:
    async def run() -> None:
        backend = LocalBackend(tmp_path / "leases", PROCESS)
        one, two = await backend.lease("p", "a", 60.0), await backend.lease("p", "b", 60.0)
        for sandbox, names in ((one, ("a", "d/b", "c")), (two, ("c", "d/b", "a"))):
            for name in names:
                await sandbox.write(name, name.encode() * 3)
            (sandbox.workspace / "l").symlink_to("a")
            os.utime(sandbox.workspace / "a", (1.0, float(len(names[0]))))
        first, second = await one.snapshot(), await two.snapshot()
        assert first == second and first.fingerprint.startswith("sha256:")
        await two.write("a", b"changed")
        await two.write("extra", b"1")
        assert (await two.snapshot()).fingerprint != first.fingerprint
        await two.restore(first.archive)
        assert await two.snapshot() == first
        await one.freeze()
        assert await one.snapshot() == first
        await one.release()
        with pytest.raises(LeaseLost, match="released"):
            await one.read("a")
        assert not one.workspace.parent.exists()
        await one.release()
        await two.release()

    asyncio.run(run())


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


def test_a_lease_without_commands_costs_under_a_millisecond(tmp_path: Path) -> None:
    async def run() -> float:
        backend = LocalBackend(tmp_path / "leases", PROCESS)
        began = time.process_time()
        for _ in range(50):
            sandbox = await backend.lease("p", "o", 60.0)
            await sandbox.freeze()
            await sandbox.release()
        return (time.process_time() - began) / 50

    assert asyncio.run(run()) < 1e-3


def test_an_archive_cannot_plant_files_outside(tmp_path: Path) -> None:
    def tar(*members: tuple[str, bytes, str]) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as t:
            for name, kind, link in members:
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, link
                t.addfile(info)
        return buffer.getvalue()

    async def body(sandbox: LocalSandbox) -> None:
        for bad in (
            tar(("../x", tarfile.REGTYPE, "")),
            tar(("/x", tarfile.REGTYPE, "")),
            tar(("h", tarfile.LNKTYPE, "/etc/passwd")),
            tar(("a", tarfile.SYMTYPE, str(tmp_path)), ("a/x", tarfile.SYMTYPE, "y")),
        ):
            with pytest.raises(PathRefused):
                await sandbox.restore(bad)
        assert not (tmp_path / "x").exists() and not (tmp_path / "x").is_symlink()

    within(tmp_path, body)


def test_bubblewrap_command_line_shows_system_folders_and_the_lease_only(tmp_path: Path) -> None:
    line = bubblewrap.wrap(["ls", "-l"], writable=(tmp_path,), cwd=tmp_path / "w")
    assert line[0] == "bwrap" and "--unshare-all" in line and "--die-with-parent" in line
    bound = [line[i + 1] for i, word in enumerate(line) if word in ("--bind", "--bind-try")]
    shown = [line[i + 1] for i, word in enumerate(line) if word in ("--ro-bind", "--ro-bind-try")]
    assert bound == [str(tmp_path)] and all(p.startswith(("/usr", "/bin", "/sbin", "/lib", "/etc/")) for p in shown)
    assert line[-5:] == ["--chdir", str(tmp_path / "w"), "--", "ls", "-l"]


@pytest.mark.skipif(not bubblewrap.available(), reason="bubblewrap is not installed or may not make namespaces here")
def test_bubblewrap_hides_host_and_network(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("private")

    async def body(sandbox: LocalSandbox) -> None:
        assert sandbox.isolation is Isolation.bubblewrap
        script = f"cat {secret}; touch /usr/x; touch here $HOME/x $TMPDIR/x; cat /proc/net/dev"
        done = await sandbox.exec(["sh", "-c", script])
        assert b"private" not in done.stdout and b"Read-only" in done.stderr
        assert [line.split(b":")[0].strip() for line in done.stdout.splitlines()[2:]] == [b"lo"]
        assert await sandbox.read("here") == b""
        await sandbox.exec(["sh", "-c", "setsid sleep 616.5 & true"])
        await sandbox.freeze()
        assert alive("sleep 616.5") == []

    within(tmp_path, body, LocalSandboxConfig(minimum_isolation=Isolation.bubblewrap))
