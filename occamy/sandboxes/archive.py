"""Deterministic tar archives of a workspace: equal content, equal bytes, equal fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from occamy.sandboxes.paths import link_file, make_folder, open_folder, open_root, parts_of, read_file, write_file
from occamy.sandboxes.protocol import PathRefused, SandboxDied, Snapshot, WorkspaceRefused
from occamy.sandboxes.watch import BLOCK, DEPTH


@dataclass(frozen=True)
class _Entry:
    mode: int
    size: int
    target: str
    """Where a link points."""


def pack(root: Path, limit: int) -> Snapshot:
    """Archive everything below `root`: files, folders and links (as links), sorted, without times and owners.

    Special files (sockets, pipes, devices) carry no content and are left out. No link is followed. Raises
    WorkspaceRefused when the files have more than `limit` bytes together, or cannot be read.
    """
    buffer = io.BytesIO()
    stream(root, limit, buffer)
    return seal(buffer.getvalue())


def seal(archive: bytes) -> Snapshot:
    """An archive with its fingerprint."""
    return Snapshot(archive=archive, fingerprint=f"sha256:{hashlib.sha256(archive).hexdigest()}")


def stream(root: Path, limit: int, sink: IO[bytes]) -> None:
    """Write the archive that `pack` returns to a file that is only ever appended to."""
    found = survey(root, limit)
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(found):
            with contextlib.suppress(FileNotFoundError):  # removed since, by a process that nobody has stopped
                _add(tar, root, name, found[name], limit)


def survey(root: Path, limit: int) -> dict[str, _Entry]:
    """What lies below `root`, by path, without reading a file. Raises WorkspaceRefused as `pack` does."""
    found: dict[str, _Entry] = {}
    folder = open_root(root)
    try:
        _find(folder, "", 0, found)
    finally:
        os.close(folder)
    if (total := sum(max(entry.size, BLOCK) for entry in found.values())) > limit:
        raise WorkspaceRefused(f"the workspace has {total} bytes; sandbox.limits.workspace_bytes allows {limit}")
    return found


def files(root: Path, limit: int) -> list[str]:
    """Paths of the regular files below `root`, sorted. Raises WorkspaceRefused as `pack` does."""
    found = sorted(name for name, entry in survey(root, limit).items() if stat.S_ISREG(entry.mode))
    if (total := sum(len(name) + 1 for name in found)) > limit:
        raise WorkspaceRefused(f"the names of the files have {total} characters; at most {limit} are listed")
    return found


def unpack(archive: bytes, root: Path, limit: int) -> None:
    """Write an archive's members below the empty folder `root`.

    Raises PathRefused for a member that escapes or is neither file, folder nor link, ValueError for anything that is
    no tar archive, or that holds more than `limit` bytes.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            members = tar.getmembers()
            if (total := sum(member.size for member in members)) > limit:
                raise ValueError(f"the archive holds {total} bytes; sandbox.limits.workspace_bytes allows {limit}")
            for member in sorted(members, key=lambda m: m.issym()):  # links last: nothing is written through one
                _extract(tar, member, root)
    except (tarfile.TarError, EOFError, RecursionError) as e:
        raise ValueError(f"{len(archive)} bytes that are no tar archive ({e}); give a snapshot's archive") from e


def contents(archive: bytes) -> dict[str, bytes]:
    """The regular files of a snapshot's archive by path, sorted; names as `files` gives them.

    Raises SandboxDied for what `stream` never writes, as an agent in a pod may send: no archive, or one that grows.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            members = [member for member in tar if member.isreg()]
            if (total := sum(member.size for member in members)) > len(archive):
                raise ValueError(f"it grows to {total} bytes")
            found = {member.name: tar.extractfile(member) for member in members}
            return {name: content.read() for name, content in sorted(found.items()) if content is not None}
    except (tarfile.TarError, EOFError, ValueError, RecursionError) as e:
        raise SandboxDied(f"{len(archive)} bytes that are no snapshot's archive ({e})") from e


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    parts_of(member.name)
    if member.isdir():
        make_folder(root, member.name)
    elif member.issym():
        link_file(root, member.name, member.linkname)
    elif member.isreg():
        content = tar.extractfile(member)
        assert content is not None
        write_file(root, member.name, content.read(), mode=member.mode & 0o777)
    else:
        raise PathRefused(f"{member.name!r}: archive member of type {member.type!r}; files, folders and links only")


def _find(folder: int, prefix: str, depth: int, found: dict[str, _Entry]) -> None:
    """Everything below an open folder, by path."""
    if depth > DEPTH:
        raise WorkspaceRefused(f"{prefix[:100]!r}...: folders nested more than {DEPTH} deep")
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                at = entry.stat(follow_symlinks=False)
                target = os.readlink(entry.name, dir_fd=folder) if entry.is_symlink() else ""
                found[prefix + entry.name] = _Entry(at.st_mode, at.st_size, target)
                if stat.S_ISREG(at.st_mode) and not os.access(
                    entry.name, os.R_OK, dir_fd=folder, follow_symlinks=False
                ):
                    raise WorkspaceRefused(f"{prefix + entry.name!r}: may not be read")
                if entry.is_dir(follow_symlinks=False):
                    _find_in(folder, entry.name, prefix, depth, found)


def _find_in(folder: int, name: str, prefix: str, depth: int, found: dict[str, _Entry]) -> None:
    try:
        inner = open_folder(name, folder)
    except FileNotFoundError:
        return
    except OSError as e:
        raise WorkspaceRefused(f"{prefix + name!r}: {e.strerror}") from e
    try:
        _find(inner, f"{prefix}{name}/", depth + 1, found)
    finally:
        os.close(inner)


def _add(tar: tarfile.TarFile, root: Path, name: str, entry: _Entry, limit: int) -> None:
    info = tarfile.TarInfo(name)
    if stat.S_ISLNK(entry.mode):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.target, 0o777
        tar.addfile(info)
    elif stat.S_ISDIR(entry.mode):
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(info)
    elif stat.S_ISREG(entry.mode):
        try:
            data = read_file(root, name, limit)
        except PathRefused as e:
            raise WorkspaceRefused(str(e)) from e
        info.size, info.mode = len(data), 0o755 if entry.mode & stat.S_IXUSR else 0o644
        tar.addfile(info, io.BytesIO(data))
