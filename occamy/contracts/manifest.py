"""Sealed folders: a manifest names every file by digest; readers verify before use and refuse by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from occamy.contracts.record import Record, canonical_json, digest_file

NAME = "manifest.json"


class SealError(ValueError):
    """A sealed folder is not what its manifest says: names the folder, the file and the fix."""


class Counts(Record):
    """Data accounting of one artifact kind."""

    raw: int = 0
    validated: int = 0
    admitted: int = 0
    quarantined: int = 0


class Manifest(Record):
    """The seal of a folder."""

    kind: str
    """tasks, task_release, episodes, demonstrations, checkpoint, evaluation ..."""
    schema_version: int = 1
    files: dict[str, str]
    """Relative POSIX path -> sha256 digest, for every file but the manifest."""
    counts: dict[str, Counts] = Field(default_factory=dict)
    """Accounting per artifact kind (task_packages, demonstrations, trajectories)."""
    parents: dict[str, str] = Field(default_factory=dict)
    """Role -> digest of the manifest it was made from."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """Further JSON facts: seed, recipe digest, reasons of quarantine with counts ..."""


def seal(
    folder: Path,
    kind: str,
    *,
    counts: dict[str, Counts] | None = None,
    parents: dict[str, str] | None = None,
    facts: dict[str, Any] | None = None,
) -> Manifest:
    """Digest every file under `folder` and write its manifest atomically. Returns the manifest."""
    for leftover in folder.glob(f".{NAME}.*.tmp"):  # of a seal that a kill cut short
        leftover.unlink()
    files = {
        p.relative_to(folder).as_posix(): digest_file(p)
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p != folder / NAME
    }
    manifest = Manifest(kind=kind, files=files, counts=counts or {}, parents=parents or {}, facts=facts or {})
    write_atomic(folder / NAME, canonical_json(manifest))
    return manifest


def verify(folder: Path, kind: str) -> Manifest:
    """Read and check the seal of `folder`.

    Raises SealError when the manifest is missing, unreadable or of another kind, or when any file is missing,
    extra or altered (truncation alters the digest).
    """
    path = folder / NAME
    if not path.is_file():
        raise SealError(f"{folder}: no {NAME}; the stage that makes it did not finish, run it again")
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError as e:
        problem = e.errors()[0]["msg"]
        raise SealError(f"{path}: not a manifest of this version ({problem}); make the folder again") from e
    if manifest.kind != kind:
        raise SealError(f"{path}: holds {manifest.kind!r}, expected {kind!r}; pass the right folder")
    present = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p != path}
    for name in sorted(manifest.files.keys() - present):
        raise SealError(f"{folder}: {name} is missing; restore it or make the folder again")
    for name in sorted(present - manifest.files.keys()):
        raise SealError(f"{folder}: {name} is not in the manifest; remove it or make the folder again")
    for name, want in manifest.files.items():
        if digest_file(folder / name) != want:
            raise SealError(f"{folder}: {name} was altered or truncated after sealing; make the folder again")
    return manifest


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old or the new content whole, and a crash leaves no partial file.

    Raises OSError (for example a full disk) with the previous content untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
