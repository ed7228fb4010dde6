"""Every stage on its own, in a run directory: synth, admit, rollout, train, merge, eval, and the report."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from occamy.cli.harness_commands import add_rollout_options, rollout_command
from occamy.cli.options import add_out_option, add_recipe_options, existing_run, recipe_of, run_directory_of
from occamy.cli.screen import RunScreen
from occamy.recipe import Recipe
from occamy.stages import names
from occamy.stages.context import Context, StageResult
from occamy.storage.rundir import RunDirectory, RunDirectoryError

_COMMAND = {
    names.SYNTHESIS: "synth",
    names.ADMISSION: "admit",
    names.DEMONSTRATIONS: "rollout",
    names.MARATHON_SFT: "train sft",
    names.SPRINT: "train sft --candidate sprint",
    names.MARATHON: "train hdpo",
    names.SOUP: "merge",
    names.SAO: "train sao",
    names.EVALUATION: "eval",
}
"""Stage -> command that makes it, for the message that it is missing."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the stage commands."""
    _add(commands, "synth", _synth, "author task packages")
    _add(commands, "admit", _admit, "admit tasks through the gates, seal the release")
    rollout = _add(commands, "rollout", _rollout, "record demonstrations of the training tasks")
    add_rollout_options(rollout)
    train = commands.add_parser("train", help="train one expert or the final checkpoint")
    kinds = train.add_subparsers(dest="kind", metavar="KIND", required=True)
    sft = _add(kinds, "sft", _sft, "fine-tune on demonstrations")
    sft.add_argument(
        "--candidate",
        choices=(names.MARATHON_SFT, names.SPRINT),
        default=names.MARATHON_SFT,
        help="marathon-sft: long-horizon pool (default); sprint: short-horizon pool",
    )
    _add(kinds, "hdpo", _hdpo, "reinforcement learning of the Marathon expert")
    _add(kinds, "sao", _sao, "final reinforcement learning of the soup")
    _add(commands, "merge", _merge, "average the two experts")
    _add(commands, "eval", _eval, "evaluate all checkpoints on held-out tasks")
    report = commands.add_parser(
        "report",
        help="write report.html from what a run has so far",
        description="Write one self-contained page from the stages that a run has finished so far.",
        epilog="example: occamy report runs/laptop-1",
    )
    report.add_argument("run_dir", type=Path, metavar="DIR", help="a run directory")
    report.set_defaults(handler=_report)


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    stage: Callable[[Context, argparse.Namespace], StageResult],
    help_: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=help_,
        description=f"{help_[0].upper()}{help_[1:]}, in a run directory, where earlier stages lie and later ones look. "
        "A directory that exists brings its own recipe and seed.",
    )
    add_recipe_options(parser)
    add_out_option(parser)

    def handler(args: argparse.Namespace) -> int:
        if name == "rollout" and args.harness is not None:
            return rollout_command(args)
        return _run_one(args, stage)

    parser.set_defaults(handler=handler)
    return parser


def _run_one(args: argparse.Namespace, stage: Callable[[Context, argparse.Namespace], StageResult]) -> int:
    run, recipe = _open(args)
    with run.lock():
        run.open(recipe, recipe.name, recipe.digest(), recipe.seed)
        with RunScreen(run, names.STAGES, Console()):
            result = stage(Context(recipe, run), args)
    print(result.path)
    return 0


def _open(args: argparse.Namespace) -> tuple[RunDirectory, Recipe]:
    """An existing directory by its own recipe, unless options ask for one; else a new one."""
    asked = args.set or args.seed is not None or args.profile is not None
    if args.out is not None and not asked and RunDirectory(args.out).info() is not None:
        return existing_run(args.out)
    recipe = recipe_of(args)
    return run_directory_of(args, recipe), recipe


def _made(ctx: Context, stage: str) -> str:
    """Folder of a finished stage. Raises RunDirectoryError naming the command that makes it."""
    if not ctx.run.has_finished(stage):
        raise RunDirectoryError(
            f"{ctx.run.path}: stage {stage} has not finished; run `occamy {_COMMAND[stage]} --out {ctx.run.path}` first"
        )
    return str(ctx.run.stage(stage))


def _synth(ctx: Context, args: argparse.Namespace) -> StageResult:
    from occamy.stages import data

    return data.synthesis(ctx)


def _admit(ctx: Context, args: argparse.Namespace) -> StageResult:
    from occamy.stages import data

    return data.admission(ctx, _made(ctx, names.SYNTHESIS))


def _rollout(ctx: Context, args: argparse.Namespace) -> StageResult:
    from occamy.stages import data

    return data.demonstrations(ctx, _made(ctx, names.ADMISSION))


def _sft(ctx: Context, args: argparse.Namespace) -> StageResult:
    from occamy.stages import train

    return train.sft(ctx, args.candidate, _made(ctx, names.DEMONSTRATIONS))


def _hdpo(ctx: Context, args: argparse.Namespace) -> StageResult:
    from occamy.stages import train

    return train.hdpo(ctx, _made(ctx, names.MARATHON_SFT), _made(ctx, names.ADMISSION))


def _sao(ctx: Context, args: argparse.Namespace) -> StageResult:
    from occamy.stages import train

    return train.sao(ctx, _made(ctx, names.SOUP), _made(ctx, names.ADMISSION))


def _merge(ctx: Context, args: argparse.Namespace) -> StageResult:
    from occamy.stages import train

    return train.soup(ctx, _made(ctx, names.MARATHON), _made(ctx, names.SPRINT))


def _eval(ctx: Context, args: argparse.Namespace) -> StageResult:
    from occamy.stages import judge

    made = {name: _made(ctx, name) for name in names.CANDIDATES if name != names.BASE}
    return judge.evaluation(ctx, _made(ctx, names.ADMISSION), made)


def _report(args: argparse.Namespace) -> int:
    from occamy.stages import judge

    run, _ = existing_run(args.run_dir)
    print(judge.report(run))
    return 0
