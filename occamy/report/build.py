"""Renders a report: one HTML page that needs nothing beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from occamy.capture.transcript import Reader
from occamy.contracts.episode import EpisodeRecord
from occamy.contracts.evaluation import EvaluationResult
from occamy.contracts.manifest import write_atomic
from occamy.report import tables
from occamy.report.ancestry import drawing, nodes
from occamy.report.charts import curve_panel, interval_panel, pareto_plane
from occamy.report.inputs import Curves, ReportInputs
from occamy.report.transcript import ORIGINS, SegmentView, pick, segment_views

CURVES = (
    *("loss", "reward", "success", "steps", "tool_calls", "failed_calls", "tokens_per_episode", "segments"),
    *("explained_variance", "loss_critic", "loss_accuracy", "loss_efficiency", "cut", "kl", "entropy", "staleness"),
)
"""Metrics drawn at first sight, by the trainers' names and in this order; the others stand folded away."""
_NOT_DRAWN = frozenset({"step", "steps_total", "epoch", "time"})


@dataclass(frozen=True)
class Panel:
    """A chart with its caption."""

    caption: str
    chart: Markup


@dataclass(frozen=True)
class Told:
    """An episode with its transcript."""

    record: EpisodeRecord
    segments: list[SegmentView]


def write_report(inputs: ReportInputs, path: Path) -> Path:
    """Write the report atomically to `path` and return it."""
    write_atomic(path, render(inputs).encode())
    return path


def render(inputs: ReportInputs) -> str:
    """The report as HTML text. Sections without data are left out."""
    environment = Environment(
        loader=PackageLoader("occamy.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (resources.files("occamy.report") / "templates" / "report.css").read_text()
    evaluated = inputs.evaluation.checkpoints.values() if inputs.evaluation else ()
    family = nodes(inputs.cards, inputs.manifests, evaluated)
    page = environment.get_template("report.html")
    return page.render(
        inputs=inputs,
        style=Markup(style),
        graph=drawing(family) if family else None,
        accounting=tables.accounting(inputs.manifests),
        checkpoints=tables.checkpoints(inputs.cards, inputs.seconds),
        curves={s: _panels(rows) for s, rows in inputs.curves.items() if rows},
        origins=ORIGINS.values(),
        **_judged(inputs),
    )


def _judged(inputs: ReportInputs) -> dict[str, Any]:
    """What the page shows of an evaluation; all empty when there is none."""
    evaluation = inputs.evaluation
    if evaluation is None:
        names = ("figures", "final", "first", "panels", "scores", "claims", "plane", "efficiency", "extremes", "told")
        return dict.fromkeys((*names, "sensitivity"))
    first, final = evaluation.candidates[0], evaluation.candidates[-1]
    factor, unit = tables.cost_unit([p.cost for p in evaluation.pareto])
    episodes = inputs.episodes
    return {
        "first": first,
        "final": final,
        "figures": tables.key_figures(evaluation, final, first) if final != first else [],
        "panels": [_candidates(evaluation, pool, final) for pool in tables.pools(evaluation)],
        "scores": tables.scores(evaluation, final),
        "claims": tables.claims(evaluation, inputs.cards),
        "plane": pareto_plane(evaluation.pareto, factor, unit),
        "sensitivity": tables.sensitivity(episodes[final].records, evaluation) if final in episodes else None,
        "efficiency": tables.efficiency(evaluation, final),
        "extremes": tables.extremes(episodes, evaluation) if episodes else None,
        "told": _transcripts(inputs, final),
    }


def _candidates(evaluation: EvaluationResult, pool: Any, best: str) -> Panel:
    rows = [(name, evaluation.figure(name, pool).success) for name in evaluation.candidates]
    tasks = evaluation.figure(best, pool).tasks
    return Panel(f"{pool} pool, {tasks} tasks", interval_panel(f"Success on the {pool} pool", rows, best))


def _transcripts(inputs: ReportInputs, candidate: str) -> list[Told]:
    sealed = inputs.episodes.get(candidate)
    if sealed is None or inputs.tokenizer is None:
        return []
    reader = Reader(inputs.tokenizer)
    return [
        Told(r, segment_views(reader, [s for s in sealed.segments if s.episode_id == r.episode_id]))
        for r in pick(sealed)
    ]


def _panels(rows: Curves) -> tuple[list[Panel], list[Panel]]:
    """Panels to show and panels to fold away. Metrics that never move are neither."""
    series: dict[str, list[tuple[float, float]]] = {}
    for position, row in enumerate(rows):
        for name, value in _numbers(row).items():
            series.setdefault(name, []).append((float(row.get("step", position)), value))
    moving = {n: p for n, p in series.items() if len(p) > 1 and len({v for _, v in p}) > 1}
    shown = [n for n in CURVES if n in moving]
    rest = sorted(set(moving) - set(shown))
    return _draw(shown, moving), _draw(rest, moving)


def _draw(names: Sequence[str], series: Mapping[str, Sequence[tuple[float, float]]]) -> list[Panel]:
    return [Panel(name.replace("_", " "), curve_panel(name, series[name])) for name in names]


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if name not in _NOT_DRAWN and isinstance(value, int | float) and math.isfinite(value)
    }
