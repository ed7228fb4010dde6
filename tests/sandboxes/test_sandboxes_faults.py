"""Faults of the host and ends of a lease: each is a typed outcome, none leaves a process or a folder behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from occamy.contracts.episode import Outcome
from occamy.sandboxes import process
from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.local import LocalBackend, LocalSandbox
from occamy.sandboxes.protocol import (
    DiskFull,
    Isolation,
    IsolationRefused,
    LeaseExpired,
    LeaseLost,
    SandboxDied,
    SandboxError,
    SandboxFrozen,
    ShortWrite,
    WorkspaceRefused,
)

Within = Callable[..., None]
Alive = Callable[[str], list[str]]


async def until(true: Callable[[], bool]) -> None:
    """Give way to others until something holds; the test's own timeout ends it otherwise."""
    while not true():
        await asyncio.sleep(0.01)


def test_every_error_has_the_outcome_that_rollout_records() -> None:
    outcomes = {kind: kind.outcome for kind in (SandboxError, SandboxDied, DiskFull, ShortWrite, SandboxFrozen)}
    assert set(outcomes.values()) == {Outcome.infra_failed}
    assert LeaseLost.outcome is IsolationRefused.outcome is Outcome.infra_failed
    assert LeaseExpired.outcome is Outcome.timed_out and WorkspaceRefused.outcome is Outcome.agent_failed


def test_a_command_that_hangs_is_timed_out_and_its_tree_is_gone(within: Within, alive: Alive, level: Isolation) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        done = await sandbox.exec(["sh", "-c", "echo begun; sleep 631.5"], timeout_s=1.0)
        assert (done.outcome, done.exit_code, done.stdout) == (Outcome.timed_out, None, b"begun\n")
        assert alive("sleep 631.5") == []
        assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"  # the lease goes on

    within(body, LocalSandboxConfig(isolation=level))


def test_the_lease_ends_by_itself_daemons_included(within: Within, alive: Alive) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        await sandbox.exec(["sh", "-c", "setsid env -i sleep 632.5 >/dev/null 2>&1 & echo up"])
        await until(lambda: alive("sleep 632.5") == [])  # nobody asked for it: its keeper knows the deadline
        for use in (sandbox.exec(["true"]), sandbox.read("f"), sandbox.write("f", b""), sandbox.snapshot()):
            with pytest.raises(LeaseExpired, match="past its deadline; take a new lease"):
                await use
        await sandbox.freeze()  # may always be asked for

    within(body, deadline_s=1.0)


def test_freeze_and_release_end_a_command_that_someone_waits_for(
    within: Within, alive: Alive, level: Isolation
) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        running = asyncio.create_task(sandbox.exec(["sleep", "633.5"]))
        await until(lambda: alive("sleep 633.5") != [])
        await sandbox.freeze()
        with pytest.raises(SandboxFrozen, match="is frozen; cannot finish a command"):
            await running
        assert alive("sleep 633.5") == []

    async def other(sandbox: LocalSandbox) -> None:
        running = asyncio.create_task(sandbox.exec(["sleep", "634.5"]))
        await until(lambda: alive("sleep 634.5") != [])
        await sandbox.release()
        with pytest.raises(LeaseLost, match="was released"):
            await running
        assert alive("sleep 634.5") == []

    within(body, LocalSandboxConfig(isolation=level))
    within(other, LocalSandboxConfig(isolation=level))


def test_no_command_slips_in_while_the_sandbox_freezes(within: Within, alive: Alive) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        starts = [asyncio.create_task(sandbox.exec(["sleep", "635.5"])) for _ in range(4)]
        await asyncio.sleep(0)
        await sandbox.freeze()
        assert alive("sleep 635.5") == []
        for start in starts:
            with pytest.raises(SandboxFrozen):
                await start

    within(body)


def test_a_cancelled_command_is_killed_and_others_are_not(within: Within, alive: Alive) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        other = asyncio.create_task(sandbox.exec(["sleep", "636.25"]))
        running = asyncio.create_task(sandbox.exec(["sleep", "636.5"]))
        await until(lambda: bool(alive("sleep 636.5") and alive("sleep 636.25")))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert alive("sleep 636.5") == [] and alive("sleep 636.25") != []
        other.cancel()

    within(body)


def test_a_keeper_that_was_killed_is_an_infrastructure_fault_then_and_at_freeze(within: Within, alive: Alive) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        with pytest.raises(SandboxDied, match="keeper of a command died") as caught:
            await sandbox.exec(["sh", "-c", "setsid sleep 637.5 & kill -9 $PPID; sleep 637.5"])
        assert caught.value.outcome is Outcome.infra_failed
        assert alive("sleep 637.5") == []  # found by the marker in their environment
        with pytest.raises(SandboxDied, match="a keeper was killed"):
            await sandbox.freeze()

    within(body)


def test_a_keeper_that_is_killed_later_is_noticed_at_freeze(within: Within, alive: Alive) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        script = "keeper=$PPID; (while [ ! -e go ]; do :; done; kill -9 $keeper; sleep 638.5) >/dev/null 2>&1 & echo up"
        assert (await sandbox.exec(["sh", "-c", script])).stdout == b"up\n"
        await sandbox.write("go", b"")
        await until(lambda: "sleep 638.5 " in alive("sleep 638.5"))
        with pytest.raises(SandboxDied, match="a keeper was killed"):
            await sandbox.freeze()
        assert alive("sleep 638.5") == []

    within(body)


def test_a_keeper_that_hangs_is_killed_and_counts_as_dead(
    within: Within, alive: Alive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_KILL_WAIT_S", 0.2)

    async def body(sandbox: LocalSandbox) -> None:
        done = await sandbox.exec(["sh", "-c", "kill -STOP $PPID; sleep 639.5"], timeout_s=0.5)
        assert done.outcome is Outcome.timed_out
        with pytest.raises(SandboxDied):
            await sandbox.freeze()
        assert alive("sleep 639.5") == []

    within(body)


def test_a_workspace_that_is_gone_is_an_infrastructure_fault(within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        shutil.rmtree(sandbox.workspace)
        for use in (sandbox.read("f"), sandbox.write("f", b""), sandbox.snapshot(), sandbox.freeze()):
            with pytest.raises(SandboxDied, match="workspace was removed or replaced"):
                await use

    within(body)


def test_a_program_that_the_host_cannot_start_is_an_infrastructure_fault(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(SandboxError, match="cannot start a process for 'true': No such file"):
            await sandbox.exec(["true"])

    within(body)


def test_without_room_nothing_is_leased(within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        raise AssertionError("not reached")

    with pytest.raises(DiskFull, match=r"lease for owner: \d+ bytes free under .*, 1152921504606846976 needed"):
        within(body, LocalSandboxConfig(isolation=Isolation.process, min_free_bytes=1 << 60))


_FULL = """
import asyncio, sys
from pathlib import Path
from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.local import LocalBackend
from occamy.sandboxes.protocol import DiskFull, ShortWrite

async def main():
    config = LocalSandboxConfig(isolation="process", min_free_bytes=100_000)
    backend = LocalBackend(Path(sys.argv[1]) / "leases", config)
    sandbox = await backend.lease("p", "o", 60.0)
    await sandbox.write("kept", b"old")
    try:
        await sandbox.write("kept", bytes(2_000_000))
    except ShortWrite as e:
        print("write:", e.outcome, (await sandbox.read("kept")).decode())
    try:
        await sandbox.exec(["sh", "-c", "cat /dev/zero > big"])
    except DiskFull as e:
        print("exec:", e.outcome)
    for use in (sandbox.exec(["true"]), backend.lease("p", "o", 60.0)):
        try:
            await use
        except DiskFull as e:
            print("then:", e.outcome)
    await sandbox.freeze()
    print("exported:", len((await sandbox.snapshot()).archive) > 500_000)
    await sandbox.release()
    await (await backend.lease("p", "o", 60.0)).release()
    await backend.close()

asyncio.run(main())
"""


def _may_mount() -> bool:
    line = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return (
        shutil.which("unshare") is not None and subprocess.run(line, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not _may_mount(), reason="this user may not mount a small file system in a namespace of its own")
def test_a_full_disk_is_an_infrastructure_fault_and_loses_nothing(tmp_path: Path) -> None:
    mounted = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, "sh", tmp_path, sys.executable, _FULL],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "write: infra_failed old",
        "exec: infra_failed",
        "then: infra_failed",
        "then: infra_failed",
        "exported: True",
    ], done.stderr


_ROLLOUT = """
import asyncio, sys
from pathlib import Path
from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.local import LocalBackend

async def main():
    backend = LocalBackend(Path(sys.argv[1]), LocalSandboxConfig(isolation=sys.argv[2]))
    idle, busy, left = [await backend.lease("p", "o", 600.0) for _ in range(3)]
    await idle.write("f", b"x")
    await left.exec(["sh", "-c", "setsid env -i sleep 640.25 >/dev/null 2>&1 & true"])
    await busy.exec(["sh", "-c", "(setsid env -i sleep 640.5 &); touch up; while :; do date > f; done; : 640.75"])

asyncio.run(main())
"""


def test_killing_the_rollout_process_leaves_no_process_and_no_folder(
    tmp_path: Path, alive: Alive, level: Isolation
) -> None:
    root = tmp_path / "leases"
    rollout = subprocess.Popen([sys.executable, "-c", _ROLLOUT, root, level.value], stdout=subprocess.PIPE)
    expected = {"640.5", "640.75"} | ({"640.25"} if level is Isolation.process else set())
    wait(lambda: all(any(mark in line for line in alive("640.")) for mark in expected) and any(root.rglob("up")))
    rollout.kill()
    rollout.communicate()
    wait(lambda: not alive("640.") and not root.exists())
    assert rollout.returncode == -signal.SIGKILL


def test_a_root_is_emptied_at_start_and_removed_when_its_backend_is_dropped(tmp_path: Path) -> None:
    root = tmp_path / "leases"
    (root / "old" / "lease").mkdir(parents=True)

    async def run() -> None:
        backend = LocalBackend(root, LocalSandboxConfig(isolation=Isolation.process))
        sandbox = await backend.lease("p", "o", 60.0)
        assert not (root / "old").exists()
        del backend  # the lease keeps it
        await sandbox.write("f", b"x")

    asyncio.run(run())
    wait(lambda: not root.exists())


@pytest.mark.skipif(os.getuid() == 0, reason="root reads and removes files of any mode")
def test_modes_that_lock_the_owner_out_do_not_save_a_folder(within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        await sandbox.exec(["sh", "-c", "echo x > f; chmod 0 f"])
        with pytest.raises(WorkspaceRefused, match="'f': may not be read"):
            await sandbox.snapshot()
        await sandbox.exec(["sh", "-c", "rm f; mkdir -p d/e; echo x > d/e/f; chmod 0 d/e/f d/e d"])
        with pytest.raises(WorkspaceRefused, match="'d': Permission denied"):
            await sandbox.freeze()
        folder = sandbox.workspace.parent
        await sandbox.release()
        assert not folder.exists()

    within(body)


def wait(true: Callable[[], bool]) -> None:
    """Look again until something holds; the test's own timeout ends it otherwise."""
    while not true():
        time.sleep(0.01)
