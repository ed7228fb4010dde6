"""Where a world keeps its files: in memory for oracles and admission, in a folder for sandboxes."""

from __future__ import annotations

import errno
from pathlib import Path, PurePosixPath
from typing import Protocol

_NAME_BYTES = 255
"""Longest file name that common file systems take."""
_PATH_BYTES = 1024
"""Longest path (our choice, a quarter of Linux's limit)."""
_PATH_PARTS = 32
"""Deepest path (our choice)."""


class Workspace(Protocol):
    """Text files by relative POSIX path.

    `read` and `remove` raise FileNotFoundError; they and `write` raise ValueError on a bad path.
    """

    def read(self, path: str) -> str: ...

    def write(self, path: str, text: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def list(self) -> list[str]: ...

    def texts(self) -> dict[str, str]:
        """Every file that `list` names, in its order, with what `read` gives."""


def check_path(path: str) -> str:
    """Return `path` when it is relative and cannot leave the workspace; else raise ValueError."""
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"file path {path!r}: use a relative path such as notes/today.txt")
    return path


def check_new_path(path: str) -> str:
    """Return `path` when `check_path` takes it and any file system can hold it; else raise ValueError."""
    parts = check_path(path).split("/")
    if (
        len(path.encode()) > _PATH_BYTES
        or len(parts) > _PATH_PARTS
        or any(len(p.encode()) > _NAME_BYTES for p in parts)
    ):
        raise ValueError(
            f"file path of {len(path)} characters and {len(parts)} parts: use at most {_PATH_BYTES} bytes, "
            f"{_NAME_BYTES} a part, and {_PATH_PARTS} parts"
        )
    return path


def _clash(path: str) -> ValueError:
    return ValueError(f"file path {path!r}: a folder and a file cannot share a name; choose another path")


class MemoryWorkspace:
    """Files in a dict."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}

    def read(self, path: str) -> str:
        check_path(path)
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._files[path]

    def write(self, path: str, text: str) -> None:
        parents = [str(parent) for parent in PurePosixPath(check_new_path(path)).parents]
        if any(parent in self._files for parent in parents) or any(f.startswith(f"{path}/") for f in self._files):
            raise _clash(path)
        self._files[path] = text

    def remove(self, path: str) -> None:
        self.read(path)
        del self._files[path]

    def list(self) -> list[str]:
        return sorted(self._files)

    def texts(self) -> dict[str, str]:
        return dict(sorted(self._files.items()))


class FolderWorkspace:
    """Files under a folder that an agent may also write to directly.

    Bytes that are not UTF-8 read as backslash escapes, so that any file has a text and a fingerprint.
    Symbolic links are not followed: they are neither listed nor read nor written through. Nor are files listed whose
    names are not UTF-8.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def _resolve(self, path: str) -> Path:
        target = self._root / check_path(path)
        if target.resolve() != target:
            raise ValueError(f"file path {path!r} goes through a symbolic link; write to a plain file")
        return target

    def read(self, path: str) -> str:
        target = self._resolve(path)
        if not _is_file(target):
            raise FileNotFoundError(path)
        return target.read_bytes().decode("utf-8", errors="backslashreplace")

    def write(self, path: str, text: str) -> None:
        target = self._resolve(check_new_path(path))
        if target.is_dir() or any(p.is_file() for p in target.parents):
            raise _clash(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())

    def remove(self, path: str) -> None:
        target = self._resolve(path)
        if not _is_file(target):
            raise FileNotFoundError(path)
        target.unlink()

    def list(self) -> list[str]:
        found = (p for p in self._root.rglob("*") if p.is_file() and not p.is_symlink())
        names = (p.relative_to(self._root).as_posix() for p in found)
        return sorted(name for name in names if is_text(name))

    def texts(self) -> dict[str, str]:
        return {path: self.read(path) for path in self.list()}


def _is_file(target: Path) -> bool:
    """Whether a file lies there; none can under a name that the file system does not take."""
    try:
        return target.is_file()
    except OSError as e:
        if e.errno == errno.ENAMETOOLONG:
            return False
        raise


def is_text(name: str) -> bool:
    """Whether a name read from a disk is UTF-8; `os.fsdecode` puts lone surrogates for what is not."""
    return not any("\ud800" <= c <= "\udfff" for c in name)
