"""The tables and key figures of a report: what to say, in words and with deltas, without any markup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from occamy.capture.sealed import Sealed
from occamy.contracts.episode import EpisodeRecord
from occamy.contracts.evaluation import EvaluationPool, EvaluationResult, Interval, PairedDifference, PoolFigures
from occamy.contracts.lineage import LineageCard
from occamy.contracts.manifest import Manifest
from occamy.evaluation.cost import episode_cost, price_sensitivity
from occamy.evaluation.prices import PriceSnapshot
from occamy.evaluation.summary import scored

Tone = Literal["", "good", "bad"]
POOLS: tuple[EvaluationPool, ...] = ("long", "short", "mixed")


@dataclass(frozen=True)
class Cell:
    """A table cell: the figure, a small note under or beside it, and whether the note is good news."""

    text: str
    note: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Grid:
    """A table: column heads with their explanations, rows of cells, and the row to stress."""

    heads: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Cell]]
    stressed: str = ""
    """First cell's text of the stressed row."""
    words: frozenset[int] = frozenset()
    """Columns of words, set left; numbers stand right."""


@dataclass(frozen=True)
class KeyFigure:
    """One figure of the head of the page."""

    label: str
    before: str
    after: str
    change: str
    tone: Tone


def pools(evaluation: EvaluationResult) -> list[EvaluationPool]:
    """Pools that were evaluated, mixed last."""
    return [p for p in POOLS if any(f.pool == p for f in evaluation.figures)]


def key_figures(evaluation: EvaluationResult, candidate: str, against: str) -> list[KeyFigure]:
    """Success, repeatability, tokens, turns and cost of a candidate beside those of another, on the mixed pool."""
    new, old = evaluation.figure(candidate, "mixed"), evaluation.figure(against, "mixed")
    factor, unit = cost_unit([f.cost.mean for f in evaluation.figures])
    figures = [
        _points(f"{pool} success", evaluation.figure(against, pool).success, evaluation.figure(candidate, pool).success)
        for pool in pools(evaluation)
    ]
    if new.pass_hat_3 and old.pass_hat_3:
        figures.append(_points("pass^3, mixed", old.pass_hat_3, new.pass_hat_3))
    figures += [
        _share("tokens per episode", _tokens(old), _tokens(new), "{:,.0f}"),
        _share("turns per episode", old.steps, new.steps, "{:.1f}"),
        _share(f"USD per {unit}", old.cost.mean * factor, new.cost.mean * factor, "{:.3g}"),
    ]
    return figures


def scores(evaluation: EvaluationResult, stressed: str) -> Grid:
    """Success per pool, partial credit, repeatability, and what stands beside the score."""
    shown = pools(evaluation)
    heads = [("candidate", "")]
    heads += [(f"{p} success", f"mean over tasks, {evaluation.level:.0%} bootstrap interval") for p in shown]
    heads += [
        ("partial", "mean score with partial credit, mixed pool"),
        ("pass^3", "all of 3 trials succeed, mixed pool"),
        ("gap", "success − pass^3: success that does not repeat"),
        ("not scored", "infrastructure failures + quarantined episodes, beside the score"),
    ]
    rows = []
    for name in evaluation.candidates:
        mixed = evaluation.figure(name, "mixed")
        cells = [Cell(name)]
        cells += [_interval(evaluation.figure(name, p).success) for p in shown]
        cells.append(Cell(f"{100 * mixed.partial.mean:.1f}"))
        cells.append(_interval(mixed.pass_hat_3) if mixed.pass_hat_3 else Cell("–"))
        cells.append(Cell("–" if mixed.gap is None else f"{100 * mixed.gap:.1f}"))
        cells.append(Cell(f"{mixed.infra_failed} + {mixed.quarantined}"))
        rows.append(cells)
    return Grid(heads, rows, stressed)


def efficiency(evaluation: EvaluationResult, stressed: str) -> Grid:
    """What an episode takes on the mixed pool, with the change against the first candidate."""
    factor, unit = cost_unit([f.cost.mean for f in evaluation.figures])
    heads = [
        ("candidate", ""),
        ("tokens", "prompt + sampled, per episode"),
        ("cached", "share of prompt tokens that a prefix cache serves"),
        ("sampled", "sampled tokens per episode"),
        ("turns", "policy turns per episode"),
        ("tool calls", "per episode"),
        ("failed calls", "tool calls answered by a typed error, per episode"),
        ("segments", "token segments per episode; above 1 the history was rewritten"),
        ("seconds", "per episode under the evaluation's own load"),
        ("timeouts", "share of episodes"),
        (f"USD / {unit}", "at the frozen prices"),
    ]
    base = evaluation.figure(evaluation.candidates[0], "mixed")
    rows = []
    for name in evaluation.candidates:
        f = evaluation.figure(name, "mixed")
        rows.append(
            [
                Cell(name),
                _change(_tokens(f), _tokens(base), f is base, "{:,.0f}"),
                Cell(f"{f.cached_tokens / f.input_tokens:.0%}" if f.input_tokens else "–"),
                _change(f.output_tokens, base.output_tokens, f is base, "{:,.0f}"),
                _change(f.steps, base.steps, f is base, "{:.1f}"),
                _change(f.tool_calls, base.tool_calls, f is base, "{:.1f}"),
                _change(f.failed_calls, base.failed_calls, f is base, "{:.2f}"),
                Cell(f"{f.segments:.2f}"),
                _change(f.wall_seconds, base.wall_seconds, f is base, "{:.2f}"),
                Cell(f"{f.timeouts:.1%}"),
                _change(f.cost.mean * factor, base.cost.mean * factor, f is base, "{:.3g}"),
            ]
        )
    return Grid(heads, rows, stressed)


def claims(evaluation: EvaluationResult, cards: Sequence[LineageCard]) -> Grid:
    """Tested differences: every candidate against its parents, and the last against the first."""
    first, last = evaluation.candidates[0], evaluation.candidates[-1]
    pairs = [(c.name, p) for c in cards for p in c.parent_names] + [(last, first)]
    known = {(d.candidate, d.against): d for d in evaluation.differences if d.pool == "mixed"}
    heads = [
        ("comparison", "mixed pool, same tasks and seeds"),
        ("difference", f"points of success, paired {evaluation.level:.0%} bootstrap interval"),
        ("won – lost", "trials that only the one or only the other solved"),
        ("p", "exact McNemar test"),
        ("verdict", "better or worse when the interval leaves out 0"),
    ]
    rows = [_claim(known[pair]) for pair in dict.fromkeys(pairs) if pair in known]
    return Grid(heads, rows, f"{last} vs {first}", words=frozenset({4}))


def accounting(manifests: Mapping[str, Manifest]) -> Grid:
    """Counts by stage and artifact kind, with reasons of quarantine where the manifest states them."""
    heads = [("stage", ""), ("artifact", ""), ("raw", ""), ("validated", ""), ("admitted", ""), ("quarantined", "")]
    heads.append(("reasons", "why artifacts were set aside"))
    rows = []
    for stage, manifest in manifests.items():
        reasons = manifest.facts.get("reasons")
        said = ", ".join(f"{k} {v}" for k, v in reasons.items()) if isinstance(reasons, dict) else ""
        for kind, counts in manifest.counts.items():
            numbers = (counts.raw, counts.validated, counts.admitted, counts.quarantined)
            cells = [Cell(stage), Cell(kind.replace("_", " ")), *(Cell(f"{n:,}" if n else "–") for n in numbers)]
            rows.append([*cells, Cell(said or "–")])
    return Grid(heads, rows, words=frozenset({1, 6}))


def checkpoints(cards: Sequence[LineageCard], seconds: Mapping[str, float]) -> Grid:
    """One row per lineage card."""
    heads = [("checkpoint", ""), ("stage", ""), ("made from", ""), ("data", "that trained it"), ("minutes", "")]
    rows = [
        [
            Cell(c.name),
            Cell(c.stage),
            Cell(" + ".join(c.parent_names) or "–"),
            Cell(", ".join(sorted(c.data)) or "–"),
            Cell(f"{seconds[c.name] / 60:.1f}" if c.name in seconds else "–"),
        ]
        for c in cards
    ]
    return Grid(heads, rows, words=frozenset({1, 2, 3}))


def extremes(episodes: Mapping[str, Sealed], evaluation: EvaluationResult, count: int = 4) -> Grid:
    """The slowest and the costliest episodes over all candidates."""
    prices = snapshot(evaluation)
    factor, unit = cost_unit([f.cost.mean for f in evaluation.figures])
    all_ = [(c, r) for c, s in episodes.items() for r in s.records]
    slow = sorted(all_, key=lambda x: -x[1].wall_seconds)[:count]
    dear = sorted(all_, key=lambda x: -episode_cost(x[1], prices))[:count]
    heads = [
        ("candidate", ""),
        ("task", ""),
        ("why", ""),
        ("outcome", ""),
        ("score", ""),
        ("turns", ""),
        ("tokens", ""),
    ]
    heads += [("seconds", ""), (f"USD / {unit}", "")]
    rows = []
    for pair in [*slow, *(x for x in dear if x not in slow)]:
        why = [word for word, group in (("slowest", slow), ("costliest", dear)) if pair in group]
        rows.append(_extreme(" and ".join(why), *pair, prices, factor))
    return Grid(heads, rows, words=frozenset({1, 2, 3}))


def sensitivity(records: Iterable[EpisodeRecord], evaluation: EvaluationResult) -> Grid:
    """How the cost of one candidate's scored episodes moves when a single price is halved or raised by half."""
    kept = scored(records)
    prices = snapshot(evaluation)
    factor, unit = cost_unit([f.cost.mean for f in evaluation.figures])
    heads = [
        ("price", "USD per million tokens"),
        ("now", ""),
        ("−50 %", f"USD per {unit}"),
        ("+50 %", f"USD per {unit}"),
    ]
    rows = [
        [Cell(name), Cell(f"{getattr(prices, name):g}"), Cell(f"{low * factor:.3g}"), Cell(f"{high * factor:.3g}")]
        for name, (low, high) in price_sensitivity(kept, prices).items()
    ]
    return Grid(heads, rows)


def snapshot(evaluation: EvaluationResult) -> PriceSnapshot:
    """The price snapshot that an evaluation used."""
    return PriceSnapshot.model_validate(evaluation.prices)


def cost_unit(costs: Sequence[float]) -> tuple[float, str]:
    """A factor and a unit in which costs per task read well: per task, per 1,000 or per million tasks."""
    high = max(costs, default=0.0)
    if high >= 0.01:
        return 1.0, "task"
    return (1e3, "1,000 tasks") if high >= 1e-5 else (1e6, "million tasks")


def _claim(d: PairedDifference) -> list[Cell]:
    i = d.success
    verdict: tuple[str, Tone] = ("no tested difference", "")
    if i.low > 0:
        verdict = ("better", "good")
    elif i.high < 0:
        verdict = ("worse", "bad")
    return [
        Cell(f"{d.candidate} vs {d.against}"),
        Cell(_signed(f"{100 * i.mean:+.1f}"), _signed(f"{100 * i.low:+.1f} to {100 * i.high:+.1f}")),
        Cell(f"{d.won} – {d.lost}"),
        Cell(f"{d.p_value:.3f}" if d.p_value >= 0.001 else "< 0.001"),
        Cell("", *verdict),
    ]


def _extreme(why: str, candidate: str, r: EpisodeRecord, prices: PriceSnapshot, factor: float) -> list[Cell]:
    return [
        Cell(candidate),
        Cell(f"{r.task_id} · trial {r.trial + 1}"),
        Cell(why),
        Cell(r.outcome.value.replace("_", " ")),
        Cell(f"{r.score:.2f}"),
        Cell(str(r.steps)),
        Cell(f"{r.input_tokens + r.output_tokens:,}"),
        Cell(f"{r.wall_seconds:.2f}"),
        Cell(f"{episode_cost(r, prices) * factor:.3g}"),
    ]


def _tokens(f: PoolFigures) -> float:
    return f.input_tokens + f.output_tokens


def _interval(i: Interval) -> Cell:
    return Cell(f"{100 * i.mean:.1f}", f"{100 * i.low:.1f}–{100 * i.high:.1f}")


def _points(label: str, old: Interval, new: Interval) -> KeyFigure:
    change = 100 * (new.mean - old.mean)
    return KeyFigure(label, f"{old.mean:.1%}", f"{new.mean:.1%}", _signed(f"{change:+.1f} pts"), _tone(change))


def _share(label: str, old: float, new: float, form: str) -> KeyFigure:
    change = 100 * (new - old) / old if old else 0.0
    return KeyFigure(label, form.format(old), form.format(new), _signed(f"{change:+.1f} %"), _tone(-change))


def _change(new: float, old: float, itself: bool, form: str) -> Cell:
    if itself or not old:
        return Cell(form.format(new))
    change = 100 * (new - old) / old
    return Cell(form.format(new), _signed(f"{change:+.0f} %"), _tone(-change))


def _signed(text: str) -> str:
    """With real minus signs, as wide as the plus."""
    return text.replace("-", "−")


def _tone(gain: float) -> Tone:
    return "good" if gain > 0.05 else "bad" if gain < -0.05 else ""
