"""The whole recipe, once: every stage leaves what the next one reads, and a second run does nothing again."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from occamy.contracts.lineage import read_card
from occamy.stages.names import CANDIDATES, STAGES

from .conftest import start, survivors

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


def test_every_stage_finished(finished_run: tuple[Path, str]) -> None:
    out, printed = finished_run
    for stage in STAGES[1:]:
        assert (out / "stages" / f"{stage}.json").is_file(), stage
    assert f"report   {out / 'report.html'}" in printed
    assert f"occamy ui {out}" in printed
    for candidate in CANDIDATES:
        assert candidate in printed
    assert "{" not in printed  # KFP's raw log lines stay in the log


def test_lineage_leads_back_to_the_base(finished_run: tuple[Path, str]) -> None:
    out, _ = finished_run
    cards = {name: read_card(out / "stages" / name) for name in CANDIDATES if name != "base"}
    assert len({card.root for card in cards.values()}) == 1
    assert cards["marathon"].parents == (cards["marathon-sft"].weights_digest,)
    experts = {cards["marathon"].weights_digest, cards["sprint"].weights_digest}
    assert set(cards["soup"].parents) == experts
    assert cards["sao"].parents == (cards["soup"].weights_digest,)


def test_candidates_are_flat_comparable_runs_and_nothing_is_open(finished_run: tuple[Path, str]) -> None:
    out, _ = finished_run
    client = MlflowClient(f"sqlite:///{out / 'mlflow.db'}")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    candidates = {r.info.run_name: r for r in runs if r.data.tags.get("occamy.kind") == "candidate"}
    assert set(candidates) == set(CANDIDATES)
    for run in candidates.values():
        assert "mlflow.parentRunId" not in run.data.tags
        assert "mixed.success" in run.data.metrics
    assert {r.info.status for r in runs} == {"FINISHED"}


def test_report_is_one_page(finished_run: tuple[Path, str]) -> None:
    out, _ = finished_run
    page = (out / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    for candidate in CANDIDATES:
        assert candidate in page


def test_resuming_a_finished_run_does_nothing_again(finished_run: tuple[Path, str]) -> None:
    out, _ = finished_run
    before = {p: p.stat().st_mtime_ns for p in (out / "stages").rglob("*") if p.is_file()}
    process = start("run", "--resume", str(out))
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    assert {p: p.stat().st_mtime_ns for p in (out / "stages").rglob("*") if p.is_file()} == before
    assert printed.count(" reused") == len(STAGES) - 1
    assert survivors(process.pid) == []


def test_a_failing_stage_is_one_message_and_the_report_is_written(tiny: list[str], tmp_path: Path) -> None:
    out = tmp_path / "failing"
    made = start("synth", *tiny, "--out", str(out))
    assert made.communicate(timeout=300)[0].rstrip().endswith(str(out / "stages" / "synthesis"))
    (out / "stages" / "synthesis" / "stray").touch()
    process = start("run", "--resume", str(out))
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "stage synthesis failed" in printed or "stage admission failed" in printed
    assert "stray is not in the manifest; remove it" in printed
    assert f"occamy run --resume {out}" in printed
    assert "Traceback" not in printed
    assert (out / "report.html").is_file()
