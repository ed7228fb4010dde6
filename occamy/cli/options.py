"""Options that several commands share, and how a command gets its recipe and run directory from them."""

from __future__ import annotations

import argparse
from pathlib import Path

from occamy.recipe import Recipe, load_recipe, profile_names
from occamy.storage.rundir import RunDirectory, RunDirectoryError


def add_recipe_options(parser: argparse.ArgumentParser) -> None:
    """--profile, --set, --seed."""
    parser.add_argument(
        "--profile",
        metavar="NAME|FILE",
        help=f"recipe: {', '.join(profile_names())}, or a YAML file (default: laptop)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key of the recipe, for example --set sao.steps=10; may be repeated",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of everything random (default: the recipe's)")


def count(text: str) -> int:
    """Type of an option that counts something: a whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; give 1 or more")
    return number


def port(text: str) -> int:
    """Type of an option that names a TCP port; 0 takes a free one."""
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port; give 0 to 65535")
    return number


def add_out_option(parser: argparse.ArgumentParser) -> None:
    """--out."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="run directory (default: runs/PROFILE-SEED)")


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The recipe that the options describe."""
    return load_recipe(args.profile if args.profile is not None else "laptop", args.set, args.seed)


def run_directory_of(args: argparse.Namespace, recipe: Recipe) -> RunDirectory:
    """The run directory that the options name, not yet made."""
    return RunDirectory(args.out if args.out is not None else Path("runs") / f"{recipe.name}-{recipe.seed}")


def existing_run(path: Path) -> tuple[RunDirectory, Recipe]:
    """Open a run directory that a run made. Raises RunDirectoryError when it is none."""
    run = RunDirectory(path)
    if run.info() is None:
        raise RunDirectoryError(f"{path}: no run directory (no run.json); start one with `occamy run --out {path}`")
    return run, Recipe.model_validate_json((run.path / "recipe.json").read_bytes())
