"""Admission as a whole: injected faults are quarantined by their code, the rest is released under a seal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from occamy.admission.config import AdmissionConfig
from occamy.admission.release import RECEIPTS, admit
from occamy.contracts.likeness import task_literals
from occamy.contracts.manifest import NAME, SealError, seal
from occamy.contracts.release import Release, contract_bytes, contract_path, load_release
from occamy.contracts.task import TaskContract

CONFIG = AdmissionConfig()


def read(raw: Path, task_id: str) -> TaskContract:
    return TaskContract.model_validate_json(contract_path(raw, task_id).read_bytes())


def find(raw: Path, wanted: Callable[[TaskContract], bool]) -> TaskContract:
    """The first seed task of the raw folder that fits."""
    tasks = (read(raw, path.parent.name) for path in sorted(raw.glob("tasks/*/contract.json")))
    return next(t for t in tasks if t.meta.variation == "seed" and wanted(t))


def inject(raw: Path, task: TaskContract, task_id: str, **meta: Any) -> None:
    """Add a task under another id and seal the folder again."""
    fresh = task.model_copy(update={"meta": task.meta.model_copy(update={"task_id": task_id, **meta})})
    fresh = fresh.model_copy(update={"meta": fresh.meta.model_copy(update={"literals": task_literals(fresh)})})
    path = contract_path(raw, task_id)
    path.parent.mkdir()
    path.write_bytes(contract_bytes(fresh))
    (raw / NAME).unlink()
    seal(raw, "tasks")


def reasons(out: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (out / RECEIPTS).read_text().splitlines()]
    return {line["task_id"]: line["reason"] for line in lines if line["reason"]}


def regraded(task: TaskContract, value: Any) -> TaskContract:
    """The same request, with another target value in the goal and in the last gold call."""
    goal, call = task.grading.goals[0], task.grading.reference[-1]
    assert goal.kind == "field_equals"
    wrong = call.model_copy(update={"arguments": {**call.arguments, goal.field: value}})
    grading = {"goals": (goal.model_copy(update={"value": value}),), "reference": (*task.grading.reference[:-1], wrong)}
    return task.model_copy(update={"grading": task.grading.model_copy(update=grading)})


def sets_an_enum(task: TaskContract) -> bool:
    goal = task.grading.goals[0]
    set_or_mark = task.meta.pool == "short" and task.meta.templates[0].startswith(("set.train", "mark.train"))
    return set_or_mark and isinstance(getattr(goal, "value", 0), str)


def doubled(task: TaskContract) -> TaskContract:
    """A second record that the task's search finds."""
    find_call = task.grading.reference[0]
    service, field = find_call.name.removesuffix("_search"), str(find_call.arguments["field"])
    rows = {key: dict(row) for key, row in task.world.records[service].items()}
    goal = task.grading.goals[0]
    other = next(key for key in rows if key != getattr(goal, "id", ""))
    rows[other][field] = find_call.arguments["value"]
    records = {**task.world.records, service: rows}
    return task.model_copy(update={"world": task.world.model_copy(update={"records": records})})


def test_injected_faults_are_quarantined_each_with_its_code_and_the_rest_is_admitted(raw: Path, tmp_path: Path) -> None:
    plain = find(raw, sets_an_enum)
    goal = plain.grading.goals[0]
    assert goal.kind == "field_equals"
    words = plain.world.services[goal.service][goal.field].values
    unsaid = next(w for w in words if w != plain.world.records[goal.service][goal.id][goal.field] and w != goal.value)
    searching = find(raw, lambda t: t.meta.pool == "short" and t.grading.reference[0].name.endswith("_search"))
    inject(raw, plain, "validation-short-90000", split="validation")
    inject(raw, regraded(plain, "diamond"), "train-short-90001")
    inject(raw, regraded(plain, unsaid), "train-short-90002")
    inject(raw, doubled(searching), f"{searching.meta.split}-short-90003")
    inject(raw, plain, "train-short-90004")
    inject(raw, plain, "train-short-90005", variation="realisation", parent="train-short-77777", changed=("backend",))
    inject(raw, plain, "train-short-90006", variation="presentation", parent=plain.meta.task_id, changed=("wording",))
    manifest = admit(raw, tmp_path / "out", CONFIG)
    assert reasons(tmp_path / "out") == {
        "train-short-90001": "infeasible_goal",
        "train-short-90002": "undiscoverable",
        f"{searching.meta.split}-short-90003": "ambiguous",
        "train-short-90004": "duplicate",
        "train-short-90005": "broken_lineage",
        "train-short-90006": "broken_lineage",
        "validation-short-90000": "duplicate",
    }
    counts = manifest.counts["task_packages"]
    assert (counts.raw, counts.validated, counts.admitted, counts.quarantined) == (57, 54, 50, 7)
    assert manifest.facts["reasons"]["broken_lineage"] == 2


def test_a_held_out_task_made_of_training_words_is_contaminated(raw: Path, tmp_path: Path) -> None:
    plain = find(raw, sets_an_enum)
    goal = plain.grading.goals[0]
    assert goal.kind == "field_equals"
    reworded = plain.model_copy(update={"request": f"{goal.service} {goal.id} {goal.field} must become {goal.value}"})
    inject(raw, reworded, "validation-short-90000", split="validation")
    held_out = find(raw, lambda t: t.meta.split == "test" and t.meta.pool == "short")
    inject(raw, held_out, "train-short-90001", split="train")
    admit(raw, tmp_path / "out", CONFIG)
    found = reasons(tmp_path / "out")
    assert found["validation-short-90000"] == "contaminated"
    assert found["train-short-90001"] == "duplicate"
    assert len(found) == 2


def test_quarantined_packages_are_kept_with_their_receipt(raw: Path, tmp_path: Path) -> None:
    inject(raw, find(raw, sets_an_enum), "train-short-90004")
    admit(raw, tmp_path / "out", CONFIG)
    kept = tmp_path / "out" / "quarantine" / "train-short-90004"
    assert (kept / "contract.json").read_bytes() == contract_path(raw, "train-short-90004").read_bytes()
    receipt = json.loads((kept / "receipt.json").read_text())
    assert [g["gate"] for g in receipt["gates"]][-1] == "release"
    assert not (tmp_path / "out" / "tasks" / "train-short-90004").exists()


def test_two_processes_give_the_same_bytes_as_one_and_a_second_call_returns_the_seal(raw: Path, tmp_path: Path) -> None:
    first = admit(raw, tmp_path / "one", CONFIG)
    second = admit(raw, tmp_path / "two", AdmissionConfig(processes=2))
    assert first == second
    stamp = (tmp_path / "one" / NAME).stat().st_mtime_ns
    assert admit(raw, tmp_path / "one", CONFIG) == first
    assert (tmp_path / "one" / NAME).stat().st_mtime_ns == stamp


def test_what_an_unfinished_run_left_behind_is_replaced(raw: Path, tmp_path: Path) -> None:
    want = admit(raw, tmp_path / "whole", CONFIG)
    left = tmp_path / "cut" / "quarantine" / "train-long-00000"
    left.mkdir(parents=True)
    (left / "contract.json").write_text("{")
    assert admit(raw, tmp_path / "cut", CONFIG) == want


def test_raw_tasks_must_be_sealed_and_a_release_belongs_to_its_raw_tasks(raw: Path, tmp_path: Path) -> None:
    admit(raw, tmp_path / "out", CONFIG)
    inject(raw, find(raw, sets_an_enum), "train-short-90004")
    with pytest.raises(SealError, match="other raw tasks"):
        admit(raw, tmp_path / "out", CONFIG)
    (raw / NAME).unlink()
    with pytest.raises(SealError, match="did not finish"):
        admit(raw, tmp_path / "fresh", CONFIG)


def test_progress_names_the_quarantined(raw: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    admit(raw, tmp_path / "out", CONFIG, lambda done, total, figure: seen.append((done, total, figure)))
    assert seen[-1] == (50, 50, "0 quarantined")
    assert len(seen) == 50


@pytest.fixture
def release(raw: Path, tmp_path: Path) -> Path:
    admit(raw, tmp_path / "release", CONFIG)
    return tmp_path / "release"


def test_a_release_is_read_and_selected_by_pool_and_split(release: Path, raw: Path) -> None:
    loaded = load_release(release)
    assert isinstance(loaded, Release)
    assert len(loaded.select()) == 50
    assert {t.meta.task_id for t in loaded.select(pool="long", split="test")} == {
        f"test-long-0000{k}" for k in range(4)
    }
    assert loaded.tasks[0] == read(raw, loaded.tasks[0].meta.task_id)


@pytest.mark.parametrize("damage", ["truncated", "missing", "extra", "altered"])
def test_a_damaged_release_is_refused_by_the_file_s_name(release: Path, damage: str) -> None:
    victim = contract_path(release, "test-long-00000")
    if damage == "truncated":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif damage == "missing":
        victim.unlink()
    elif damage == "extra":
        victim.with_name("answer.json").write_text("{}")
    else:
        victim.write_bytes(victim.read_bytes().replace(b'"done"', b'"Done"'))
    with pytest.raises(SealError, match="test-long-00000"):
        load_release(release)


def test_attachments_of_a_task_are_not_taken_for_contracts(release: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(release, tmp_path / "copy")
    note = copy / "tasks" / load_release(release).tasks[0].meta.task_id / "files" / "note.json"
    note.parent.mkdir()
    note.write_text("{}")
    manifest = seal(copy, "task_release")
    assert note.relative_to(copy).as_posix() in manifest.files
    assert load_release(copy).tasks == load_release(release).tasks


def test_a_sealed_file_that_is_no_contract_is_refused(tmp_path: Path) -> None:
    path = contract_path(tmp_path, "x")
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    seal(tmp_path, "task_release")
    with pytest.raises(SealError, match="not a contract"):
        load_release(tmp_path)
