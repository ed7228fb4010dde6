"""Compositions resolve to manifests with digests; whatever is unknown is refused with the nearest known name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from occamy.harness.agent import ComposedHarness
from occamy.harness.compose import CompositionError, resolve
from occamy.harness.loading import load
from occamy.harness.parts import Budgets, Compaction, Failures, Retry, Trace

LAPTOP: dict[str, Any] = {
    "name": "mine",
    "loop": {"kind": "react"},
    "middleware": [
        {"kind": "compaction", "mode": "summary", "budget_tokens": 224},
        {"kind": "budgets"},
        {"kind": "failures"},
    ],
}


def test_react_is_the_laptop_default() -> None:
    harness = load("react")
    composition = harness.manifest.composition
    assert [type(m) for m in composition.middleware] == [Compaction, Budgets, Trace, Retry, Failures]
    compaction = composition.middleware[0]
    assert isinstance(compaction, Compaction)
    assert (compaction.mode, compaction.budget_tokens, compaction.keep_last, compaction.max_times) == (
        "summary",
        224,
        2,
        3,
    )
    assert harness.rules.announced == ("summary_replacement",) and harness.manifest.system == ""
    assert load("briefed").rules.announced == ("history_pruning",) and load("briefed").manifest.system == "work"


def test_digest_covers_every_setting_and_writes_out_defaults() -> None:
    one = resolve(LAPTOP)
    assert one.digest() == resolve(dict(LAPTOP)).digest() == ComposedHarness(one).digest
    explicit = {**LAPTOP, "prompt": {"layout": "plain"}, "skills": []}
    assert resolve(explicit).digest() == one.digest()
    assert resolve({**LAPTOP, "prompt": {"layout": "briefed"}}).digest() != one.digest()
    fewer = [{**LAPTOP["middleware"][0], "keep_last": 3}, *LAPTOP["middleware"][1:]]
    assert resolve({**LAPTOP, "middleware": fewer}).digest() != one.digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"promt": {}}, "unknown key 'promt'; did you mean 'prompt'?"),
        ({"prompt": {"layuot": "plain"}}, "prompt: unknown key 'layuot'; did you mean 'layout'?"),
        ({"prompt": {"layout": "fancy"}}, "prompt.layout"),
        ({"prompt": {"layout": "breifed"}}, "prompt.layout: unknown 'breifed'; did you mean 'briefed'"),
        ({"loop": {"kind": "plan_atc"}}, "loop: unknown part 'plan_atc'; did you mean 'plan_act'"),
        (
            {"loop": {"kind": "plan_act", "replan": 1}},
            r"\(plan_act\): unknown key 'replan'; did you mean 'replan_after'",
        ),
        ({"loop": "react"}, "loop: has no kind; give one of \\['plan_act', 'react'\\]"),
        ({"middleware": [{"kind": "compaction", "mode": "sumary", "budget_tokens": 99}]}, "'harness_summary'"),
        ({"middleware": [{"kind": "subagents"}]}, "subagents are lent their parent's budgets; add the part budgets"),
        ({"middleware": [{"kind": "subagents", "modes": []}, {"kind": "budgets"}]}, "modes"),
        ({"middleware": [{"kind": "subagents", "name": "do it"}, {"kind": "budgets"}]}, "name"),
        (
            {"middleware": [{"kind": "compactoin", "mode": "summary"}]},
            r"middleware\[0\]: unknown part 'compactoin'; did",
        ),
        (
            {"middleware": [{"kind": "retry", "atempts": 3}]},
            r"\(retry\): unknown key 'atempts'; did you mean 'attempts'",
        ),
        ({"middleware": [{"kind": "retry", "attempts": 0}]}, "attempts"),
        ({"middleware": [{"attempts": 3}]}, r"middleware\[0\]: has no kind"),
        ({"middleware": [{"kind": ["trace"]}]}, r"middleware\[0\]: unknown part"),
        (
            {"middleware": [{"kind": "failures"}, {"kind": "budgets"}]},
            "outermost first: recovery, subagents, compaction",
        ),
        ({"middleware": [{"kind": "budgets"}, {"kind": "budgets"}]}, "at most once"),
        ({"skills": ["chekc"], "prompt": {"layout": "briefed"}}, "unknown skill pack 'chekc'; did you mean 'check'"),
        ({"skills": ["check"]}, "skills need a system message"),
        ({"name": None}, "name"),
    ],
)
def test_refusals_name_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CompositionError, match=message):
        resolve({**LAPTOP, **change}, "h.yaml")


def test_skills_join_the_system_message() -> None:
    harness = resolve({**LAPTOP, "prompt": {"layout": "briefed"}, "skills": ["check"]})
    assert harness.system == "work\ncheck each change"


def test_a_layout_takes_the_skill_packs_where_it_says() -> None:
    bare = resolve({**LAPTOP, "prompt": {"layout": "handbook"}}).system
    assert bare.startswith("You are an assistant") and "{" not in bare and bare == bare.strip()
    skilled = resolve({**LAPTOP, "prompt": {"layout": "handbook"}, "skills": ["look-first", "verify"]}).system
    assert skilled.startswith(bare + "\nLook first: ") and "\nVerify: " in skilled


@pytest.mark.parametrize(
    ("name", "announced", "subagents"),
    [
        ("react", ("summary_replacement",), False),
        ("briefed", ("history_pruning",), False),
        ("plan_act", ("summary_replacement",), False),
        ("delegating", ("summary_replacement",), True),
        ("cowork", ("summary_replacement",), True),
    ],
)
def test_every_shipped_composition_declares_its_requests(
    name: str, announced: tuple[str, ...], subagents: bool
) -> None:
    harness = load(name)
    assert harness.manifest.composition.name == name
    assert (harness.rules.announced, harness.rules.subagents) == (announced, subagents)


def test_two_kinds_of_rewrite_are_both_declared() -> None:
    pruning = {"kind": "compaction", "mode": "pruning", "budget_tokens": 224}
    middleware = [{"kind": "recovery", "context": "harness_summary"}, pruning]
    rules = ComposedHarness(resolve({"name": "n", "middleware": middleware})).rules
    assert rules.announced == ("summary_replacement", "history_pruning")
    middleware = [{"kind": "recovery", "context": "end"}, pruning]
    assert ComposedHarness(resolve({"name": "n", "middleware": middleware})).rules.announced == ("history_pruning",)


def test_compositions_come_from_files_too(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("name: own\nmiddleware:\n  - {kind: budgets}\n")
    assert load(path).manifest.composition.name == "own"
    path.write_text("name: [")
    with pytest.raises(CompositionError, match=r"own.yaml: no YAML"):
        load(path)
    with pytest.raises(CompositionError, match=r"missing.yaml: no such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(CompositionError, match="'raect' is unknown; did you mean 'react'"):
        load("raect")
