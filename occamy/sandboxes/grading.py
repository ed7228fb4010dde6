"""Grading apart from the agent: an export goes into a sandbox of its own, with a grader that the agent never met."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from occamy.sandboxes import archive
from occamy.sandboxes.protocol import ExecResult, Sandbox, SandboxBackend, SandboxError, Snapshot

_DIGEST_S = 60.0


class ExportChanged(SandboxError):
    """What was to be graded is not what was exported after freeze."""


class GraderChanged(SandboxError):
    """The grader is not the one that was recorded before the rollout."""


@dataclass(frozen=True)
class Grader:
    """A grader as the image of its pool carries it: outside of any workspace."""

    argv: tuple[str, ...]
    """Runs it, with the export as working directory."""
    files: tuple[str, ...]
    """Absolute paths of all that it is made of."""
    digest: str
    """``sha256:<hex>`` as `grader_digest` gave it before the rollout."""


async def grader_digest(sandbox: Sandbox, files: Sequence[str]) -> str:
    """``sha256:<hex>`` over the grader's files, as a sandbox of its pool has them. Raises GraderChanged without one."""
    done = await sandbox.exec(["sh", "-c", f"cat {shlex.join(files)} | sha256sum"], timeout_s=_DIGEST_S)
    if done.exit_code or done.stderr:
        raise GraderChanged(f"the grader's files {', '.join(files)} cannot be read: {done.stderr[-300:]!r}")
    return f"sha256:{done.stdout.split()[0].decode()}"


async def grade_apart(
    backend: SandboxBackend, pool: str, owner: str, export: Snapshot, grader: Grader, deadline_s: float
) -> ExecResult:
    """Run a grader on an export, in a fresh sandbox of its pool.

    Raises ExportChanged when the archive is not what its fingerprint says, or does not arrive as that; GraderChanged
    when the grader is another before or after it has run; SandboxError as leasing does. Nothing of the agent's sandbox
    is used: it may be gone by then.
    """
    if archive.seal(export.archive).fingerprint != export.fingerprint:
        raise ExportChanged(f"{owner}: the archive is not the one of fingerprint {export.fingerprint}")
    sandbox = await backend.lease(pool, owner, deadline_s)
    try:
        await _check_grader(sandbox, grader, owner, "before")
        await sandbox.restore(export.archive)
        arrived = await sandbox.snapshot()
        if arrived != export:
            raise ExportChanged(f"{owner}: exported as {export.fingerprint}, arrived as {arrived.fingerprint}")
        done = await sandbox.exec(list(grader.argv), timeout_s=deadline_s)
        await _check_grader(sandbox, grader, owner, "after")
        return done
    finally:
        await sandbox.release()


async def _check_grader(sandbox: Sandbox, grader: Grader, owner: str, when: str) -> None:
    found = await grader_digest(sandbox, grader.files)
    if found != grader.digest:
        raise GraderChanged(f"{owner}: the grader is {found} {when} grading, {grader.digest} was recorded")
