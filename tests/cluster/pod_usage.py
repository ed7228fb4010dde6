"""What the pods of the node on this machine use: memory by their control groups, disk by their volumes."""

from __future__ import annotations

import contextlib
import glob
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from .node import NodeCluster
from .node_keeper import CGROUPS

_PAUSE_S = 0.1


class Usage:
    """Context manager that looks ten times a second, from a thread, and keeps the most that it sees of any one pod."""

    def __init__(self, node: NodeCluster) -> None:
        self.memory = self.threads = self.disk = 0
        """Bytes that processes fill (without the page cache), tasks, bytes of the pod's folders."""
        self._node = node
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def __str__(self) -> str:
        return f"{self.memory / 2**20:.0f} MiB of memory, {self.disk / 2**20:.0f} MiB of disk, {self.threads} threads"

    def _watch(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            for place in (f"memory/{self._node.cgroup}", self._node.cgroup):
                for stat in _each(place, "memory.stat"):
                    with contextlib.suppress(OSError):
                        rows = dict(line.split() for line in stat.read_text().splitlines())
                        self.memory = max(self.memory, int(rows.get("total_rss", rows.get("anon", 0))))
            for place in (f"pids/{self._node.cgroup}", self._node.cgroup):
                for count in _each(place, "pids.current"):
                    with contextlib.suppress(OSError):
                        self.threads = max(self.threads, int(count.read_text()))
            for pod in (self._node.room / "kubelet/pods").glob("*/volumes/kubernetes.io~empty-dir"):
                said = subprocess.run(["du", "-sk", pod], capture_output=True, text=True, check=False).stdout
                self.disk = max(self.disk, int((said or "0").split()[0]) << 10)


def _each(place: str, name: str) -> list[Path]:
    """The files of this name of all pods. Unlike Path's, this glob takes it that folders vanish under it."""
    return [Path(found) for found in glob.glob(f"{CGROUPS}/{place}/**/pod*/{name}", recursive=True)]
