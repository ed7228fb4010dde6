"""Stages that judge: evaluation of all candidates, promotion of the final one, and the closing of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from occamy.contracts.evaluation import EvaluationResult
from occamy.contracts.lineage import read_card
from occamy.contracts.manifest import verify, write_atomic
from occamy.contracts.record import canonical_json
from occamy.evaluation.stage import KIND, evaluate, read_result
from occamy.preflight import base_folder
from occamy.recipe import Recipe
from occamy.report.build import write_report
from occamy.report.inputs import PROMOTION as PROMOTED
from occamy.report.inputs import collect
from occamy.stages.context import Context, Facts, Made, StageResult, end_with_owner, run_stage
from occamy.stages.names import BASE, CANDIDATES, EVALUATION, PROMOTION
from occamy.storage.progress import Progress
from occamy.storage.rundir import RunDirectory
from occamy.tracking.experiment import Logged, join_experiment
from occamy.tracking.mlflow_runs import close_open_runs, log_candidate
from occamy.tracking.promotion import PromotionDecision, apply_decision, decide

_STATUS = {"SUCCEEDED": "FINISHED", "FAILED": "FAILED", "CANCELLED": "KILLED"}
"""How a KFP pipeline ended -> how MLflow says it."""


def evaluation(
    ctx: Context,
    release: str,
    candidates: Mapping[str, str],
) -> StageResult:
    """Evaluate the base and `candidates` (name -> checkpoint folder) on held-out tasks, and log them to MLflow."""
    config = ctx.recipe.evaluation
    folders = {BASE: base_folder(ctx.recipe)} | {n: Path(candidates[n]) for n in CANDIDATES if n in candidates}

    def body(out: Path, progress: Progress) -> Made:
        logs = ctx.run.log(EVALUATION).parent
        result = evaluate(
            folders,
            Path(release),
            out,
            config,
            seed=ctx.recipe.seed,
            rollout=ctx.recipe.rollout,
            log=logs,
            on_progress=progress,
        )
        _log_candidates(ctx, folders, result)
        return Made(verify(out, KIND).digest(), _headline(result))

    def inputs() -> dict[str, Any]:
        return {
            "config": config.digest(),
            "rollout": ctx.recipe.rollout.digest(),
            "release": verify(Path(release), "task_release").digest(),
            "candidates": {n: read_card(folder).weights_digest for n, folder in folders.items()},
        }

    return run_stage(ctx, EVALUATION, inputs, body)


def promotion(ctx: Context, results: str, model: str) -> StageResult:
    """Decide by the evaluation in folder `results` whether the final checkpoint becomes the champion; register it."""
    rule = ctx.recipe.promotion

    def body(out: Path, progress: Progress) -> Made:
        decision = decide(read_result(Path(results)), rule.margin, rule.against, rule.candidate)
        write_atomic(out / PROMOTED, canonical_json(decision))
        experiment, _ = join_experiment(ctx.run.tracking_uri, ctx.recipe.family)
        _report(apply_decision(experiment, ctx.run.run_id, decision))
        facts: Facts = {"decision": "promoted" if decision.promoted else "not promoted", "reason": decision.reason}
        return Made(decision.digest(), facts)

    def inputs() -> dict[str, Any]:
        return {
            "rule": rule.digest(),
            "results": verify(Path(results), KIND).digest(),
            "model": read_card(Path(model)).weights_digest,
        }

    return run_stage(ctx, PROMOTION, inputs, body)


def closing(run_dir: str, state: str) -> Path:
    """End what tracking has open and write the report, however the run ended. Returns the report's path."""
    end_with_owner()
    run = RunDirectory(Path(run_dir))
    experiment, _ = join_experiment(run.tracking_uri, recipe_of(run).family)
    _report(close_open_runs(experiment, run.run_id, _STATUS.get(state, "FAILED")))
    return report(run, state)


def report(run: RunDirectory, state: str = "") -> Path:
    """Write the run's report from what there is so far, and return its path."""
    base = base_folder(recipe_of(run))
    inputs = collect(run.path, state=state, base=base, mlflow=f"occamy ui {run.path}")
    return write_report(inputs, run.path / "report.html")


def recipe_of(run: RunDirectory) -> Recipe:
    """The recipe that a run directory was made by."""
    return Recipe.model_validate_json((run.path / "recipe.json").read_bytes())


def read_decision(run: RunDirectory) -> PromotionDecision:
    """The promotion decision of a finished run."""
    return PromotionDecision.model_validate_json((run.stage(PROMOTION) / PROMOTED).read_bytes())


def _log_candidates(ctx: Context, folders: Mapping[str, Path], result: EvaluationResult) -> None:
    """One flat run per candidate, in the order of their making, so that parents exist before their children."""
    experiment, _ = join_experiment(ctx.run.tracking_uri, ctx.recipe.family)
    for folder in folders.values():
        _report(log_candidate(experiment, ctx.run.run_id, read_card(folder), folder.as_uri(), evaluation=result))


def _report(logged: Logged) -> None:
    if logged.problem:
        print(f"tracking: {logged.problem}")


def _headline(result: EvaluationResult) -> Facts:
    """Mixed success of every candidate."""
    return {name: result.figure(name, "mixed").success.mean for name in result.candidates}
