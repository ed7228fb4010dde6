"""The folder that holds a backend's leases, and its end: removed even when the process that owns it is killed."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import weakref
from pathlib import Path

_WAIT_S = 30.0
_REMOVE = """
for try in 1 2 3 4 5 6 7 8 9 10; do
  rm -rf -- "$1" 2>/dev/null && break
  chmod -R u+rwx -- "$1" 2>/dev/null
  sleep 0.1
done
"""
# The janitor waits for the end of its input: closed, or its writer is dead.
_JANITOR = f'cat >/dev/null\n{_REMOVE}\nrmdir -- "${{1%/*}}" 2>/dev/null'


class Root:
    """A fresh folder below `base`, which belongs to this backend alone: what it holds from before is removed."""

    def __init__(self, base: Path) -> None:
        remove(base)
        self.folder = base / secrets.token_hex(4)
        self.folder.mkdir(parents=True)
        janitor = subprocess.Popen(
            ["sh", "-c", _JANITOR, "sh", str(self.folder)], stdin=subprocess.PIPE, env={}, start_new_session=True
        )
        self.close = weakref.finalize(self, _end, janitor)
        """Remove the folder, and `base` if that is empty then.

        Happens by itself when the object is dropped, or its process ends or dies."""


def remove(folder: Path) -> None:
    """Remove a folder that an agent has filled: however deep, whatever its modes."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        subprocess.run(["sh", "-c", _REMOVE, "sh", str(folder)], check=False)


def _end(janitor: subprocess.Popen[bytes]) -> None:
    assert janitor.stdin is not None
    janitor.stdin.close()
    janitor.wait(_WAIT_S)
