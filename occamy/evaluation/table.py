"""The table at the end of a run: candidates by pool, for a terminal and as plain text."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from occamy.contracts.evaluation import EvaluationPool, EvaluationResult, Interval, PoolFigures

_POOLS: tuple[EvaluationPool, ...] = ("long", "short", "mixed")


def table_cells(result: EvaluationResult) -> tuple[list[str], list[list[str]]]:
    """Headings and one row per candidate: success per pool (mean and interval), then figures of the last pool.

    The knee of the Pareto front is starred.
    """
    pools = [p for p in _POOLS if any(f.pool == p for f in result.figures)]
    headings = ["candidate", *(f"{pool} [{result.level:.0%}]" for pool in pools)]
    headings += ["pass^3", "tokens", "steps", "USD/task", "infra"]
    stars = {p.candidate: " *" for p in result.pareto if p.knee}
    rows = []
    for name in result.candidates:
        figures = [result.figure(name, pool) for pool in pools]
        rows.append([name + stars.get(name, ""), *_cells(figures)])
    return headings, rows


def render_table(result: EvaluationResult) -> Table:
    """The same as a rich table with a caption; the candidate with the best success on the last pool is bold."""
    table = Table(box=SIMPLE_HEAD, caption=_caption(result), caption_justify="left", padding=(0, 1, 0, 0))
    headings, rows = table_cells(result)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "candidate" else "right", no_wrap=True)
    pool = result.figures[-1].pool
    best = max(result.candidates, key=lambda c: result.figure(c, pool).success.mean)
    for candidate, row in zip(result.candidates, rows, strict=True):
        table.add_row(*row, style="bold" if candidate == best else None)
    return table


def plain_table(result: EvaluationResult, width: int = 100) -> str:
    """The same table as plain text of at most `width` columns, for logs and files."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render_table(result))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def percent(interval: Interval) -> str:
    """A share as "46.2 [41–51]", in percent."""
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.0f}–{100 * interval.high:.0f}]"


def _cells(rows: list[PoolFigures]) -> list[str]:
    last = rows[-1]
    hat = "–" if last.pass_hat_3 is None else f"{100 * last.pass_hat_3.mean:.1f}"
    return [
        *(percent(row.success) for row in rows),
        hat,
        f"{last.input_tokens + last.output_tokens:.0f}",
        f"{last.steps:.1f}",
        f"{last.cost.mean:.2e}",
        str(last.infra_failed),
    ]


def _caption(result: EvaluationResult) -> str:
    tasks = {f.pool: f.tasks for f in result.figures if f.pool != "mixed"}
    sizes = ", ".join(f"{n} {pool}" for pool, n in tasks.items())
    lines = [
        f"Success in percent on held-out tasks: {sizes}; {result.trials} trials each. "
        f"Last columns: pool {result.figures[-1].pool}, per episode; prices {result.prices['name']}."
    ]
    if any(p.knee for p in result.pareto):
        lines.append("* knee of the Pareto front.")
    return " ".join(lines)
