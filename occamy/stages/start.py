"""Preflight: one resolved recipe for all stages, checks that report everything at once, and the tracking run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import occamy
from occamy.contracts.lineage import read_card
from occamy.preflight import base_folder, require
from occamy.recipe import Recipe, load_recipe
from occamy.stages.context import end_with_owner
from occamy.stages.names import PREFLIGHT
from occamy.storage.progress import Progress
from occamy.storage.rundir import RunDirectory
from occamy.tracking.experiment import join_experiment
from occamy.tracking.mlflow_runs import open_pipeline_run

_KNOBS: dict[str, tuple[str, ...]] = {
    "train_tasks": ("synthesis.train.long", "synthesis.train.short"),
    "sft_epochs": ("marathon_sft.epochs", "sprint.epochs"),
    "hdpo_steps": ("hdpo.steps",),
    "hdpo_efficiency_weight": ("hdpo.w_eff",),
    "sao_steps": ("sao.steps",),
    "evaluation_tasks": ("evaluation.tasks",),
    "evaluation_trials": ("evaluation.trials",),
    "promotion_margin": ("promotion.margin",),
}
"""Plain knob of the pipeline -> recipe keys that it sets."""
_KEEP = {"hdpo_efficiency_weight": -1.0, "promotion_margin": -1.0}
"""Value by which a knob says "as in the recipe"; 0 for the others."""


@dataclass(frozen=True)
class Resolved:
    """What preflight hands to the other tasks."""

    recipe: str
    """The resolved recipe as JSON."""
    code: str
    """Digest of the installed library."""


def preflight(recipe: str, run_dir: str, seed: int, knobs: Mapping[str, float], overrides: str) -> Resolved:
    """Resolve the recipe, check this machine and the run directory, open tracking.

    Raises RecipeError, RunDirectoryError or PreflightError; the last lists every failed check.
    """
    end_with_owner()
    run = RunDirectory(Path(run_dir))
    progress = Progress(run.path, PREFLIGHT)
    progress.state("started")
    try:
        resolved = load_recipe(recipe, [*knob_overrides(knobs), *_lines(overrides)], seed)
        require(resolved, run.path)
        run.open(resolved, resolved.name, resolved.digest(), resolved.seed)
        run.pin_base(read_card(base_folder(resolved)).weights_digest)
        note = _open_tracking(run, resolved)
    except (ValueError, RuntimeError, OSError) as e:
        progress.state("failed", str(e))
        raise
    progress.state("finished", note or f"recipe {resolved.name} {resolved.digest()[7:15]}")
    return Resolved(resolved.model_dump_json(), code_digest())


def knob_overrides(knobs: Mapping[str, float]) -> list[str]:
    """Knobs that differ from "as in the recipe", as key=value overrides. Whole numbers may come as floats from KFP."""
    overrides = []
    for name, value in knobs.items():
        if value < 0 if name in _KEEP else value == 0:
            continue
        text = f"{value:g}" if name in _KEEP else f"{int(value)}"
        overrides += [f"{key}={text}" for key in _KNOBS[name]]
    return overrides


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def code_digest() -> str:
    """Digest over the library's source files: equal code gives an equal digest wherever it is installed."""
    root = Path(occamy.__file__).parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"sha256:{total.hexdigest()}"


def _open_tracking(run: RunDirectory, recipe: Recipe) -> str:
    """Make the tracking schema before stages write to it. Returns a note when tracking does not work."""
    _make_database(run, recipe)
    experiment, problem = join_experiment(run.tracking_uri, recipe.family)
    params: dict[str, str | int | float] = {
        "recipe": recipe.name,
        "recipe_digest": recipe.digest(),
        "seed": recipe.seed,
        "version": occamy.__version__,
    }
    logged = open_pipeline_run(experiment, run.run_id, params)
    return f"tracking is off: {problem or logged.problem}" if problem or logged.problem else ""


def _make_database(run: RunDirectory, recipe: Recipe) -> None:
    """Lay MLflow's schema into a file beside its place, then rename it: a kill leaves no half schema."""
    place = run.path / "mlflow.db"
    if place.exists():
        return
    for partial in run.path.glob(".mlflow.*"):
        partial.unlink()
    fresh = run.path / f".mlflow.{os.getpid()}.db"
    _, problem = join_experiment(f"sqlite:///{fresh}", recipe.family)
    if not problem:
        os.replace(fresh, place)
