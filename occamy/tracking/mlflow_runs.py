"""Runs in MLflow: flat ones for candidates, nested ones for stages. Repeating a call adds nothing twice."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from occamy.contracts.evaluation import EvaluationResult, Interval
from occamy.contracts.lineage import NAME as CARD
from occamy.contracts.lineage import LineageCard
from occamy.tracking.experiment import (
    CANDIDATE,
    KIND,
    PARENT,
    RUN,
    STAGE,
    WEIGHTS,
    Experiment,
    find_runs,
    reported,
)

_BATCH = 1000
"""Metrics per log_batch call (MLflow's limit)."""
_PARAMS = 100
"""Params per log_batch call (MLflow's limit)."""
_DIGEST = 36
"""Characters of a dataset digest that MLflow keeps; the whole digest is a tag beside it."""


@reported
def log_candidate(
    experiment: Experiment,
    run: str,
    card: LineageCard,
    uri: str,
    *,
    evaluation: EvaluationResult | None = None,
    params: Mapping[str, str | int | float] | None = None,
) -> str:
    """Log one checkpoint as a flat run: params, evaluation figures, datasets, its card and an external model.

    `run` is the pipeline run's id. The model's parents are linked as inputs when they were logged before, so log
    candidates in the order of their making. Repeating the call finds the run by `run` and the card's name.
    """
    client = experiment.client()
    tags = {RUN: run, CANDIDATE: card.name, STAGE: card.stage, WEIGHTS: card.weights_digest, KIND: "candidate"}
    run_id = _run(experiment, card.name, tags, {RUN: run, CANDIDATE: card.name})
    fixed: dict[str, str | int | float] = {"recipe_digest": card.recipe_digest, "seed": card.seed, "root": card.root}
    _log(experiment, run_id, fixed | dict(params or {}), figures(evaluation, card.name) if evaluation else {})
    _link_datasets(experiment, run_id, card, evaluation)
    _link_model(experiment, run_id, card, uri)
    client.log_dict(run_id, card.model_dump(mode="json"), CARD)
    client.set_terminated(run_id, "FINISHED")
    return run_id


@reported
def log_stage(
    experiment: Experiment,
    run: str,
    stage: str,
    *,
    params: Mapping[str, str | int | float] | None = None,
    metrics: Mapping[str, float] | None = None,
    curves: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Log a stage as a run nested under the pipeline's run: params, final metrics and learning curves.

    `curves` are the lines of the stage's metrics.jsonl: numbers by name beside ``step``; other values are left out.
    """
    parent = _pipeline_run(experiment, run)
    tags = {RUN: run, STAGE: stage, KIND: "stage", PARENT: parent}
    run_id = _run(experiment, stage, tags, {RUN: run, KIND: "stage", STAGE: stage})
    _log(experiment, run_id, params or {}, metrics or {}, curves)
    experiment.client().set_terminated(run_id, "FINISHED")
    return run_id


@reported
def open_pipeline_run(experiment: Experiment, run: str, params: Mapping[str, str | int | float]) -> str:
    """Start the run that stages nest under; call it before they fan out. Joins MLFLOW_RUN_ID where one is set."""
    run_id = _pipeline_run(experiment, run)
    _log(experiment, run_id, params, {})
    return run_id


@reported
def close_open_runs(experiment: Experiment, run: str, status: str) -> str:
    """End whatever the pipeline run left open with FINISHED, FAILED or KILLED; for exit handlers.

    Returns their names.
    """
    client = experiment.client()
    closed = []
    for run_id in find_runs(experiment, {RUN: run}):
        found = client.get_run(run_id)
        if found.info.status == "RUNNING":
            client.set_terminated(run_id, status)
            closed.append(found.info.run_name)
    return ", ".join(closed)


def figures(evaluation: EvaluationResult, candidate: str) -> dict[str, float]:
    """All figures of one candidate as flat metric names: ``long.success``, ``long.success.low``, ``pareto.cost`` …"""
    flat: dict[str, float] = {}
    for row in evaluation.figures:
        if row.candidate == candidate:
            for name in type(row).model_fields:
                flat |= _flat(f"{row.pool}.{name}", getattr(row, name))
    for d in evaluation.differences:
        if d.candidate == candidate:
            flat |= _flat(f"{d.pool}.success_minus_{d.against}", d.success)
    for point in evaluation.pareto:
        if point.candidate == candidate:
            flat |= {"pareto.cost": point.cost, "pareto.score": point.score, "pareto.knee": float(point.knee)}
    return flat


def _flat(name: str, value: object) -> dict[str, float]:
    if isinstance(value, Interval):
        return {name: value.mean, f"{name}.low": value.low, f"{name}.high": value.high}
    return {name: float(value)} if isinstance(value, int | float) else {}


def _run(experiment: Experiment, name: str, tags: Mapping[str, str], key: Mapping[str, str]) -> str:
    """The run that carries the tags `key`, created with `tags` when there is none."""
    found = find_runs(experiment, key)
    if found:
        return found[0]
    run = experiment.client().create_run(experiment.experiment_id, run_name=name, tags=dict(tags))
    return str(run.info.run_id)


def _pipeline_run(experiment: Experiment, run: str) -> str:
    injected = os.environ.get("MLFLOW_RUN_ID")
    if injected:
        experiment.client().set_tag(injected, RUN, run)
        return injected
    tags = {RUN: run, KIND: "pipeline"}
    return _run(experiment, f"pipeline-{run}", tags, {RUN: run, KIND: "pipeline"})


def _log(
    experiment: Experiment,
    run_id: str,
    params: Mapping[str, str | int | float],
    metrics: Mapping[str, float],
    curves: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Log params and metrics in batches. Times follow from the run's start and the step: repeats fall together."""
    from mlflow.entities import Metric, Param

    client = experiment.client()
    start = client.get_run(run_id).info.start_time
    rows = [Metric(k, v, start + step, step) for k, v, step in _points(curves)]
    rows += [Metric(k, float(v), start, 0) for k, v in metrics.items() if math.isfinite(v)]
    settings = [Param(k, str(v)) for k, v in params.items()]
    for at in range(0, len(settings), _PARAMS):
        client.log_batch(run_id, params=settings[at : at + _PARAMS])
    for at in range(0, len(rows), _BATCH):
        client.log_batch(run_id, metrics=rows[at : at + _BATCH])


def _points(curves: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float, int]]:
    for position, row in enumerate(curves):
        step = int(row.get("step", position))
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                yield name, float(value), step


def _link_datasets(experiment: Experiment, run_id: str, card: LineageCard, evaluation: EvaluationResult | None) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    used = [(role, digest, "training") for role, digest in sorted(card.data.items())]
    if evaluation is not None:
        used.append(("held-out tasks", evaluation.release, "evaluation"))
    inputs = [
        DatasetInput(
            Dataset(
                name=name,
                digest=digest.removeprefix("sha256:")[:_DIGEST],
                source_type="manifest",
                source=json.dumps({"digest": digest}),
            ),
            [InputTag("mlflow.data.context", context), InputTag("occamy.digest", digest)],
        )
        for name, digest, context in used
    ]
    if inputs:
        experiment.client().log_inputs(run_id, datasets=inputs)


def _link_model(experiment: Experiment, run_id: str, card: LineageCard, uri: str) -> None:
    """Make the external model of this run, and link it as output and its parents' models as inputs."""
    from mlflow.entities import LoggedModelInput, LoggedModelOutput

    client = experiment.client()
    if not client.get_run(run_id).outputs.model_outputs:
        tags = {WEIGHTS: card.weights_digest, "occamy.uri": uri, STAGE: card.stage, "mlflow.model.isExternal": "true"}
        found = client.search_logged_models([experiment.experiment_id], filter_string=f"source_run_id = '{run_id}'")
        model = (
            found[0]
            if found
            else client.create_logged_model(
                experiment.experiment_id, name=card.name, source_run_id=run_id, tags=tags, model_type="checkpoint"
            )
        )
        client.finalize_logged_model(model.model_id, "READY")
        client.log_outputs(run_id, models=[LoggedModelOutput(model.model_id, 0)])
    parents = [m for digest in card.parents for m in _models(experiment, digest)[:1]]
    linked = {m.model_id for m in client.get_run(run_id).inputs.model_inputs}
    if new := [LoggedModelInput(m) for m in parents if m not in linked]:
        client.log_inputs(run_id, models=new)


def _models(experiment: Experiment, digest: str) -> list[str]:
    """Ids of the logged models with these weights, newest first."""
    found = experiment.client().search_logged_models(
        [experiment.experiment_id],
        filter_string=f"tags.`{WEIGHTS}` = '{digest}'",
        order_by=[{"field_name": "creation_timestamp", "ascending": False}],
    )
    return [str(m.model_id) for m in found]
