"""The whole evaluation stage on random nano checkpoints with the real engine, harness and sandboxes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from occamy.capture.sealed import read_sealed
from occamy.contracts.lineage import LineageCard, tokenizer_digest, weights_digest, write_card
from occamy.contracts.manifest import SealError, seal, verify
from occamy.contracts.record import canonical_json
from occamy.contracts.release import KIND, contract_bytes, contract_path
from occamy.evaluation.config import EvaluationConfig
from occamy.evaluation.stage import evaluate, read_result
from occamy.evaluation.table import plain_table
from occamy.nano.model import Shape, init_weights, save_model
from occamy.nano.tokenizer import save_tokenizer
from occamy.rollout.config import RolloutConfig
from occamy.synthesis.author import Slot
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.variants import write_task

CONFIG = EvaluationConfig(tasks=2, trials=3, bootstrap=100, concurrency=8, engines=2)
ROLLOUT = RolloutConfig(max_new_tokens=8)
EACH = 2 * 2 * 3  # pools × tasks × trials


@pytest.fixture(scope="module")
def candidates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two small models with random weights and one root."""
    root, made = "", {}
    shape = Shape(layers=1)
    for seed, name in enumerate(("base", "soup")):
        folder = tmp_path_factory.mktemp(name)
        save_model(folder, init_weights(shape, seed), shape)
        save_tokenizer(folder)
        weights, tokenizer = weights_digest(folder), tokenizer_digest(folder)
        root = root or weights
        write_card(
            folder,
            LineageCard(name=name, stage="pretrain", root=root, tokenizer_digest=tokenizer, weights_digest=weights),
        )
        made[name] = folder
    return made


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three test tasks per pool, and a training task that must not be drawn."""
    folder = tmp_path_factory.mktemp("release")
    slots = [Slot("test", pool, i) for pool in ("long", "short") for i in range(3)] + [Slot("train", "long", 0)]
    for slot in slots:
        task = write_task(slot, SynthesisConfig(), 7)
        path = contract_path(folder, task.meta.task_id)
        path.parent.mkdir(parents=True)
        path.write_bytes(contract_bytes(task))
    seal(folder, KIND)
    return folder


@pytest.fixture(scope="module")
def evaluated(candidates: dict[str, Path], release: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One evaluation that several tests look at."""
    out = tmp_path_factory.mktemp("evaluation") / "out"
    seen: list[tuple[int, int, str]] = []
    result = evaluate(
        candidates, release, out, CONFIG, seed=5, rollout=ROLLOUT, on_progress=lambda *line: seen.append(line)
    )
    return {"out": out, "result": result, "seen": seen}


def test_every_candidate_meets_the_same_tasks_and_seeds(evaluated: dict[str, Any]) -> None:
    out, result = evaluated["out"], evaluated["result"]
    assert result.candidates == ("base", "soup")
    rows = {n: read_sealed(out / "episodes" / n, "episodes").records for n in result.candidates}
    assert all(len(r) == EACH for r in rows.values())
    keys = [{(r.task_id, r.trial, r.seed) for r in records} for records in rows.values()]
    assert keys[0] == keys[1] and len(keys[0]) == EACH
    assert {r.split for r in rows["base"]} == {"test"}
    assert {r.model for r in rows["soup"]} == {"soup"}
    assert result.figure("soup", "mixed").episodes + result.figure("soup", "mixed").infra_failed == EACH
    assert result.difference("soup", "base", "mixed").tasks == 4
    assert result.figure("base", "long").cost.mean > 0
    assert {p.candidate for p in result.pareto} == {"base", "soup"}


def test_progress_ends_at_the_total(evaluated: dict[str, Any]) -> None:
    done, total, _ = evaluated["seen"][-1]
    assert (done, total) == (2 * EACH, 2 * EACH)
    counts = [d for d, _, _ in evaluated["seen"]]
    assert counts == sorted(counts)


def test_the_result_is_sealed_canonical_and_verified(evaluated: dict[str, Any], tmp_path: Path) -> None:
    out, result = evaluated["out"], evaluated["result"]
    assert read_result(out) == result
    assert (out / "evaluation.json").read_bytes() == canonical_json(result)
    assert verify(out, "evaluation").parents == {"release": result.release}
    altered = tmp_path / "altered"
    shutil.copytree(out, altered)
    value = json.loads((altered / "evaluation.json").read_text())
    value["trials"] = 4
    (altered / "evaluation.json").write_bytes(canonical_json(value))
    with pytest.raises(SealError, match=r"evaluation\.json was altered"):
        read_result(altered)


def test_a_finished_evaluation_is_not_repeated(
    evaluated: dict[str, Any], candidates: dict[str, Path], release: Path
) -> None:
    again = evaluate(candidates, release, evaluated["out"], CONFIG, seed=5, rollout=ROLLOUT)
    assert again == evaluated["result"]
    with pytest.raises(SealError, match="other candidates or settings"):
        evaluate(candidates, release, evaluated["out"], CONFIG, seed=6, rollout=ROLLOUT)


def test_a_killed_evaluation_goes_on_from_its_episodes(
    evaluated: dict[str, Any], candidates: dict[str, Path], release: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(evaluated["out"] / "episodes" / "base", out / "episodes" / "base")
    before = (out / "episodes" / "base" / "manifest.json").stat().st_mtime_ns
    config = CONFIG.model_copy(update={"engines": 1})
    result = evaluate(candidates, release, out, config, seed=5, rollout=ROLLOUT)
    assert (out / "episodes" / "base" / "manifest.json").stat().st_mtime_ns == before
    assert result.episodes["base"] == evaluated["result"].episodes["base"]


def test_plain_table_names_all_candidates_and_figures(evaluated: dict[str, Any]) -> None:
    text = plain_table(evaluated["result"])
    assert "base" in text and "soup" in text and "mixed [95%]" in text and "…" not in text
    assert "on held-out tasks: 2 long, 2 short; 3 trials each." in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_pool_without_test_tasks_and_foreign_weights_are_refused(
    candidates: dict[str, Path], release: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "release"
    shutil.copytree(release, empty)
    for folder in (empty / "tasks").iterdir():
        if json.loads((folder / "contract.json").read_text())["meta"]["pool"] == "short":
            shutil.rmtree(folder)
    seal(empty, KIND)
    with pytest.raises(ValueError, match="no test task in pool 'short'"):
        evaluate(candidates, empty, tmp_path / "a", CONFIG, seed=5, rollout=ROLLOUT)
    foreign = tmp_path / "foreign"
    shutil.copytree(candidates["base"], foreign)
    shutil.copy(candidates["soup"] / "model.safetensors", foreign)
    with pytest.raises(ValueError, match=r"candidate x: .* its card says"):
        evaluate({"x": foreign}, release, tmp_path / "b", CONFIG, seed=5, rollout=ROLLOUT)
