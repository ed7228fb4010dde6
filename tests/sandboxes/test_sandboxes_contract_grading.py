"""Grading apart: what was exported is what is graded, by the grader that was recorded, or nothing is."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from occamy.contracts.episode import Outcome
from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.grading import ExportChanged, Grader, GraderChanged, grade_apart, grader_digest
from occamy.sandboxes.local import LocalBackend
from occamy.sandboxes.protocol import Isolation, Snapshot

GRADE = b"cat answer; ls -A; echo 1 > score\n"


def within(tmp_path: Path, body: Callable[[LocalBackend, Snapshot, Grader], Awaitable[None]]) -> None:
    """Run a body with an export of a frozen workspace, and a grader beside the leases."""
    grader = tmp_path / "grade me.sh"
    grader.write_bytes(GRADE)
    digest = f"sha256:{hashlib.sha256(GRADE).hexdigest()}"

    async def run() -> None:
        backend = LocalBackend(tmp_path / "leases", LocalSandboxConfig(isolation=Isolation.process))
        agent = await backend.lease("agents", "e1", 60.0)
        await agent.write("answer", b"42\n")
        await agent.freeze()
        export = await agent.snapshot()
        await agent.release()
        assert (await _digest(backend, str(grader))) == digest
        try:
            await body(backend, export, Grader(("sh", str(grader)), (str(grader),), digest))
            assert list((tmp_path / "leases").rglob("answer")) == []
        finally:
            await backend.close()

    asyncio.run(run())


async def _digest(backend: LocalBackend, file: str) -> str:
    sandbox = await backend.lease("graders", "before", 60.0)
    try:
        return await grader_digest(sandbox, [file])
    finally:
        await sandbox.release()


def test_a_grader_sees_the_export_and_nothing_else(tmp_path: Path) -> None:
    async def body(backend: LocalBackend, export: Snapshot, grader: Grader) -> None:
        done = await grade_apart(backend, "graders", "e1", export, grader, 60.0)
        assert (done.outcome, done.stdout) == (Outcome.completed, b"42\nanswer\n")

    within(tmp_path, body)


def test_an_export_that_was_edited_is_not_graded(tmp_path: Path) -> None:
    async def body(backend: LocalBackend, export: Snapshot, grader: Grader) -> None:
        edited = dataclasses.replace(export, archive=export.archive.replace(b"42\n", b"43\n"))
        with pytest.raises(ExportChanged, match="the archive is not the one of fingerprint sha256:") as caught:
            await grade_apart(backend, "graders", "e1", edited, grader, 60.0)
        assert caught.value.outcome is Outcome.infra_failed

    within(tmp_path, body)


def test_an_archive_in_another_form_is_not_what_arrives(tmp_path: Path) -> None:
    async def body(backend: LocalBackend, export: Snapshot, grader: Grader) -> None:
        padded = export.archive + bytes(512)
        other = Snapshot(padded, f"sha256:{hashlib.sha256(padded).hexdigest()}")
        with pytest.raises(ExportChanged, match=r"exported as sha256:.*, arrived as sha256:"):
            await grade_apart(backend, "graders", "e1", other, grader, 60.0)

    within(tmp_path, body)


def test_a_grader_that_is_another_than_recorded_grades_nothing(tmp_path: Path) -> None:
    async def body(backend: LocalBackend, export: Snapshot, grader: Grader) -> None:
        path = Path(grader.files[0])
        path.write_bytes(b"echo 1\n")
        with pytest.raises(GraderChanged, match=r"before grading, sha256:.* was recorded"):
            await grade_apart(backend, "graders", "e1", export, grader, 60.0)
        path.write_bytes(b'echo exit >> "$0"\n')
        recorded = dataclasses.replace(grader, digest=f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")
        with pytest.raises(GraderChanged, match="after grading"):
            await grade_apart(backend, "graders", "e1", export, recorded, 60.0)
        absent = dataclasses.replace(grader, files=("/nowhere/grader",))
        with pytest.raises(GraderChanged, match="/nowhere/grader cannot be read"):
            await grade_apart(backend, "graders", "e1", export, absent, 60.0)

    within(tmp_path, body)
