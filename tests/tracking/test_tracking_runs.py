"""Runs in a real sqlite store: flat candidates, nested stages, nothing twice, and failures that are only reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from occamy.contracts.evaluation import EvaluationResult
from occamy.contracts.lineage import LineageCard
from occamy.tracking.experiment import PARENT, Experiment, find_runs, join_experiment, open_experiment
from occamy.tracking.mlflow_runs import close_open_runs, log_candidate, log_stage, open_pipeline_run


def log_all(experiment: Experiment, cards: list[LineageCard], evaluation: EvaluationResult) -> list[str]:
    done = [
        log_candidate(experiment, "run-1", c, f"s3://bucket/{c.name}", evaluation=evaluation, params={"lr": 1e-3})
        for c in cards
    ]
    assert [d.problem for d in done] == [""] * len(cards)
    return [d.id for d in done]


def test_one_flat_run_per_candidate_with_everything_on_it(
    experiment: Experiment, cards: list[LineageCard], evaluation: EvaluationResult
) -> None:
    ids = log_all(experiment, cards, evaluation)
    client = experiment.client()
    runs = [client.get_run(i) for i in ids]
    assert [r.info.run_name for r in runs] == ["base", "marathon-sft", "marathon", "sprint", "soup", "sao"]
    assert all(PARENT not in r.data.tags and r.info.status == "FINISHED" for r in runs)
    assert len({frozenset(r.data.metrics) - {k for k in r.data.metrics if "minus" in k} for r in runs}) == 1

    soup = runs[4]
    assert soup.data.tags["occamy.stage"] == "merge"
    assert soup.data.tags["occamy.weights_digest"] == "sha256:w-soup"
    assert soup.data.tags["kfp.run_id"] == "run-1"
    assert soup.data.params == {"recipe_digest": "sha256:recipe", "seed": "3", "root": "sha256:w-base", "lr": "0.001"}
    metrics = soup.data.metrics
    assert metrics["long.success"] == pytest.approx(0.5)
    assert metrics["mixed.success.low"] == pytest.approx(0.45)
    assert metrics["short.output_tokens"] == 80
    assert metrics["mixed.success_minus_base"] == pytest.approx(0.4)
    assert metrics["pareto.score"] == pytest.approx(0.8)


def test_data_parents_and_card_are_linked(
    experiment: Experiment, cards: list[LineageCard], evaluation: EvaluationResult
) -> None:
    ids = dict(zip([c.name for c in cards], log_all(experiment, cards, evaluation), strict=True))
    client = experiment.client()
    sao = client.get_run(ids["sao"])
    data = {d.dataset.name: {t.key: t.value for t in d.tags} for d in sao.inputs.dataset_inputs}
    assert data["demonstrations"]["occamy.digest"] == cards[5].data["demonstrations"]
    assert data["held-out tasks"] == {"mlflow.data.context": "evaluation", "occamy.digest": "sha256:release"}

    made = {name: client.get_run(i).outputs.model_outputs[0].model_id for name, i in ids.items()}
    parents = {m.model_id for m in client.get_run(ids["soup"]).inputs.model_inputs}
    assert parents == {made["marathon"], made["sprint"]}
    model = client.get_logged_model(made["soup"])
    assert (str(model.status), model.tags["occamy.uri"]) == ("READY", "s3://bucket/soup")
    path = client.download_artifacts(ids["soup"], "lineage.json")
    assert json.loads(Path(path).read_text())["parent_names"] == ["marathon", "sprint"]


def test_a_resumed_run_adds_nothing_twice(
    experiment: Experiment, cards: list[LineageCard], evaluation: EvaluationResult
) -> None:
    first = log_all(experiment, cards, evaluation)
    assert log_all(experiment, cards, evaluation) == first
    client = experiment.client()
    assert len(client.search_runs([experiment.experiment_id])) == 6
    assert len(client.search_logged_models([experiment.experiment_id])) == 6
    assert len(client.get_metric_history(first[4], "long.success")) == 1
    assert len(client.get_run(first[4]).inputs.model_inputs) == 2
    assert log_candidate(experiment, "run-2", cards[0], "s3://bucket/base").id not in first


def test_stages_nest_under_the_pipeline_with_curves(experiment: Experiment) -> None:
    pipeline = open_pipeline_run(experiment, "run-1", {"recipe": "laptop"}).id
    curves = [{"step": s, "loss": 1 / s, "note": "text", "lr": float("nan")} for s in (1, 2, 3)]
    first = log_stage(experiment, "run-1", "sft", params={"lr": 0.001}, metrics={"seconds": 9.5}, curves=curves)
    assert log_stage(experiment, "run-1", "sft", params={"lr": 0.001}, metrics={"seconds": 9.5}, curves=curves) == first
    client = experiment.client()
    stage = client.get_run(first.id)
    assert stage.data.tags[PARENT] == pipeline
    history = client.get_metric_history(first.id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert set(stage.data.metrics) == {"loss", "seconds"}


def test_more_params_than_one_call_takes_are_all_logged(experiment: Experiment) -> None:
    params = {f"p{i:03d}": i for i in range(130)}
    run = log_stage(experiment, "run-1", "many", params=params)
    assert run.problem == ""
    assert experiment.client().get_run(run.id).data.params == {k: str(v) for k, v in params.items()}


def test_long_curves_go_in_several_batches(experiment: Experiment) -> None:
    curves = [{"step": s, "a": s, "b": -s} for s in range(700)]
    run = log_stage(experiment, "run-1", "sao", curves=curves)
    assert run.problem == ""
    assert len(experiment.client().get_metric_history(run.id, "b")) == 700


def test_an_injected_run_is_joined(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    injected = experiment.client().create_run(experiment.experiment_id, run_name="from the platform").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", injected)
    assert open_pipeline_run(experiment, "run-1", {}).id == injected
    stage = log_stage(experiment, "run-1", "sft").id
    assert experiment.client().get_run(stage).data.tags[PARENT] == injected


def test_exit_handler_closes_what_is_open_and_only_that(experiment: Experiment) -> None:
    open_pipeline_run(experiment, "run-1", {})
    other = open_pipeline_run(experiment, "run-2", {}).id
    done = log_stage(experiment, "run-1", "sft").id
    assert close_open_runs(experiment, "run-1", "FAILED").id == "pipeline-run-1"
    client = experiment.client()
    assert client.get_run(other).info.status == "RUNNING"
    assert client.get_run(done).info.status == "FINISHED"
    assert close_open_runs(experiment, "run-1", "FAILED").id == ""


def test_a_broken_store_is_reported_and_raises_nothing(
    unusable: Experiment, cards: list[LineageCard], caplog: pytest.LogCaptureFixture
) -> None:
    got = log_candidate(unusable, "run-1", cards[0], "s3://bucket/base")
    assert got.id == "" and got.problem.startswith(f"log_candidate on {unusable.uri}")
    assert "the stage goes on" in caplog.text
    experiment, problem = join_experiment(unusable.uri, "family")
    assert experiment is None and unusable.uri in problem
    assert log_stage(None, "run-1", "sft").problem == "tracking is off"


def test_an_experiment_is_opened_once_and_restored(store: str) -> None:
    first = open_experiment(store, "again")
    assert open_experiment(store, "again") == first
    first.client().delete_experiment(first.experiment_id)
    assert open_experiment(store, "again") == first
    assert find_runs(first, {"kfp.run_id": "none"}) == []
    with pytest.raises(ValueError, match="quote"):
        find_runs(first, {"kfp.run_id": "it's"})


def test_mlflow_is_not_imported_until_it_is_used() -> None:
    code = "import sys, occamy.tracking.mlflow_runs, occamy.tracking.promotion; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
