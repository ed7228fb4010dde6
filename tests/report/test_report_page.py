"""The page as text: what a finished, an unfinished and a damaged run show, and that nothing is fetched."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from occamy.contracts.episode import QuarantineReason
from occamy.report import tables
from occamy.report.build import render
from occamy.report.inputs import ReportInputs, collect

SIX = ("base", "marathon-sft", "marathon", "sprint", "soup", "sao")
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Balanced(HTMLParser):
    """Collects section ids and text, and fails on tags that do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [v for k, v in attrs if k == "id" and v]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)


def test_curves_are_found_where_each_trainer_writes_them(whole: ReportInputs) -> None:
    lengths = {stage: len(rows) for stage, rows in whole.curves.items()}
    assert lengths == {"marathon-sft": 40, "marathon": 40, "sprint": 40, "sao": 40}


def test_the_curves_shown_first_go_by_the_trainers_names() -> None:
    from occamy.report.build import CURVES

    written = {"loss", "reward", "success", "steps", "tool_calls", "failed_calls", "tokens_per_episode", "segments"}
    written |= {"explained_variance", "loss_critic", "loss_accuracy", "loss_efficiency", "cut", "kl", "entropy"}
    assert set(CURVES) == written | {"staleness"}


def test_an_evaluation_without_its_manifest_becomes_a_note(gather: Callable[..., ReportInputs], tmp_path: Path) -> None:
    gather(tmp_path / "run")
    (tmp_path / "run" / "stages" / "evaluation" / "manifest.json").unlink()
    inputs = collect(tmp_path / "run")
    assert inputs.evaluation is None
    assert any("evaluation" in note and "no manifest.json" in note for note in inputs.notes)


def test_price_sensitivity_leaves_out_what_was_not_scored(whole: ReportInputs) -> None:
    assert whole.evaluation is not None
    records = whole.episodes["sao"].records
    failed = [
        r.model_copy(update={"quarantine": QuarantineReason.infra_failed, "input_tokens": 10**9}) for r in records[:1]
    ]
    assert tables.sensitivity([*records, *failed], whole.evaluation) == tables.sensitivity(records, whole.evaluation)


def test_a_finished_run_shows_every_section_and_candidate(page: Path) -> None:
    parsed = Balanced(page.read_text())
    assert parsed.ids == ["candidates", "cost", "efficiency", "lineage", "data", "learning", "episodes", "provenance"]
    words = " ".join(" ".join(parsed.words).split())
    for name in SIX:
        assert name in words
    for said in (
        "sao is the new champion.",
        "soup vs marathon",
        "infeasible 11, leaks_answer 4, near_duplicate 9",
        "example vector",
        "closed by summary replacement",
        "set tier of A01 to gold then copy qty of B02 to notes",
        'crm_update{"id":"A01","tier":"gold"}<end>',
        "slowest",
        "USD / 1,000 tasks",
    ):
        assert said in words, said


def test_the_page_needs_nothing_beside_it(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!#)', text)
    assert "url(" not in text and "@import" not in text and "<script" not in text
    assert len(text) < 400_000


def test_the_same_run_gives_the_same_page(whole: ReportInputs, page: Path) -> None:
    assert render(whole) == page.read_text()


def test_an_unfinished_run_shows_what_it_has(gather: Callable[..., ReportInputs], tmp_path: Path) -> None:
    inputs = gather(tmp_path / "run", upto="marathon", state="FAILED")
    parsed = Balanced(render(inputs))
    assert parsed.ids == ["lineage", "data", "learning", "provenance"]
    assert "failed" in parsed.words
    Balanced(render(ReportInputs(title="empty", run="empty")))


def test_damage_becomes_a_note(gather: Callable[..., ReportInputs], made_run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from occamy.report.inputs import collect

    run = made_run.make_run(tmp_path / "run")
    (run.stage("evaluation") / "evaluation.json").write_text("{}")
    (run.stage("marathon") / "lineage.json").write_text("torn")
    with (run.stage("sao") / "trainer" / "exchange" / "metrics.jsonl").open("a") as f:
        f.write('{"step": 41, "rew')
    inputs = collect(run.path)
    assert inputs.evaluation is None
    assert len(inputs.curves["sao"]) == 40
    assert [n.split(":")[0] for n in inputs.notes] == ["stage marathon", "stage evaluation"]
    assert "evaluation.json was altered" in render(inputs)


def test_what_comes_from_data_is_escaped(whole: ReportInputs) -> None:
    text = render(replace(whole, title="<script>alert(1)</script>", notes=["<b>x</b>"]))
    assert "<script>" not in text and "<b>x</b>" not in text


def test_claims_compare_each_candidate_with_its_parents(whole: ReportInputs) -> None:
    assert whole.evaluation is not None
    grid = tables.claims(whole.evaluation, whole.cards)
    assert [row[0].text for row in grid.rows] == [
        "marathon-sft vs base",
        "marathon vs marathon-sft",
        "sprint vs base",
        "soup vs marathon",
        "soup vs sprint",
        "sao vs soup",
        "sao vs base",
    ]
    for row in grid.rows:
        low, high = row[1].note.replace("−", "-").split(" to ")
        verdict = "better" if float(low) > 0 else "worse" if float(high) < 0 else "no tested difference"
        assert row[4].note == verdict


def test_efficiency_states_changes_against_the_first_candidate(whole: ReportInputs) -> None:
    assert whole.evaluation is not None
    grid = tables.efficiency(whole.evaluation, "sao")
    base, sao = whole.evaluation.figure("base", "mixed"), whole.evaluation.figure("sao", "mixed")
    assert [c.note for c in grid.rows[0]] == [""] * len(grid.heads)
    change = 100 * (sao.steps - base.steps) / base.steps
    assert grid.rows[5][4].note == f"−{abs(change):.0f} %"
    assert grid.rows[5][4].tone == "good"


@pytest.mark.parametrize(
    ("costs", "want"), [([0.05], (1.0, "task")), ([1e-4], (1e3, "1,000 tasks")), ([1e-7, 2e-6], (1e6, "million tasks"))]
)
def test_costs_are_shown_in_a_readable_unit(costs: list[float], want: tuple[float, str]) -> None:
    assert tables.cost_unit(costs) == want
