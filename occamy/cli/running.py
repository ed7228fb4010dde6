"""`occamy run` and `occamy doctor`: the whole recipe on this machine, and what would keep it from working."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from occamy.cli.options import add_out_option, add_recipe_options, existing_run, recipe_of, run_directory_of
from occamy.cli.screen import RunScreen
from occamy.preflight import inspect
from occamy.recipe import Recipe
from occamy.stages.context import OWNER
from occamy.stages.names import EVALUATION, STAGES
from occamy.storage.progress import ProgressEvent
from occamy.storage.rundir import RunDirectory

_ERROR = re.compile(r"\s+[\w.]+(Error|Exception|Failed|Stopped|Busy): ")
"""Last line of a traceback inside a task: KFP indents what tasks print."""


class RunFailed(RuntimeError):
    """A stage failed: names the stage, its message and its log."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register run and doctor."""
    run = commands.add_parser(
        "run",
        help="run the whole recipe on this machine",
        description="Run the whole recipe on this machine: the pipeline that a cluster runs, one process per stage. "
        "A run that was stopped, by whatever, goes on with --resume; finished stages are not done again.",
        epilog="example: occamy run --profile laptop --seed 2 --set hdpo.efficiency_weight=0",
    )
    add_recipe_options(run)
    where = run.add_mutually_exclusive_group()
    add_out_option(where)  # type: ignore[arg-type]
    where.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on with the run in DIR, by its own recipe and seed"
    )
    run.set_defaults(handler=run_command)
    doctor = commands.add_parser(
        "doctor",
        help="check this machine and a recipe, all findings at once",
        description="Check packages, disk, base weights, tracking database and run directory. Exit code 1 on failure.",
    )
    add_recipe_options(doctor)
    add_out_option(doctor)
    doctor.set_defaults(handler=doctor_command)


def doctor_command(args: argparse.Namespace) -> int:
    """Print every finding; 1 when one is bad."""
    recipe = recipe_of(args)
    findings = inspect(recipe, run_directory_of(args, recipe).path)
    console = Console()
    for finding in findings:
        mark = "[green]ok  [/]" if finding.ok else "[red]FAIL[/]"
        console.print(f"{mark} {finding.check:<18}", end="")
        console.print(finding.detail, markup=False, highlight=False, soft_wrap=True)
    bad = sum(not f.ok for f in findings)
    console.print(f"{bad} of {len(findings)} checks failed" if bad else "ready: occamy run")
    return 1 if bad else 0


def run_command(args: argparse.Namespace) -> int:
    """Run or resume, show progress, print results."""
    if args.resume is not None:
        run, recipe = existing_run(args.resume)
    else:
        recipe = recipe_of(args)
        run = run_directory_of(args, recipe)
    console = Console()
    with run.lock() as lock:
        seconds = run_recipe(run, recipe, lock, console)
        _print_results(run, console, seconds)
    return 0


def run_recipe(run: RunDirectory, recipe: Recipe, lock: int, console: Console) -> float:
    """Run the pipeline on a locked run directory to its end. Returns the seconds it took. Raises RunFailed."""
    run.open(recipe, recipe.name, recipe.digest(), recipe.seed)
    console.print(f"recipe {recipe.name}, seed {recipe.seed}, directory {run.path}", highlight=False, soft_wrap=True)
    started = time.monotonic()
    _run_pipeline(run, lock, console)
    return time.monotonic() - started


def _run_pipeline(run: RunDirectory, lock: int, console: Console) -> None:
    """Start the pipeline process and show its progress until it ends. Raises RunFailed."""
    log = run.log("pipeline")
    scratch = run.work("tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    environment = {
        **os.environ,
        OWNER: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # two threads on a busy box are slower than one
        "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch),  # KFP and torchrun leave folders behind
    }
    with log.open("wb") as output, RunScreen(run, STAGES, console) as screen:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelines.local", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(lock,),
            start_new_session=True,
        )
        try:
            code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    shutil.rmtree(scratch, ignore_errors=True)
    if code != 0:
        raise RunFailed(_failure(run, screen.failures, log))


def _failure(run: RunDirectory, failures: list[ProgressEvent], log: Path) -> str:
    go_on = f"after fixing it: occamy run --resume {run.path}"
    if failures:
        return f"stage {failures[0].stage} failed: {failures[0].figure}\n  log: {log}\n  {go_on}"
    errors = [line.strip() for line in log.read_text(errors="replace").splitlines() if _ERROR.match(line)]
    return f"the pipeline ended early: {errors[-1] if errors else 'no error in its log'}\n  log: {log}\n  {go_on}"


def _print_results(run: RunDirectory, console: Console, seconds: float) -> None:
    from occamy.evaluation.stage import read_result
    from occamy.evaluation.table import plain_table, render_table
    from occamy.stages.judge import read_decision

    result = read_result(run.stage(EVALUATION))
    console.print(render_table(result)) if console.is_terminal else print(plain_table(result))
    console.print(read_decision(run).reason, highlight=False)
    console.print(f"took     {seconds / 60:.1f} min", highlight=False)
    console.print(f"report   {run.path / 'report.html'}", highlight=False, soft_wrap=True)
    console.print(f"compare  occamy ui {run.path}", highlight=False, soft_wrap=True)
