"""File access below one folder that never follows a symbolic link and never leaves the folder.

Components are opened one by one relative to the folder with O_NOFOLLOW, so a link that an agent swaps in between a
check and its use is refused as well.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from occamy.sandboxes.protocol import DiskFull, PathRefused, SandboxDied, SandboxError, ShortWrite, WorkspaceRefused

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors that say that no more can be written."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def parts_of(path: str) -> tuple[str, ...]:
    """Split a workspace path into components. Raises PathRefused when it is absolute, has ``..`` or a NUL byte."""
    if path.startswith("/") or "\0" in path:
        raise PathRefused(f"{path!r}: absolute or malformed; give a path relative to the workspace")
    parts = tuple(p for p in path.split("/") if p not in ("", "."))
    if ".." in parts:
        raise PathRefused(f"{path!r}: '..' leaves the workspace; give a path inside it")
    return parts


def read_file(root: Path, path: str, limit: int) -> bytes:
    """Read one regular file below `root`. Raises PathRefused, FileNotFoundError, WorkspaceRefused beyond `limit`."""
    *folders, name = _nonempty(path)
    with _descend(root, folders, path, create=False) as folder:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError as e:
            raise _refusal(e, path) from e
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise PathRefused(f"{path!r}: not a regular file")
        with open(fd, "rb") as f:
            data = f.read(limit + 1)
        if len(data) > limit:
            raise WorkspaceRefused(f"{path!r}: more than {limit} bytes; raise sandbox.limits.workspace_bytes")
        return data


def write_file(root: Path, path: str, data: bytes, mode: int = 0o644) -> None:
    """Write one file below `root` whole, or leave the old one. Raises PathRefused, ShortWrite.

    The bytes go to a new file beside the target, their number is checked, then it takes the target's name: a link
    or a special file under that name is replaced, never written through.
    """
    *folders, name = _nonempty(path)
    with _descend(root, folders, path, create=True) as folder:
        temporary = f".{secrets.token_hex(8)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, mode, dir_fd=folder)
        try:
            with open(fd, "wb", buffering=0) as f:
                _write_all(f.fileno(), data, path)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as e:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise _refusal(e, path) from e
        except ShortWrite:
            os.unlink(temporary, dir_fd=folder)
            raise


def remove_file(root: Path, path: str) -> None:
    """Remove one file below `root`; of a link, itself. Raises PathRefused, FileNotFoundError."""
    *folders, name = _nonempty(path)
    with _descend(root, folders, path, create=False) as folder:
        try:
            os.unlink(name, dir_fd=folder)
        except OSError as e:
            raise _refusal(e, path) from e


def make_folder(root: Path, path: str) -> None:
    """Make a folder below `root`, parents included. Raises PathRefused."""
    with _descend(root, list(_nonempty(path)), path, create=True):
        pass


def link_file(root: Path, path: str, target: str) -> None:
    """Make a symbolic link below `root`; where it points is not followed here. Raises PathRefused for its own path."""
    *folders, name = _nonempty(path)
    with _descend(root, folders, path, create=True) as folder:
        try:
            os.symlink(target, name, dir_fd=folder)
        except OSError as e:
            raise _refusal(e, path) from e


def open_root(root: Path) -> int:
    """A descriptor of the folder itself. Raises SandboxDied when it is gone, or is a link now."""
    try:
        return os.open(root, _FOLDER)
    except OSError as e:
        raise SandboxDied(f"{root}: the workspace was removed or replaced ({e.strerror})") from e


def open_folder(name: str, inside: int) -> int:
    """A descriptor of one folder inside another. Raises OSError, for a link too."""
    return os.open(name, _FOLDER, dir_fd=inside)


@contextlib.contextmanager
def _descend(root: Path, folders: list[str], path: str, *, create: bool) -> Iterator[int]:
    """Open the folder that holds the file, component by component."""
    fd = open_root(root)
    try:
        for part in folders:
            try:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=fd)
                deeper = open_folder(part, fd)
            except OSError as e:
                raise _refusal(e, path) from e
            os.close(fd)
            fd = deeper
        yield fd
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes, path: str) -> None:
    view = memoryview(data)
    while view:
        try:
            written = os.write(fd, view)
        except OSError as e:
            if e.errno not in FULL:
                raise
            written = 0
        if written == 0:
            raise ShortWrite(f"{path!r}: {len(data) - len(view)} of {len(data)} bytes written; disk or file limit full")
        view = view[written:]
    size = os.fstat(fd).st_size
    if size != len(data):
        raise ShortWrite(f"{path!r}: {size} bytes on disk, {len(data)} given")


def _nonempty(path: str) -> tuple[str, ...]:
    parts = parts_of(path)
    if not parts:
        raise PathRefused(f"{path!r}: names the workspace itself; give a file inside it")
    return parts


def _refusal(error: OSError, path: str) -> Exception:
    """The error to raise instead: links and non-folders on the way are the caller's mistake."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return PathRefused(f"{path!r}: goes through a symbolic link or a file; give a plain path inside the workspace")
    if error.errno == errno.EISDIR:
        return PathRefused(f"{path!r}: is a folder; give a file")
    if error.errno in (errno.ENAMETOOLONG, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENXIO):
        return PathRefused(f"{path[:100]!r}: {error.strerror}; give another path")
    if error.errno == errno.ENOENT:
        return FileNotFoundError(errno.ENOENT, "no such file in the workspace", path)
    if error.errno in FULL:
        return DiskFull(f"{path!r}: {error.strerror}")
    return SandboxError(f"{path!r}: {error.strerror}")
