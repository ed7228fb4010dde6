"""The DAG as compiled: tasks, edges, caching, knobs. No golden file: what matters is said here."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from occamy.stages.start import _KNOBS
from pipelines.compiled import write_ir


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("ir") / "post_training.yaml"
    write_ir(path)
    return dict(next(yaml.safe_load_all(path.read_text())))


@pytest.fixture(scope="module")
def tasks(spec: dict[str, Any]) -> dict[str, Any]:
    return dict(spec["components"]["comp-exit-handler-1"]["dag"]["tasks"])


def test_is_a_valid_pipeline_spec(spec: dict[str, Any]) -> None:
    json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())


def test_has_every_stage_of_the_recipe(tasks: dict[str, Any]) -> None:
    assert set(tasks) == {
        *("preflight", "synthesis", "admission", "rollout", "sft", "hdpo"),
        *("sft-2", "soup", "sao", "evaluation", "promotion"),
    }
    names = {name: task["taskInfo"]["name"] for name, task in tasks.items()}
    assert (names["sft"], names["sft-2"]) == ("marathon-sft", "sprint-sft")
    candidates = [tasks[t]["inputs"]["parameters"]["candidate"]["runtimeValue"]["constant"] for t in ("sft", "sft-2")]
    assert candidates == ["marathon-sft", "sprint"]


@pytest.mark.parametrize(
    ("task", "artifacts"),
    [
        ("admission", {"tasks": "synthesis"}),
        ("rollout", {"release": "admission"}),
        ("sft", {"demonstrations": "rollout"}),
        ("hdpo", {"start": "sft", "release": "admission"}),
        ("sft-2", {"demonstrations": "rollout"}),
        ("soup", {"marathon": "hdpo", "sprint": "sft-2"}),
        ("sao", {"start": "soup", "release": "admission"}),
        (
            "evaluation",
            {
                "release": "admission",
                "marathon_sft": "sft",
                "marathon": "hdpo",
                "sprint": "sft-2",
                "soup": "soup",
                "sao": "sao",
            },
        ),
        ("promotion", {"results": "evaluation", "model": "sao"}),
    ],
)
def test_artifacts_flow_along_the_recipe(tasks: dict[str, Any], task: str, artifacts: dict[str, str]) -> None:
    inputs = tasks[task]["inputs"]["artifacts"]
    assert {k: v["taskOutputArtifact"]["producerTask"] for k, v in inputs.items()} == artifacts


def test_only_deterministic_stages_are_cached(tasks: dict[str, Any]) -> None:
    cached = {name for name, task in tasks.items() if task["cachingOptions"].get("enableCache", False)}
    assert cached == {"synthesis", "admission", "soup", "evaluation"}


def test_a_cached_stage_depends_on_the_code_and_on_the_digests_of_its_data(tasks: dict[str, Any]) -> None:
    for name in ("synthesis", "admission", "soup", "evaluation"):
        code = tasks[name]["inputs"]["parameters"]["code"]["taskOutputParameter"]
        assert code == {"producerTask": "preflight", "outputParameterKey": "code"}
    data = {"admission": ["synthesis"], "soup": ["hdpo", "sft-2"]}
    for name, producers in data.items():
        parameters = tasks[name]["inputs"]["parameters"]
        digests = [v["taskOutputParameter"]["producerTask"] for k, v in parameters.items() if k.endswith("_digest")]
        assert digests == producers
    joined = tasks["evaluation"]["inputs"]["parameters"]["digests"]["runtimeValue"]["constant"]
    for producer in ("admission", "sft", "hdpo", "sft-2", "soup", "sao"):
        assert f"pipelinechannel--{producer}-Output" in joined


def test_every_stage_takes_the_resolved_recipe(tasks: dict[str, Any]) -> None:
    for name in set(tasks) - {"preflight"}:
        recipe = tasks[name]["inputs"]["parameters"]["recipe"]["taskOutputParameter"]
        assert recipe == {"producerTask": "preflight", "outputParameterKey": "recipe"}, name


def test_closing_runs_whatever_happened(spec: dict[str, Any]) -> None:
    closing = spec["root"]["dag"]["tasks"]["closing"]
    assert closing["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    assert closing["dependentTasks"] == ["exit-handler-1"]


def test_parameters_are_few_and_explained(spec: dict[str, Any]) -> None:
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    knobs = set(parameters) - {"recipe", "run_dir", "seed"}
    assert len(knobs) <= 12
    assert knobs == {*_KNOBS, "overrides"}
    for name, parameter in parameters.items():
        assert len(parameter.get("description", "")) > 20, name
        assert "defaultValue" in parameter, name


def test_images_install_nothing_at_run_time(spec: dict[str, Any]) -> None:
    for name, executor in spec["deploymentSpec"]["executors"].items():
        command = " ".join(executor["container"]["command"])
        assert "pip install" not in command, name


def test_writes_where_asked(tmp_path: Path) -> None:
    write_ir(tmp_path / "new" / "p.yaml")
    assert (tmp_path / "new" / "p.yaml").stat().st_size > 1000
