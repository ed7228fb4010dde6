"""Every overlay and every component builds, and every field in what comes out is known to the API that gets it."""

from __future__ import annotations

import copy
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from .rendering import COMPONENTS, OVERLAYS, ROOT, key, of_kind, overlay, with_components
from .validation import problems

CLUSTER_WIDE = {
    "ClusterRole",
    "ClusterRoleBinding",
    "ClusterTrainingRuntime",
    "CustomResourceDefinition",
    "Namespace",
    "RuntimeClass",
}


def test_the_overlays_and_components_are_these() -> None:
    assert OVERLAYS == ["kind", "production", "staging"]
    assert COMPONENTS == ["agent-sandbox", "gpu", "gvisor", "monitoring", "one-namespace", "s3"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_valid_to_the_last_field(name: str) -> None:
    found = {key(r): problems(r) for r in overlay(name)}
    assert len(found) > 20
    assert {k: p for k, p in found.items() if p} == {}


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_base_with_one_component_is_valid(component: str, tmp_path: Path) -> None:
    plain = {key(r): r for r in with_components(tmp_path / "plain")}
    found = {key(r): r for r in with_components(tmp_path / "one", component)}
    assert {k: problems(r) for k, r in found.items() if problems(r)} == {}
    taken = {"ClusterRoleBinding /occamy-sandbox-operator"} if component == "one-namespace" else set()
    assert set(plain) - set(found) == taken
    assert found != plain, f"component {component} changes nothing"


@pytest.mark.parametrize("name", OVERLAYS)
def test_everything_has_one_definition_and_a_namespace_that_is_made(name: str) -> None:
    resources = overlay(name)
    assert [k for k, n in Counter(map(key, resources)).items() if n > 1] == []
    made = {r["metadata"]["name"] for r in of_kind(resources, "Namespace")}
    placed = {key(r): r["metadata"].get("namespace") for r in resources if r["kind"] not in CLUSTER_WIDE}
    assert {k: n for k, n in placed.items() if n not in made} == {}
    assert {key(r) for r in resources if r["kind"] in CLUSTER_WIDE and "namespace" in r["metadata"]} == set()


def test_every_manifest_is_part_of_some_kustomization() -> None:
    listed: set[Path] = set()
    for folder, _, files in os.walk(ROOT / "manifests"):
        here = Path(folder)
        if "kustomization.yaml" in files:
            listed |= {here / f for f in yaml.safe_load((here / "kustomization.yaml").read_text())["resources"]}
    written = {p for p in (ROOT / "manifests").rglob("*.yaml") if p.name != "kustomization.yaml"}
    assert {str(p.relative_to(ROOT)) for p in written - listed} == set()


def mutated(resource: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with one field set."""
    changed = copy.deepcopy(resource)
    at = changed
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return changed


RUNTIME_NODE = ("spec", "template", "spec", "replicatedJobs", 0, "template", "spec", "template", "spec")


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "template", "spec", "containers", 0, "imagepullPolicy"), "Always"),
        ("Deployment", ("spec", "replicas"), "two"),
        ("SandboxPool", ("spec", "template", "privileged"), True),
        ("SandboxPool", ("spec", "warm"), -1),
        ("ClusterTrainingRuntime", ("spec", "mlPolicy", "torch", "numProcPerNode"), 8),
        ("ClusterTrainingRuntime", (*RUNTIME_NODE, "containers", 0, "gpus"), 8),
        ("ServiceMonitor", ("spec", "endpoints", 0, "bogus"), 1),
    ],
)
def test_a_field_that_no_api_knows_is_found(kind: str, path: tuple[Any, ...], value: Any) -> None:
    resource = of_kind(overlay("production"), kind)[0]
    assert problems(resource) == []
    assert problems(mutated(resource, path, value)) != []


def test_a_pool_that_breaks_a_rule_between_fields_is_refused() -> None:
    pool = of_kind(overlay("kind"), "SandboxPool")[0]
    with pytest.raises(ValueError, match="warm may not exceed max"):
        problems(mutated(pool, ("spec", "warm"), pool["spec"]["max"] + 1))
