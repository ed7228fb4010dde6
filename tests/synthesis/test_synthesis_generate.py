"""Raw task packages on disk: sealed, idempotent, resumable, the same to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from occamy.contracts.manifest import NAME, SealError
from occamy.contracts.task import TaskContract
from occamy.synthesis.config import PoolCounts, SynthesisConfig
from occamy.synthesis.generate import synthesise

SMALL = SynthesisConfig(
    train=PoolCounts(long=6, short=6), validation=PoolCounts(long=2, short=2), test=PoolCounts(long=2, short=2)
)


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_every_slot_becomes_a_package_and_the_manifest_counts_them(tmp_path: Path) -> None:
    manifest = synthesise(SMALL, tmp_path, 1)
    assert manifest.kind == "tasks"
    assert manifest.counts["task_packages"].raw == 20
    assert (tmp_path / "tasks" / "train-long-00005" / "contract.json").is_file()
    assert manifest.facts["seed"] == 1
    assert sum(n for name, n in manifest.facts["coverage"].items() if name.startswith("route")) == 20


def test_fields_and_arguments_keep_their_order_on_disk(tmp_path: Path) -> None:
    synthesise(SMALL, tmp_path, 1)
    task = TaskContract.model_validate_json((tmp_path / "tasks/train-long-00000/contract.json").read_bytes())
    assert list(task.world.services) == ["crm", "orders", "ledger"]
    assert list(task.world.services["crm"]) == ["tier", "status", "visits"]
    assert all(next(iter(c.arguments)) == "id" for c in task.grading.reference if c.name.endswith("_update"))


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(done: int, total: int, figure: str) -> None:
        if done == 7:
            raise Killed

    synthesise(SMALL, tmp_path / "whole", 1)
    with pytest.raises(Killed):
        synthesise(SMALL, tmp_path / "cut", 1, kill)
    assert not (tmp_path / "cut" / NAME).exists()
    torn = tmp_path / "cut" / "tasks" / "test-long-00000" / "contract.json"
    torn.parent.mkdir(parents=True, exist_ok=True)
    torn.write_bytes(b'{"request":"se')
    stranger = tmp_path / "cut" / "tasks" / "train-long-00099"
    stranger.mkdir()
    (stranger / "contract.json").write_text("{}")
    synthesise(SMALL, tmp_path / "cut", 1)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_a_sealed_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    first = synthesise(SMALL, tmp_path, 1)
    calls: list[int] = []
    assert synthesise(SMALL, tmp_path, 1, lambda done, total, figure: calls.append(done)) == first
    assert calls == []


def test_a_folder_of_another_seed_or_configuration_is_refused(tmp_path: Path) -> None:
    synthesise(SMALL, tmp_path, 1)
    with pytest.raises(SealError, match="another configuration or seed"):
        synthesise(SMALL, tmp_path, 2)
    with pytest.raises(SealError, match="another configuration or seed"):
        synthesise(SMALL.model_copy(update={"fault_share": 0.5}), tmp_path, 1)


def test_progress_counts_tasks(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    synthesise(SMALL, tmp_path, 1, lambda done, total, figure: seen.append((done, total)))
    assert seen == [(k, 20) for k in range(1, 21)]
