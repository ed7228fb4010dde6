"""Scales, charts, the lineage drawing and transcripts on tiny inputs."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from occamy.capture.sealed import Sealed
from occamy.capture.transcript import Reader
from occamy.contracts.episode import Origin, Segment
from occamy.contracts.evaluation import Interval, ParetoPoint
from occamy.contracts.lineage import LineageCard
from occamy.contracts.manifest import Manifest
from occamy.report.ancestry import depths, drawing, nodes
from occamy.report.charts import curve_panel, interval_panel, pareto_plane
from occamy.report.inputs import ReportInputs
from occamy.report.svg import Scale, short
from occamy.report.transcript import pick, segment_views


def test_scales_by_hand() -> None:
    linear = Scale(0, 10, 100, 200)
    assert (linear(0), linear(5), linear(10)) == (100, 150, 200)
    log = Scale(1, 100, 0, 10, log=True)
    assert log(10) == pytest.approx(5)
    assert Scale(3, 3, 0, 10)(3) == 5


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 1, 0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Scale(0, 0.83, 0, 1), [0, 0.2, 0.4, 0.6, 0.8]),
        (Scale(1, 1000, 0, 1, log=True), [1, 5, 20, 100, 500]),
        (Scale(0.11, 0.19, 0, 1, log=True), [0.12, 0.14, 0.16, 0.18]),
    ],
)
def test_ticks_are_round(scale: Scale, ticks: list[float]) -> None:
    assert scale.ticks(5) == pytest.approx(ticks)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_there_are_always_ticks_inside_the_range(low: float, span: float) -> None:
    high = low + span
    ticks = Scale(low, high, 0, 1).ticks(4)
    assert 3 <= len(ticks) <= 12
    assert all(low - span * 1e-6 <= t <= high + span * 1e-6 for t in ticks)


def test_short_numbers() -> None:
    assert [short(v) for v in (0, 0.25, 12, 3400, 34000, 2.5e6, 1e-5, -0.5)] == [
        *("0", "0.25", "12", "3.4k", "34k", "2.5M", "1e-05", "-0.5"),
    ]


def test_charts_are_well_formed_and_describe_themselves() -> None:
    span = Interval(mean=0.5, low=0.4, high=0.6)
    chart = ET.fromstring(interval_panel("long", [("base & co", span), ("sao", span)], "sao"))
    assert chart[0].text == "long: base & co 50.0%, sao 50.0%"
    assert len(chart.findall(".//circle")) == 2
    ET.fromstring(curve_panel("loss", [(1, 0.5), (2, 0.5)]))
    many = ET.fromstring(curve_panel("loss", [(s, 1 / s) for s in range(1, 31)]))
    assert [p.get("class") for p in many.findall(".//polyline")] == ["curve faint", "curve"]


def test_the_plane_marks_front_and_knee_and_keeps_labels_inside() -> None:
    names = ("base", "marathon-sft", "marathon", "sprint", "soup", "sao")
    points = [
        ParetoPoint(candidate=n, cost=1e-4 * (1 + i / 50), score=i / 5, on_front=i > 2, knee=n == "soup")
        for i, n in enumerate(names)
    ]
    chart = ET.fromstring(pareto_plane(points, 1e3, "1,000 tasks"))
    assert len(chart.findall(".//circle[@class='knee']")) == 1
    labels = {t.text: t for t in chart.findall(".//text") if "label" in (t.get("class") or "")}
    assert set(labels) == {*names[:4], "soup (knee)", "sao"}
    for label in labels.values():
        x, size = float(label.get("x", 0)), 7 * len(label.text or "")
        left = {"start": x, "end": x - size, "middle": x - size / 2}[label.get("text-anchor", "")]
        assert left >= 0 and left + size <= 360 + 8
    places = [(float(t.get("x", 0)), float(t.get("y", 0))) for t in labels.values()]
    assert len(set(places)) == 6


def made_card(name: str, *parents: str, data: dict[str, str] | None = None) -> LineageCard:
    return LineageCard(
        name=name,
        stage="sft",
        root="base",
        parents=parents,
        parent_names=parents,
        data=data or {},
        tokenizer_digest="t",
        weights_digest=name,
    )


def test_lineage_rows_follow_the_making() -> None:
    tasks = Manifest(kind="tasks", files={})
    release = Manifest(kind="task_release", files={}, parents={"raw": tasks.digest()})
    evaluation = Manifest(kind="evaluation", files={}, parents={"release": release.digest()})
    cards = [
        made_card("base"),
        made_card("a", "base", data={"tasks": release.digest()}),
        made_card("b", "base", data={"tasks": release.digest(), "gone": "sha256:unknown"}),
        made_card("soup", "a", "b"),
    ]
    made = nodes(
        cards, {"synthesis": tasks, "admission": release, "evaluation": evaluation}, ["base", "a", "b", "soup"]
    )
    depth = {n.name: depths(made)[n.key] for n in made}
    assert depth == {"synthesis": 0, "admission": 1, "base": 1, "a": 2, "b": 2, "soup": 3, "evaluation": 4}
    assert next(n for n in made if n.name == "evaluation").parents == (release.digest(), "soup")
    picture = ET.fromstring(drawing(made))
    assert len(picture.findall(".//rect")) == 7
    assert len(picture.findall(".//path")) == 9
    assert "soup from a, b" in (picture[0].text or "")


def test_lineage_of_cards_alone_and_of_a_cycle_can_be_drawn() -> None:
    assert len(ET.fromstring(drawing(nodes([made_card("base")], {}))).findall(".//rect")) == 1
    ET.fromstring(drawing(nodes([made_card("x", "y"), made_card("y", "x")], {})))


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    words = [
        "<user>",
        "<assistant>",
        "<tool>",
        "<end>",
        "set",
        "tier",
        "to",
        "gold",
        'crm_get{"id":"',
        "A01",
        '"}',
        "ok",
    ]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return Reader(tmp_path / "tokenizer.json")


def test_transcripts_split_by_role_and_colour_by_origin(reader: Reader) -> None:
    tokens = [0, 4, 5, 6, 7, 1, 8, 9, 10, 3, 2, 11, 1, 7]
    i, s, o = Origin.INHERITED, Origin.SAMPLED, Origin.OBSERVED
    origin = [i, i, i, i, i, i, s, s, s, s, o, o, o, s]
    mask = np.array([x == s for x in origin])
    segment = Segment(
        episode_id="e",
        run="root",
        index=0,
        closed_by="history_pruning",
        sampled_by="policy",
        tokens=np.array(tokens, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        origin=np.array(origin, dtype=np.int8),
    )
    (view,) = segment_views(reader, [segment])
    assert (view.tokens, view.sampled, view.closed_by) == (14, 5, "history pruning")
    assert [(line.role, [(p.css, p.text) for p in line.pieces]) for line in view.lines] == [
        ("user", [("inherited", "set tier to gold")]),
        ("assistant", [("sampled", 'crm_get{"id":"A01"}<end>')]),
        ("tool", [("observed", "ok")]),
        ("assistant", [("sampled", "gold")]),
    ]
    assert view.lines[1].pieces[0].title.endswith("4 tokens; weight version 3; mean log-prob -0.50")
    (cut,) = segment_views(reader, [segment], limit=5)
    assert [line.role for line in cut.lines] == ["user"]


def test_a_long_episode_with_several_segments_is_preferred(whole: ReportInputs) -> None:
    sealed: Sealed = whole.episodes["sao"]
    long, short_one = pick(sealed)
    assert (long.pool, long.segments, long.success) == ("long", 2, True)
    assert (short_one.pool, short_one.success) == ("short", True)
    assert pick(Sealed([], [], sealed.manifest)) == []
