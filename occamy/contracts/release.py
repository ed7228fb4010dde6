"""Task packages on disk, and the sealed task release that every later stage reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from occamy.contracts.manifest import Manifest, SealError, verify
from occamy.contracts.task import Pool, Split, TaskContract

KIND = "task_release"


@dataclass(frozen=True)
class Release:
    """Admitted tasks and the manifest that seals them."""

    tasks: list[TaskContract]
    """In order of task id."""
    manifest: Manifest

    def select(self, *, pool: Pool | None = None, split: Split | None = None) -> list[TaskContract]:
        """Tasks of one pool, one split or both, in order of task id."""
        return [t for t in self.tasks if pool in (None, t.meta.pool) and split in (None, t.meta.split)]


def contract_path(folder: Path, task_id: str) -> Path:
    """Where the contract of a task lies inside a folder of task packages."""
    return folder / "tasks" / task_id / "contract.json"


def contract_bytes(contract: TaskContract) -> bytes:
    """A contract as JSON without spaces, in declared key order: agents see fields and arguments in that order."""
    return json.dumps(contract.model_dump(mode="json"), separators=(",", ":"), ensure_ascii=False).encode()


def load_release(path: Path) -> Release:
    """Verify the seal of a task release and read its tasks.

    Raises SealError when a file is missing, extra or altered, or holds no contract of this version.
    """
    manifest = verify(path, KIND)
    tasks: list[TaskContract] = []
    for name in sorted(manifest.files):
        if name.startswith("tasks/") and name.endswith("/contract.json"):
            try:
                tasks.append(TaskContract.model_validate_json((path / name).read_bytes()))
            except ValidationError as e:
                problem = e.errors()[0]["msg"]
                raise SealError(
                    f"{path / name}: not a contract of this version ({problem}); admit the tasks again"
                ) from e
    return Release(tasks, manifest)
