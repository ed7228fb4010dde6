"""Strict validation without a cluster: unknown fields are errors, and so are kinds that nobody knows."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from operators.sandbox.models import PoolSpec

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="no schemas of Kubernetes; run: make setup")
trainer = pytest.importorskip("kubeflow_trainer_api.models", reason="no schemas of Kubeflow Trainer; run: make setup")

CRDS = Path(__file__).parents[2] / "manifests" / "crds"
SERVICE_MONITOR = Path(__file__).with_name("service_monitor.json")
SERVERS = ("1.27", "1.37")
"""Oldest and newest Kubernetes that the manifests are written for."""


def problems(resource: dict[str, Any]) -> list[str]:
    """What is wrong with a resource; nothing when a server would take every field of it."""
    match resource["apiVersion"]:
        case "occamy.dev/v1alpha1":
            return _ours(resource)
        case "trainer.kubeflow.org/v1alpha1":
            return _kept(resource, trainer.TrainerV1alpha1ClusterTrainingRuntime.from_dict(resource).to_dict())
        case "monitoring.coreos.com/v1":
            return _broken(json.loads(SERVICE_MONITOR.read_text()), resource)
        case _:
            text = json.dumps(resource, sort_keys=True)
            return [problem for version in SERVERS for problem in _builtin(text, version)]


@functools.cache
def _builtin(text: str, version: str) -> list[str]:
    """Remembered by the resource's text: overlays share most of what they have, and schemas are slow to load."""
    try:
        kubernetes_validate.validate(json.loads(text), version, strict=True)
    except kubernetes_validate.ValidationError as problem:
        return [f"{version}: {'.'.join(map(str, problem.path))}: {problem.message}"]
    except kubernetes_validate.SchemaNotFoundError as problem:
        return [problem.message]
    return []


def _ours(resource: dict[str, Any]) -> list[str]:
    """By the schema of the CRD, closed, and by the operator's own model, which evaluates the rules."""
    documents = [d for file in sorted(CRDS.glob("*.yaml")) for d in yaml.safe_load_all(file.read_text())]
    schemas = {
        d["spec"]["names"]["kind"]: d["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for d in documents
        if d["kind"] == "CustomResourceDefinition"
    }
    spec = _closed(schemas[resource["kind"]]["properties"]["spec"])
    found = _broken(spec, resource["spec"])
    if not found and resource["kind"] == "SandboxPool":
        PoolSpec.model_validate(resource["spec"])
    return found


def _broken(schema: dict[str, Any], value: Any) -> list[str]:
    errors = jsonschema.Draft7Validator(schema).iter_errors(value)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in errors]


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with unknown fields as errors, where the server would prune them."""
    closed = {k: v for k, v in schema.items() if not k.startswith("x-kubernetes-")}
    if "properties" in schema:
        closed["properties"] = {name: _closed(inner) for name, inner in schema["properties"].items()}
        closed["additionalProperties"] = False
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    return closed


def _kept(given: Any, kept: Any, path: str = "") -> list[str]:
    """Fields that a model did not keep: it does not know them."""
    if isinstance(given, dict) and isinstance(kept, dict):
        unknown = [f"{path}.{name}: unknown field" for name in given if name not in kept]
        return unknown + [p for name in given if name in kept for p in _kept(given[name], kept[name], f"{path}.{name}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [p for i, pair in enumerate(zip(given, kept)) for p in _kept(*pair, f"{path}[{i}]")]
    return [] if given == kept else [f"{path}: {given!r} is taken as {kept!r}"]
