"""Hostile acts at each isolation level. What is expected of them is the table of docs/sandboxes.md, row by row."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from occamy.contracts.episode import Outcome
from occamy.sandboxes.config import Limits, LocalSandboxConfig
from occamy.sandboxes.local import LocalBackend, LocalSandbox
from occamy.sandboxes.protocol import (
    ExecResult,
    Isolation,
    PathRefused,
    SandboxDied,
    SandboxFrozen,
    WorkspaceRefused,
)

PAGE = Path(__file__).parents[2] / "docs" / "sandboxes.md"
STOPPED, NOT_STOPPED, DETECTED, OWN_RIGHTS = "stopped", "not stopped", "detected", "as the user may"
LIMITS = Limits(
    cpu_seconds=1,
    memory_bytes=256 << 20,
    file_bytes=4 << 20,
    workspace_bytes=8 << 20,
    processes=48,
    output_bytes=1000,
)


@dataclass
class Scene:
    """What an act plays with."""

    sandbox: LocalSandbox
    sibling: LocalSandbox
    outside: Path
    """A folder beside the leases with the file `grader.py`, which holds the word private."""
    python: str
    alive: Callable[[str], list[str]]

    async def sh(self, script: str, timeout_s: float = 30.0) -> ExecResult:
        return await self.sandbox.exec(["sh", "-c", script], timeout_s=timeout_s)

    async def py(self, script: str, timeout_s: float = 30.0) -> ExecResult:
        return await self.sandbox.exec([self.python, "-I", "-S", "-c", script], timeout_s=timeout_s)


def verdict(stopped: bool) -> str:
    return STOPPED if stopped else NOT_STOPPED


def host_may(script: str) -> bool:
    """Whether this user can do it without any sandbox."""
    return subprocess.run(["sh", "-c", script], capture_output=True, check=False).returncode == 0


async def bounded(scene: Scene, script: str) -> str:
    """A few rights that depend on the user: at the process level they must be the user's own."""
    done = (await scene.sh(script)).outcome is Outcome.completed
    if scene.sandbox.isolation is Isolation.bubblewrap:
        return verdict(not done)
    return OWN_RIGHTS if done == host_may(script) else "differs from the host"


async def read_a_file_outside_such_as_the_grader(scene: Scene) -> str:
    return verdict(b"private" not in (await scene.sh(f"cat {scene.outside}/grader.py")).stdout)


async def write_a_file_outside_such_as_the_grader(scene: Scene) -> str:
    await scene.sh(f"echo mine > {scene.outside}/grader.py; touch {scene.outside}/new")
    return verdict((scene.outside / "grader.py").read_text() == "private" and not (scene.outside / "new").exists())


async def hard_link_a_file_outside_into_the_workspace(scene: Scene) -> str:
    await scene.sh(f"ln {scene.outside}/grader.py here")
    return verdict(not (scene.sandbox.workspace / "here").exists())


async def see_the_environment_of_the_rollout(scene: Scene) -> str:
    return verdict(b"SECRET_OF_THE_ROLLOUT" not in (await scene.sh("env")).stdout)


async def read_the_environment_of_another_sandbox(scene: Scene) -> str:
    other = asyncio.create_task(scene.sibling.exec(["sleep", "623.5"], env={"KEY": "k3y"}))
    await until(lambda: len(scene.alive("sleep 623.5")) > 0)
    script = """
import glob
for name in glob.glob("/proc/[0-9]*/environ"):
    try: print("found" if b"KEY=k3y" in open(name, "rb").read() else "")
    except OSError: pass
"""
    done = await scene.py(script)
    other.cancel()
    assert done.outcome is Outcome.completed
    return verdict(b"found" not in done.stdout)


async def kill_a_process_of_another_sandbox(scene: Scene) -> str:
    other = asyncio.create_task(scene.sibling.exec(["sleep", "624.5"], timeout_s=30))
    await until(lambda: "sleep 624.5 " in scene.alive("sleep 624.5"))
    script = """
import glob, os
for name in glob.glob("/proc/[0-9]*/cmdline"):
    try: line = open(name, "rb").read()
    except OSError: continue
    if line == b"sleep\\0" + b"624.5\\0": os.kill(int(name.split("/")[2]), 9)
"""
    assert (await scene.py(script)).outcome is Outcome.completed
    living = bool(scene.alive("sleep 624.5"))
    other.cancel()
    return verdict(living)


async def kill_the_supervisor(scene: Scene) -> str:
    try:
        done = await scene.sh("setsid env -i sleep 625.5 & kill -9 $PPID; sleep 0.1; echo still here")
    except SandboxDied:
        with pytest.raises(SandboxDied):  # a daemon without marker may have outlived it: never graded
            await scene.sandbox.freeze()
        end_orphans("sleep\x00625.5\x00")
        return DETECTED
    return verdict(done.stdout == b"still here\n")


async def kill_the_rollout_process(scene: Scene) -> str:
    root = scene.outside / "victim"
    code = f"""
import asyncio, os
from pathlib import Path
from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.local import LocalBackend
async def main():
    config = LocalSandboxConfig(isolation={scene.sandbox.isolation.value!r})
    backend = LocalBackend(Path({str(root)!r}), config)
    sandbox = await backend.lease("p", "o", 60.0)
    await sandbox.exec(["sh", "-c", f"kill -9 {{os.getpid()}}"])
    await sandbox.release()
asyncio.run(main())
"""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    return verdict(await child.wait() == 0)


async def open_a_socket_to_a_server_of_the_host(scene: Scene) -> str:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    done = await scene.py(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
    server.close()
    return verdict(done.outcome is not Outcome.completed)


async def bomb_with_forks(scene: Scene) -> str:
    done = await scene.sh("bomb() { sleep 0.02; bomb & bomb & wait; }; bomb; sleep 626.5")
    refused = b"fork" in done.stderr  # an ordinary user's bomb meets the kernel's limit
    return verdict((done.limit == "processes" or refused) and not scene.alive("sleep 626.5"))


async def fill_the_memory_with_one_process(scene: Scene) -> str:
    return verdict(b"MemoryError" in (await scene.py("x = bytearray(1 << 30)")).stderr)


async def fill_the_memory_with_many_processes(scene: Scene) -> str:
    code = "x = b'x' * (100 << 20); import time; time.sleep(30)"
    done = await scene.sh(f'for i in 1 2 3 4 5; do {scene.python} -I -S -c "{code}" & done; wait')
    return verdict(done.limit == "memory")


async def burn_the_processor(scene: Scene) -> str:
    done = await scene.sh("while :; do :; done")
    return verdict(done.exit_code in (128 + 24, 137))  # SIGXCPU, or SIGKILL


async def fill_the_disk_with_one_file(scene: Scene) -> str:
    await scene.sh("cat /dev/zero > big")
    return verdict(len(await scene.sandbox.read("big")) == LIMITS.file_bytes)


async def fill_the_disk_with_many_files(scene: Scene) -> str:
    done = await scene.sh("while :; do i=$((i+1)); head -c 1000000 /dev/zero > f$i; done")
    return verdict(done.limit == "disk")


async def fill_the_disk_with_empty_files(scene: Scene) -> str:
    done = await scene.sh("while :; do i=$((i+1)); seq -f $i.%g 200 | xargs touch; done")
    return verdict(done.limit == "disk")


async def raise_its_own_limits(scene: Scene) -> str:
    return await bounded(scene, "ulimit -S -n 64 && ulimit -H -n 64 && ulimit -H -n 128")


async def make_a_device_file(scene: Scene) -> str:
    node = scene.outside / "node" if scene.sandbox.isolation is Isolation.process else "node"
    return await bounded(scene, f"rm -f {node}; mknod {node} c 1 3")


async def change_a_kernel_setting(scene: Scene) -> str:
    return await bounded(scene, "exec 3>>/proc/sys/kernel/core_pattern")


async def make_namespaces(scene: Scene) -> str:
    return await bounded(scene, "unshare --user true")


async def gain_rights_from_a_setuid_program(scene: Scene) -> str:
    return verdict(b"NoNewPrivs:\t1" in (await scene.sh("cat /proc/self/status")).stdout)


async def survive_the_deadline(scene: Scene) -> str:
    script = "trap '' TERM HUP; (setsid env -i sleep 627.5 &) ; setsid sh -c 'sleep 627.5; true' & sleep 627.5"
    done = await scene.sh(script, timeout_s=0.5)
    return verdict(done.outcome is Outcome.timed_out and not scene.alive("sleep 627.5"))


async def change_the_workspace_after_freeze(scene: Scene) -> str:
    loop = "while :; do i=$((i+1)); echo $i > counter; done; : 628.5"
    running = asyncio.create_task(scene.sh(f"(setsid env -i sh -c '{loop}' &); sleep 60"))
    counter = scene.sandbox.workspace / "counter"
    await until(lambda: counter.is_file() and counter.read_text() > "1")
    await scene.sandbox.freeze()
    frozen = await scene.sandbox.snapshot()
    with pytest.raises(SandboxFrozen):
        await running
    return verdict(not scene.alive("628.5") and await scene.sandbox.snapshot() == frozen)


async def lead_the_exporter_out_by_a_symbolic_link(scene: Scene) -> str:
    await scene.sh(f"ln -s {scene.outside}/grader.py file; ln -s {scene.outside} folder; ln -s . loop")
    for path in ("file", "folder/grader.py", "loop/file"):
        with pytest.raises(PathRefused):
            await scene.sandbox.read(path)
    with pytest.raises(PathRefused):
        await scene.sandbox.write("folder/grader.py", b"mine")
    await scene.sandbox.freeze()
    archive = (await scene.sandbox.snapshot()).archive
    return verdict(b"private" not in archive and (scene.outside / "grader.py").read_text() == "private")


async def swap_the_workspace_for_another_folder(scene: Scene) -> str:
    await scene.sh(f"cd ..; mv workspace gone && ln -s {scene.outside} workspace")
    try:
        await scene.sandbox.freeze()
    except SandboxDied:
        with pytest.raises(SandboxDied):
            await scene.sandbox.snapshot()
        return DETECTED
    return verdict((await scene.sandbox.snapshot()).archive.count(b"grader") == 0)


async def hang_the_exporter_on_a_named_pipe(scene: Scene) -> str:
    await scene.sh("mkfifo pipe; mkdir d; mkfifo d/pipe; echo x > d/file")
    with pytest.raises(PathRefused):
        await scene.sandbox.read("pipe")
    await scene.sandbox.freeze()
    archive = (await scene.sandbox.snapshot()).archive
    return verdict(b"d/file" in archive and b"pipe" not in archive)


async def break_the_exporter_with_nested_folders(scene: Scene) -> str:
    await scene.py("import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')")
    for export in (scene.sandbox.snapshot, scene.sandbox.freeze):
        with pytest.raises(WorkspaceRefused, match="nested more than 128 deep"):
            await export()
    folder = scene.sandbox.workspace.parent
    await scene.sandbox.release()
    return verdict(not folder.exists())


async def break_the_exporter_with_sparse_files(scene: Scene) -> str:
    await scene.sh("for i in 1 2 3 4; do truncate -s 4M f$i; done")
    for export in (scene.sandbox.snapshot, scene.sandbox.freeze):
        with pytest.raises(WorkspaceRefused, match=r"16777216 bytes; sandbox\.limits\.workspace_bytes allows 8388608"):
            await export()
    return STOPPED


async def flood_the_rollout_with_output(scene: Scene) -> str:
    done = await scene.sh("head -c 50000000 /dev/zero; head -c 50000000 /dev/zero >&2")
    return verdict(done.truncated and len(done.stdout) == len(done.stderr) == LIMITS.output_bytes)


async def break_the_rollout_with_binary_output(scene: Scene) -> str:
    done = await scene.py("import sys; sys.stdout.buffer.write(bytes(range(256)))")
    return verdict(done.stdout == bytes(range(256)))


async def hold_the_rollout_by_an_open_pipe(scene: Scene) -> str:
    done = await scene.sh("sleep 629.5 & echo done", timeout_s=30)
    return verdict(done.outcome is Outcome.completed and done.stdout == b"done\n" and done.seconds < 15)


Act = Callable[[Scene], Awaitable[str]]
ACTS: dict[str, Act] = {
    act.__name__.replace("_", " "): act
    for act in (
        read_a_file_outside_such_as_the_grader,
        write_a_file_outside_such_as_the_grader,
        hard_link_a_file_outside_into_the_workspace,
        see_the_environment_of_the_rollout,
        read_the_environment_of_another_sandbox,
        kill_a_process_of_another_sandbox,
        kill_the_supervisor,
        kill_the_rollout_process,
        open_a_socket_to_a_server_of_the_host,
        make_namespaces,
        make_a_device_file,
        change_a_kernel_setting,
        raise_its_own_limits,
        gain_rights_from_a_setuid_program,
        bomb_with_forks,
        fill_the_memory_with_one_process,
        fill_the_memory_with_many_processes,
        burn_the_processor,
        fill_the_disk_with_one_file,
        fill_the_disk_with_many_files,
        fill_the_disk_with_empty_files,
        survive_the_deadline,
        change_the_workspace_after_freeze,
        lead_the_exporter_out_by_a_symbolic_link,
        swap_the_workspace_for_another_folder,
        hang_the_exporter_on_a_named_pipe,
        break_the_exporter_with_nested_folders,
        break_the_exporter_with_sparse_files,
        flood_the_rollout_with_output,
        break_the_rollout_with_binary_output,
        hold_the_rollout_by_an_open_pipe,
    )
}


def table() -> dict[str, dict[Isolation, str]]:
    """The rows of the page's table: act, and what each level does about it."""
    lines = PAGE.read_text().partition("What each level stops")[2].partition("\nNot stopped at")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    (_, *levels), *acts = [[cell.strip() for cell in row] for row in rows]
    return {act: {Isolation(level): cell for level, cell in zip(levels, cells)} for act, *cells in acts}


def test_the_page_lists_every_act_at_every_level_and_no_other() -> None:
    assert list(table()) == list(ACTS)
    assert all(set(cells) == {Isolation.process, Isolation.bubblewrap} for cells in table().values())


@pytest.mark.parametrize("name", ACTS)
def test_an_act_ends_as_the_page_says(
    name: str,
    level: Isolation,
    tmp_path: Path,
    python: tuple[str, Path],
    alive: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_ROLLOUT", "1")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "grader.py").write_text("private")
    (outside / "grader.py").chmod(0o600)

    async def run() -> str:
        backend = LocalBackend(tmp_path / "leases", LocalSandboxConfig(isolation=level, limits=LIMITS))
        sandbox = await backend.lease("test", "owner", 60.0, readable=(python[1],))
        sibling = await backend.lease("test", "sibling", 60.0)
        try:
            return await ACTS[name](Scene(sandbox, sibling, outside, python[0], alive))
        finally:
            await sandbox.release()
            await sibling.release()
            await backend.close()

    assert asyncio.run(run()) == table()[name][level]


async def until(true: Callable[[], bool]) -> None:
    """Give way to others until something holds; the test's own timeout ends it otherwise."""
    while not true():
        await asyncio.sleep(0.01)


def end_orphans(line: str) -> None:
    """Kill what has escaped from a test on purpose."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if entry.read_text() == line:
                os.kill(int(entry.parent.name), 9)
        except OSError:
            continue
