"""`occamy learning-table`: the recipe under several seeds, judged on the whole test pool, as JSON and as a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from occamy import __version__
from occamy.cli.running import run_recipe
from occamy.contracts.evaluation import EvaluationPool, EvaluationResult, PoolFigures
from occamy.contracts.manifest import write_atomic
from occamy.recipe import load_recipe, profile_names
from occamy.stages.names import BASE, EVALUATION, MARATHON, MARATHON_SFT, SAO, SOUP, SPRINT, STAGES
from occamy.storage.rundir import RunDirectory


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register learning-table."""
    parser = commands.add_parser(
        "learning-table",
        help="run a profile under several seeds, judge all checkpoints on the test pool",
        description="Run a profile under several seeds, evaluate every checkpoint on the test tasks of both pools, and "
        "write success with intervals by seed and over seeds. Runs that are finished are not done again.",
        epilog="example: occamy learning-table --seeds 1 2 3 --write docs/results/learning-laptop.json",
    )
    parser.add_argument("--profile", default="laptop", metavar="NAME|FILE", help=f"one of {', '.join(profile_names())}")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key of the recipe; may be repeated",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    parser.add_argument("--tasks", type=int, default=256, metavar="N", help="test tasks per pool (default: 256)")
    parser.add_argument("--trials", type=int, default=3, metavar="K", help="attempts per task, for pass^3 (default: 3)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="holds DIR/table-PROFILE-SEED (default: runs)"
    )
    parser.add_argument("--write", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.set_defaults(handler=learning_command)


def learning_command(args: argparse.Namespace) -> int:
    """Run, write, print. Every seed reads the test pool once, in its run's own evaluation stage."""
    from occamy.evaluation.stage import read_result

    console = Console()
    results: dict[int, EvaluationResult] = {}
    seconds: dict[int, dict[str, float]] = {}
    larger = [f"evaluation.tasks={args.tasks}", f"evaluation.trials={args.trials}"]
    for seed in args.seeds:
        recipe = load_recipe(args.profile, [*args.set, *larger], seed)
        run = RunDirectory(args.out / f"table-{recipe.name}-{seed}")
        with run.lock() as lock:
            run_recipe(run, recipe, lock, console)
            seconds[seed] = {name: float(run.record(name).facts["seconds"]) for name in STAGES[1:]}
            results[seed] = read_result(run.stage(EVALUATION))
    table = learning_table(results)
    table |= {"recipe": [args.profile, *args.set], "version": __version__, "stage_seconds": seconds}
    write_atomic(args.write, json.dumps(table, indent=1).encode() + b"\n")
    print(as_text(table))
    print(args.write)
    return 0


def learning_table(results: Mapping[int, EvaluationResult]) -> dict[str, Any]:
    """Rows (one per seed, candidate and pool), paired differences on the mixed pool, and which arrows hold."""
    rows = [{"seed": seed, **_row(f)} for seed, result in results.items() for f in result.figures]
    differences = [
        {"seed": seed, "candidate": d.candidate, "against": d.against, **d.success.model_dump(), "p_value": d.p_value}
        for seed, result in results.items()
        for d in result.differences
        if d.pool == "mixed"
    ]
    held = {str(seed): arrows(result) for seed, result in results.items()}
    return {"rows": rows, "differences_mixed": differences, "arrows": held}


def _row(f: PoolFigures) -> dict[str, Any]:
    return {
        "candidate": f.candidate,
        "pool": f.pool,
        "n": f.tasks,
        "success": f.success.mean,
        "low": f.success.low,
        "high": f.success.high,
        "partial": f.partial.mean,
        "pass_hat_3": f.pass_hat_3.mean if f.pass_hat_3 else None,
        "gap": f.gap,
        "tokens": f.input_tokens + f.output_tokens,
        "output_tokens": f.output_tokens,
        "steps": f.steps,
        "timeouts": f.timeouts,
        "segments": f.segments,
        "cost": f.cost.mean,
    }


def arrows(result: EvaluationResult) -> dict[str, bool]:
    """Which claims about learning hold in one evaluation of all six candidates; "tied" means the interval covers 0."""

    def success(name: str, pool: EvaluationPool) -> float:
        return result.figure(name, pool).success.mean

    def no_worse(name: str, other: str, pool: EvaluationPool) -> bool:
        """Ahead, or behind within the interval of the paired difference (compared later minus earlier)."""
        order = result.candidates
        if order.index(name) > order.index(other):
            return result.difference(name, other, pool).success.high >= 0
        return result.difference(other, name, pool).success.low <= 0

    first, last = result.figure(BASE, "mixed"), result.figure(SAO, "mixed")
    gain = result.difference(SAO, BASE, "mixed").success
    before, after = result.figure(MARATHON_SFT, "long"), result.figure(MARATHON, "long")
    fewer_steps = after.steps <= 0.9 * before.steps and no_worse(MARATHON, MARATHON_SFT, "long")
    worse_parent = min(success(MARATHON, "mixed"), success(SPRINT, "mixed"))
    better_parent = max(success(MARATHON, "mixed"), success(SPRINT, "mixed"))
    return {
        "sao beats base by 15 points, mixed": gain.mean >= 0.15 and gain.low > 0,
        "marathon-sft beats base, long": success(MARATHON_SFT, "long") > success(BASE, "long"),
        "sprint beats base, short": success(SPRINT, "short") > success(BASE, "short"),
        "hdpo beats its sft parent, or takes 10% fewer steps, long": after.success.mean > before.success.mean
        or fewer_steps,
        "marathon best or tied, long": no_worse(MARATHON, SPRINT, "long"),
        "sprint best or tied, short": no_worse(SPRINT, MARATHON, "short"),
        "soup above the worse parent, mixed": success(SOUP, "mixed") > worse_parent,
        "soup above both parents, mixed": success(SOUP, "mixed") > better_parent,
        "sao above soup, mixed": success(SAO, "mixed") > success(SOUP, "mixed"),
        "sao above both experts, mixed": success(SAO, "mixed") > better_parent,
        "smaller gap of avg and pass^3, mixed": last.gap is not None and first.gap is not None and last.gap < first.gap,
        "fewer tokens per episode, mixed": last.input_tokens + last.output_tokens
        < first.input_tokens + first.output_tokens,
        "fewer timeouts, mixed": last.timeouts < first.timeouts,
    }


def as_text(table: Mapping[str, Any]) -> str:
    """The rows by seed and candidate, then every arrow with the seeds under which it holds."""
    lines = [f"{'seed':<5}{'candidate':<14}{'pool':<7}{'n':>4}{'success':>26}{'partial':>9}{'pass^3':>8}{'gap':>7}"
             f"{'tokens':>8}{'steps':>7}{'timeouts':>10}"]  # fmt: skip
    for r in table["rows"]:
        success = f"{r['success']:.1%} ({r['low']:.1%} to {r['high']:.1%})"
        hat, gap = ("-" if r[k] is None else f"{r[k]:.1%}" for k in ("pass_hat_3", "gap"))
        lines.append(
            f"{r['seed']:<5}{r['candidate']:<14}{r['pool']:<7}{r['n']:>4}{success:>26}{r['partial']:>9.1%}{hat:>8}{gap:>7}"
            f"{r['tokens']:>8.0f}{r['steps']:>7.2f}{r['timeouts']:>10.1%}"
        )
    held = table["arrows"]
    for claim in next(iter(held.values())):
        seeds = [seed for seed in held if held[seed][claim]]
        lines.append(f"{claim}: holds for {len(seeds)} of {len(held)} seeds ({', '.join(seeds) or 'none'})")
    return "\n".join(lines)
