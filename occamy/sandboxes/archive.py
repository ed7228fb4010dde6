"""Deterministic tar archives of a workspace: equal content, equal bytes, equal fingerprint."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

from occamy.contracts.record import digest_bytes
from occamy.sandboxes.paths import link_file, make_folder, parts_of, read_file, write_file
from occamy.sandboxes.protocol import PathRefused, Snapshot


def pack(root: Path) -> Snapshot:
    """Archive everything below `root`: files, folders and links (as links), sorted, without times and owners.

    Special files (sockets, pipes, devices) carry no content and are left out.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(_walk(root)):
            _add(tar, root, path)
    archive = buffer.getvalue()
    return Snapshot(archive=archive, fingerprint=digest_bytes(archive))


def unpack(archive: bytes, root: Path) -> None:
    """Write an archive's members below the empty folder `root`. Raises PathRefused for a member that escapes."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        links: list[tarfile.TarInfo] = []
        for member in tar:
            parts_of(member.name)
            if member.isdir():
                make_folder(root, member.name)
            elif member.issym():
                links.append(member)
            elif member.isreg():
                content = tar.extractfile(member)
                assert content is not None
                write_file(root, member.name, content.read(), mode=member.mode & 0o777)
            else:
                raise PathRefused(f"{member.name!r}: archive member of type {member.type!r}; files and folders only")
        for member in links:  # last, so that no member is written through a link
            link_file(root, member.name, member.linkname)


def _walk(root: Path) -> list[str]:
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        relative = os.path.relpath(folder, root)
        found += [os.path.normpath(os.path.join(relative, name)) for name in folders + files]
    return found


def _add(tar: tarfile.TarFile, root: Path, name: str) -> None:
    path = root / name
    kind = path.lstat().st_mode
    info = tarfile.TarInfo(name)
    if stat.S_ISLNK(kind):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
        tar.addfile(info)
    elif stat.S_ISDIR(kind):
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(info)
    elif stat.S_ISREG(kind):
        data = read_file(root, name)
        info.size, info.mode = len(data), 0o755 if kind & stat.S_IXUSR else 0o644
        tar.addfile(info, io.BytesIO(data))
