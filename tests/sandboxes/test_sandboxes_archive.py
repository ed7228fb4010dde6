"""Snapshots, restores and file access: any name and content goes round, nothing leads out of the workspace."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from occamy.sandboxes import archive
from occamy.sandboxes.config import Limits, LocalSandboxConfig
from occamy.sandboxes.local import LocalBackend, LocalSandbox
from occamy.sandboxes.protocol import Isolation, LeaseLost, PathRefused, WorkspaceRefused

Within = Callable[..., None]
LIMIT = 1 << 20
SMALL = LocalSandboxConfig(isolation=Isolation.process, limits=Limits(workspace_bytes=LIMIT))


def tar(*members: tuple[str, bytes, str]) -> bytes:
    """An archive of members without content: name, type, link target."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as t:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            t.addfile(info)
    return buffer.getvalue()


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "link/x", "link", "loop/x", "", ".", "a\0b"])
def test_paths_do_not_escape(tmp_path: Path, path: str, within: Within) -> None:
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

    within(body)


def test_writing_over_a_link_replaces_the_link(tmp_path: Path, within: Within) -> None:
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

    within(body)


def test_snapshot_is_deterministic_and_restore_brings_it_back(tmp_path: Path) -> None:
    async def run() -> None:
        backend = LocalBackend(tmp_path / "leases", SMALL)
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


def test_an_archive_cannot_plant_files_outside(tmp_path: Path, within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        await sandbox.write("kept", b"old")
        for bad in (
            tar(("../x", tarfile.REGTYPE, "")),
            tar(("/x", tarfile.REGTYPE, "")),
            tar(("h", tarfile.LNKTYPE, "/etc/passwd")),
            tar(("d", tarfile.CHRTYPE, "")),
            tar(("p", tarfile.FIFOTYPE, "")),
            tar((".", tarfile.REGTYPE, "")),
            tar(("a", tarfile.SYMTYPE, "/"), ("a", tarfile.SYMTYPE, "/etc")),
            tar(("f", tarfile.REGTYPE, ""), ("f/x", tarfile.REGTYPE, "")),
            tar(("a", tarfile.SYMTYPE, str(tmp_path)), ("a/x", tarfile.SYMTYPE, "y")),
        ):
            with pytest.raises(PathRefused):
                await sandbox.restore(bad)
        assert await sandbox.read("kept") == b"old" and os.listdir(sandbox.workspace) == ["kept"]
        assert not (tmp_path / "x").exists() and not (tmp_path / "x").is_symlink()

    within(body)


def test_what_is_no_archive_or_too_large_is_refused_and_changes_nothing(within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        await sandbox.write("kept", b"old")
        good = (await sandbox.snapshot()).archive
        large = tarfile.TarInfo("large")
        large.size = 2 << 20
        named = tarfile.TarInfo("././@LongLink")
        named.type, named.size = tarfile.GNUTYPE_LONGNAME, 1
        for bad, why in (
            (b"", "no tar archive"),
            (b"garbage" * 1000, "no tar archive"),
            (good[:700], "no tar archive"),
            ((named.tobuf(tarfile.GNU_FORMAT) + b"x" + bytes(511)) * 3000, "no tar archive"),  # names without end
            (large.tobuf() + bytes((2 << 20) + 1024), r"holds 2097152 bytes; sandbox\.limits\.workspace_bytes allows"),
        ):
            with pytest.raises(ValueError, match=why):
                await sandbox.restore(bad)
        assert (await sandbox.snapshot()).archive == good

    within(body, SMALL)


names = st.binary(min_size=1, max_size=60).filter(lambda b: not set(b) & {0, 47} and b not in (b".", b".."))
files = st.dictionaries(st.lists(names, min_size=1, max_size=3).map(b"/".join), st.binary(max_size=200), max_size=6)


@settings(max_examples=50, deadline=None)
@given(files)
def test_any_names_and_contents_go_round(tmp_path_factory: pytest.TempPathFactory, content: dict[bytes, bytes]) -> None:
    base = tmp_path_factory.mktemp("trees")
    one, two = base / "one", base / "two"
    one.mkdir()
    two.mkdir()
    for name, data in content.items():
        path = os.fsencode(one) + b"/" + name
        parents = [p for p in content if name.startswith(p + b"/")]
        if not parents and not os.path.isdir(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(os.fsdecode(path)).write_bytes(data)
    packed = archive.pack(one, LIMIT)
    archive.unpack(packed.archive, two, LIMIT)
    assert archive.pack(two, LIMIT) == packed
    written = {p.relative_to(one): p.read_bytes() for p in one.rglob("*") if p.is_file()}
    assert {p.relative_to(two): p.read_bytes() for p in two.rglob("*") if p.is_file()} == written


def test_links_stay_links_hard_links_become_files_and_special_files_are_left_out(within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        at = sandbox.workspace
        (at / "f").write_bytes(b"data")
        (at / "f").chmod(0o4755)
        os.link(at / "f", at / "hard")
        (at / "soft").symlink_to("/etc/passwd")
        os.mkfifo(at / "pipe")
        folder = os.open(at, os.O_PATH)
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(f"/proc/self/fd/{folder}/s")  # the system allows 108 characters
        os.close(folder)
        await sandbox.freeze()
        taken = await sandbox.snapshot()
        with tarfile.open(fileobj=io.BytesIO(taken.archive)) as t:
            found = {m.name: (m.type, m.linkname, m.size, m.mode) for m in t}
        assert found == {
            "f": (tarfile.REGTYPE, "", 4, 0o755),  # without its setuid bit
            "hard": (tarfile.REGTYPE, "", 4, 0o755),
            "soft": (tarfile.SYMTYPE, "/etc/passwd", 0, 0o777),
        }

    within(body)


def test_a_live_workspace_can_be_exported_while_it_changes(within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        script = "touch up; while :; do echo x > a; mkdir -p d/e; echo y > d/e/f; rm -r a d; done"
        running = asyncio.create_task(sandbox.exec(["sh", "-c", script]))
        while not (sandbox.workspace / "up").exists():
            await asyncio.sleep(0.01)
        for _ in range(100):
            with tarfile.open(fileobj=io.BytesIO((await sandbox.snapshot()).archive)) as t:
                assert "up" in t.getnames()
        running.cancel()

    within(body)


def test_files_beyond_the_limit_are_not_read_into_memory(within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        os.truncate(os.open(sandbox.workspace / "big", os.O_CREAT | os.O_WRONLY), 1 << 40)
        with pytest.raises(WorkspaceRefused, match=r"'big': more than 1048576 bytes"):
            await sandbox.read("big")
        with pytest.raises(WorkspaceRefused, match="1099511627776 bytes"):
            await sandbox.snapshot()

    within(body, SMALL)


def test_names_too_long_for_the_system_are_refused(within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        for use in (sandbox.read("n" * 256), sandbox.write("n" * 256, b""), sandbox.exec(["true"], cwd="n" * 256)):
            with pytest.raises(PathRefused, match="File name too long"):
                await use
        deep = "/".join(["d" * 100] * 100)  # 10,100 bytes: longer than a path may be, yet every part is fine
        await sandbox.write(deep, b"x")
        assert await sandbox.read(deep) == b"x" and b"x" in (await sandbox.snapshot()).archive

    within(body)
