"""What every sandbox backend promises: one list, run against the local backend and against pods of a cluster."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest

from occamy.contracts.episode import Outcome
from occamy.sandboxes.config import Limits
from occamy.sandboxes.protocol import (
    LeaseExpired,
    LeaseLost,
    PathRefused,
    Sandbox,
    SandboxBackend,
    SandboxFrozen,
    ShortWrite,
    WorkspaceRefused,
)

LIMITS = Limits(
    cpu_seconds=20,
    memory_bytes=512 << 20,
    file_bytes=128 << 20,
    workspace_bytes=64 << 20,
    processes=40,
    open_files=64,
    output_bytes=1000,
)
"""What every backend under test is configured with."""
FINGERPRINT = "sha256:b44f755f3fb1eae5e81ec395a0227f5ca0c37b543ce5a2ce70ffba5d172d8f90"
"""Of the workspace that `an_archive_is_the_same_everywhere` makes."""


@dataclass
class Ground:
    """A backend and what a test can do to the place where it writes."""

    backend: SandboxBackend
    squeeze: Callable[[Sandbox, int], AbstractContextManager[None]]
    """Lets no file of the sandbox grow beyond so many bytes, as a full disk would."""

    @asynccontextmanager
    async def lease(self, deadline_s: float = 60.0) -> AsyncIterator[Sandbox]:
        """A sandbox, released in the end."""
        sandbox = await self.backend.lease("pool", "owner", deadline_s)
        try:
            yield sandbox
        finally:
            await sandbox.release()


Promise = Callable[[Ground], Awaitable[None]]


async def commands_give_bytes_exits_and_typed_outcomes(ground: Ground) -> None:
    async with ground.lease() as sandbox:
        done = await sandbox.exec(["cat"], stdin=b"\x00\xff\xfe\n")
        assert (done.outcome, done.exit_code, done.stdout, done.stderr) == (
            Outcome.completed,
            0,
            b"\x00\xff\xfe\n",
            b"",
        )
        assert not done.truncated and done.limit == "" and done.seconds > 0
        failed = await sandbox.exec(["sh", "-c", "printf '\\377' >&2; exit 3"])
        assert (failed.outcome, failed.exit_code, failed.stderr) == (Outcome.agent_failed, 3, b"\xff")
        missing = await sandbox.exec(["no-such-program"])
        assert (missing.outcome, missing.exit_code) == (Outcome.agent_failed, 127)
        killed = await sandbox.exec(["sh", "-c", "kill -9 $$"])
        assert (killed.outcome, killed.exit_code) == (Outcome.agent_failed, 137)


async def commands_run_where_and_with_what_they_are_told(ground: Ground) -> None:
    async with ground.lease() as sandbox:
        seen = (await sandbox.exec(["env"], env={"GIVEN": "ä=1"})).stdout.decode().splitlines()
        values = dict(line.split("=", 1) for line in seen)
        top = (await sandbox.exec(["pwd"])).stdout.decode().strip()
        assert values["GIVEN"] == "ä=1" and values["PWD"] == top
        assert not values["HOME"].startswith(top) and not values["TMPDIR"].startswith(top)
        script = 'test -w "$HOME" && test -w "$TMPDIR" && pwd'
        assert (await sandbox.exec(["sh", "-c", script], cwd="a/b")).stdout.decode().strip() == f"{top}/a/b"


async def commands_run_side_by_side(ground: Ground) -> None:
    async with ground.lease() as sandbox:
        script = "touch up$0; until [ -e up0 ] && [ -e up1 ] && [ -e up2 ]; do sleep 0.02; done; echo $0"
        done = await asyncio.gather(*(sandbox.exec(["sh", "-c", script, str(n)]) for n in range(3)))
        assert [each.stdout for each in done] == [b"0\n", b"1\n", b"2\n"]


async def thirty_mebibytes_go_round_and_a_short_write_is_an_error(ground: Ground) -> None:
    data = random.Random(1).randbytes(30 << 20)
    async with ground.lease() as sandbox:
        await sandbox.write("deep/er/blob", data)
        assert hashlib.sha256(await sandbox.read("deep/er/blob")).digest() == hashlib.sha256(data).digest()
        said = (await sandbox.exec(["sha256sum", "deep/er/blob"])).stdout.split()[0].decode()
        assert said == hashlib.sha256(data).hexdigest()
        with ground.squeeze(sandbox, 1 << 20), pytest.raises(ShortWrite, match="1048576 of 31457280 bytes"):
            await sandbox.write("deep/er/blob", data)
        assert len(await sandbox.read("deep/er/blob")) == len(data)  # the old content stands
        assert (await sandbox.exec(["ls", "-A", "deep/er"])).stdout == b"blob\n"


async def output_beyond_the_limit_is_dropped_and_said_to_be(ground: Ground) -> None:
    async with ground.lease() as sandbox:
        done = await sandbox.exec(["sh", "-c", "head -c 3000000 /dev/zero; head -c 1000 /dev/zero >&2"])
        assert (len(done.stdout), len(done.stderr), done.truncated) == (1000, 1000, True)
        assert done.outcome is Outcome.completed


async def a_command_past_its_time_ends_with_all_that_came_of_it(ground: Ground) -> None:
    loop = "while :; do echo x >> ticks; sleep 0.02; done"
    async with ground.lease() as sandbox:
        script = f"(setsid sh -c '{loop}' >/dev/null 2>&1 &); until [ -s ticks ]; do sleep 0.02; done; echo up; {loop}"
        done = await sandbox.exec(["sh", "-c", script], timeout_s=3.0)
        assert (done.outcome, done.exit_code, done.stdout) == (Outcome.timed_out, None, b"up\n")
        before = await sandbox.read("ticks")
        await asyncio.sleep(0.2)
        assert await sandbox.read("ticks") == before
        assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"  # the lease goes on


async def a_cancelled_command_ends(ground: Ground) -> None:
    async with ground.lease() as sandbox:
        running = asyncio.create_task(sandbox.exec(["sh", "-c", "while :; do echo x >> ticks; sleep 0.02; done"]))
        await _until(lambda: _exists(sandbox, "ticks"))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await _until(lambda: _settled(sandbox, "ticks"))


async def a_tree_beyond_a_limit_is_ended_and_the_limit_named(ground: Ground) -> None:
    async with ground.lease() as sandbox:
        many = await sandbox.exec(["sh", "-c", "i=0; while [ $i -lt 60 ]; do sleep 20 & i=$((i+1)); done; wait"])
        refused = b"fork" in many.stderr  # an ordinary user meets the kernel's limit
        assert many.outcome is Outcome.agent_failed and (many.limit == "processes" or refused)
        disk = await sandbox.exec(["sh", "-c", "while :; do i=$((i+1)); head -c 8000000 /dev/zero > f$i; done"])
        assert (disk.outcome, disk.limit) == (Outcome.agent_failed, "disk")


async def paths_stay_within_the_workspace(ground: Ground) -> None:
    async with ground.lease() as sandbox:
        await sandbox.exec(["sh", "-c", "ln -s /etc away; ln -s loop loop; mkfifo pipe; mkdir folder"])
        for path in (
            "../x",
            "/etc/passwd",
            "a/../../x",
            "away/passwd",
            "away",
            "loop",
            "",
            ".",
            "a\0b",
            "pipe",
            "folder",
        ):
            with pytest.raises(PathRefused):
                await sandbox.read(path)
        for path in ("../x", "/tmp/x", "away/x", "loop/x", "", ".", "a\0b", "folder"):
            with pytest.raises(PathRefused):
                await sandbox.write(path, b"gone")
        for cwd in ("..", "/etc", "away", "a\0b"):
            with pytest.raises(PathRefused):
                await sandbox.exec(["true"], cwd=cwd)
        with pytest.raises(FileNotFoundError, match="none"):
            await sandbox.read("none")
        for path in ("x" * 300, "é" * 20000, "a/" * 9000 + "a"):
            with pytest.raises((PathRefused, FileNotFoundError)):
                await sandbox.read(path)
        await sandbox.write("away", b"mine")  # a link under the written name itself is replaced, not followed
        assert await sandbox.read("away") == b"mine"
        for name in ("a b+c%2F&x=?#", "ä\udcff", "-"):
            await sandbox.write(name, name.encode(errors="surrogateescape"))
            assert await sandbox.read(name) == name.encode(errors="surrogateescape")


async def files_are_listed_and_removed(ground: Ground) -> None:
    async with ground.lease() as sandbox:
        assert await sandbox.files() == []
        names = ["-", "a/b/c", "a/d", "b", ".hidden/my file\n", "ä\udcff"]
        for name in names:
            await sandbox.write(name, b"1")
        await sandbox.exec(["sh", "-c", "ln -s b link; ln -s a folder; ln -s loop loop; mkfifo pipe; mkdir empty"])
        assert await sandbox.files() == sorted(names)
        for name in ("a/d", "link", "folder", "ä\udcff"):
            await sandbox.remove(name)
        assert await sandbox.files() == ["-", ".hidden/my file\n", "a/b/c", "b"]  # what links point to stands
        for path in ("", ".", "../x", "/tmp/x", "a\0b", "a", "empty", "b/c"):
            with pytest.raises(PathRefused):
                await sandbox.remove(path)
        for path in ("none", "none/x", "link"):
            with pytest.raises(FileNotFoundError, match=path):
                await sandbox.remove(path)
        await sandbox.freeze()
        assert await sandbox.files() == ["-", ".hidden/my file\n", "a/b/c", "b"]
        with pytest.raises(SandboxFrozen, match="is frozen; cannot remove"):
            await sandbox.remove("b")
    async with ground.lease() as sandbox:
        await sandbox.exec(["truncate", "-s", "100M", "big"])
        with pytest.raises(WorkspaceRefused, match="104857600 bytes"):
            await sandbox.files()


async def freeze_stops_everything_for_good(ground: Ground) -> None:
    loop = "i=0; while :; do i=$((i+1)); echo $i > counter; done"
    async with ground.lease() as sandbox:
        script = f"(setsid env -i sh -c '{loop}' >/dev/null 2>&1 &); (trap '' TERM HUP INT; {loop}) & sleep 60"
        running = asyncio.create_task(sandbox.exec(["sh", "-c", script]))
        await _until(lambda: _exists(sandbox, "counter"))
        await sandbox.freeze()
        with pytest.raises(SandboxFrozen):
            await running
        frozen = await sandbox.snapshot()
        await asyncio.sleep(0.3)
        assert await sandbox.snapshot() == frozen
        for use in (sandbox.exec(["true"]), sandbox.write("f", b""), sandbox.restore(frozen.archive)):
            with pytest.raises(SandboxFrozen, match="is frozen; cannot"):
                await use
        await sandbox.freeze()  # again
        assert len(await sandbox.read("counter")) < 20


async def an_archive_is_the_same_everywhere(ground: Ground) -> None:
    async with ground.lease() as sandbox:
        for name, data in {"b": b"2", "a/c": b"1" * 1000, "ä\udcff": b""}.items():
            await sandbox.write(name, data)
        await sandbox.exec(["sh", "-c", "chmod 700 b; ln -s /etc/passwd soft; ln b hard; mkdir empty; mkfifo pipe"])
        taken = await sandbox.snapshot()
        assert taken.fingerprint == f"sha256:{hashlib.sha256(taken.archive).hexdigest()}"
        with tarfile.open(fileobj=io.BytesIO(taken.archive)) as tar:
            found = [(m.name, m.type, m.mode, m.size, m.mtime, m.uid, m.linkname) for m in tar]
        assert found == [
            ("a", tarfile.DIRTYPE, 0o755, 0, 0, 0, ""),
            ("a/c", tarfile.REGTYPE, 0o644, 1000, 0, 0, ""),
            ("b", tarfile.REGTYPE, 0o755, 1, 0, 0, ""),
            ("empty", tarfile.DIRTYPE, 0o755, 0, 0, 0, ""),
            ("hard", tarfile.REGTYPE, 0o755, 1, 0, 0, ""),
            ("soft", tarfile.SYMTYPE, 0o777, 0, 0, 0, "/etc/passwd"),
            ("ä\udcff", tarfile.REGTYPE, 0o644, 0, 0, 0, ""),
        ]
        assert taken.fingerprint == FINGERPRINT


async def a_snapshot_is_brought_back_elsewhere(ground: Ground) -> None:
    async with ground.lease() as one, ground.lease() as two:
        await one.write("deep/f", random.Random(2).randbytes(3 << 20))
        await one.exec(["ln", "-s", "deep", "link"])
        taken = await one.snapshot()
        await two.write("extra/g", b"1")
        await two.exec(
            ["sh", "-c", "(setsid sh -c 'while :; do echo x > late; done' >/dev/null 2>&1 &) ; ln -s / root"]
        )
        await two.restore(taken.archive)
        assert await two.snapshot() == taken
        await two.write("more", b"1")
        assert (await two.snapshot()).fingerprint != taken.fingerprint


async def a_bad_archive_changes_nothing(ground: Ground) -> None:
    def tar(name: str, kind: bytes, link: str = "") -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as t:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            t.addfile(info)
        return buffer.getvalue()

    async with ground.lease() as sandbox:
        await sandbox.write("kept", b"old")
        good = await sandbox.snapshot()
        for bad in (tar("../x", tarfile.REGTYPE), tar("/x", tarfile.REGTYPE), tar("d", tarfile.CHRTYPE)):
            with pytest.raises(PathRefused):
                await sandbox.restore(bad)
        for bad in (b"", b"garbage" * 1000, good.archive[:700]):
            with pytest.raises(ValueError, match="no tar archive"):
                await sandbox.restore(bad)
        assert await sandbox.snapshot() == good


async def a_workspace_that_cannot_be_exported_is_refused(ground: Ground) -> None:
    async with ground.lease() as sandbox:
        await sandbox.exec(["sh", "-c", "for i in 1 2 3; do truncate -s 30M f$i; done"])
        for export in (sandbox.snapshot, sandbox.freeze):
            with pytest.raises(WorkspaceRefused, match="94371840 bytes"):
                await export()
    async with ground.lease() as sandbox:
        await sandbox.exec(["truncate", "-s", "100M", "big"])
        with pytest.raises(WorkspaceRefused, match="'big'"):
            await sandbox.read("big")


async def a_lease_ends_when_it_is_released_or_its_time_is_up(ground: Ground) -> None:
    sandbox = await ground.backend.lease("pool", "owner", 60.0)
    running = asyncio.create_task(sandbox.exec(["sleep", "30"]))
    await asyncio.sleep(0.2)
    await sandbox.release()
    with pytest.raises(LeaseLost, match="was released"):
        await running
    with pytest.raises(LeaseLost, match="was released"):
        await sandbox.read("f")
    await sandbox.release()
    async with ground.lease(deadline_s=1.0) as short:
        done = await short.exec(["sleep", "30"], timeout_s=60.0)
        assert done.outcome is Outcome.timed_out
        for use in (short.exec(["true"]), short.read("f"), short.write("f", b""), short.snapshot()):
            with pytest.raises(LeaseExpired, match="past its deadline; take a new lease"):
                await use
        await short.freeze()  # may always be asked for


async def leases_are_apart(ground: Ground) -> None:
    async with ground.lease() as one, ground.lease() as two:
        assert one.id != two.id
        await one.write("f", b"1")
        with pytest.raises(FileNotFoundError):
            await two.read("f")
        await one.freeze()
        assert (await two.exec(["echo", "on"])).stdout == b"on\n"


PROMISES: dict[str, Promise] = {
    promise.__name__: promise
    for promise in (
        commands_give_bytes_exits_and_typed_outcomes,
        commands_run_where_and_with_what_they_are_told,
        commands_run_side_by_side,
        thirty_mebibytes_go_round_and_a_short_write_is_an_error,
        output_beyond_the_limit_is_dropped_and_said_to_be,
        a_command_past_its_time_ends_with_all_that_came_of_it,
        a_cancelled_command_ends,
        a_tree_beyond_a_limit_is_ended_and_the_limit_named,
        paths_stay_within_the_workspace,
        files_are_listed_and_removed,
        freeze_stops_everything_for_good,
        an_archive_is_the_same_everywhere,
        a_snapshot_is_brought_back_elsewhere,
        a_bad_archive_changes_nothing,
        a_workspace_that_cannot_be_exported_is_refused,
        a_lease_ends_when_it_is_released_or_its_time_is_up,
        leases_are_apart,
    )
}


async def _until(true: Callable[[], Awaitable[bool]]) -> None:
    while not await true():
        await asyncio.sleep(0.02)


async def _exists(sandbox: Sandbox, path: str) -> bool:
    try:
        return bool(await sandbox.read(path))
    except FileNotFoundError:
        return False


async def _settled(sandbox: Sandbox, path: str) -> bool:
    before = await sandbox.read(path)
    await asyncio.sleep(0.2)
    return await sandbox.read(path) == before
