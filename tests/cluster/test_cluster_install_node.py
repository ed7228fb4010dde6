"""The overlay for one laptop on a node of its own, as docs/install.md says: operator and pools run from our images, a
tenant leases, and `occamy rollout` puts episodes into the pods."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from occamy.capture.sealed import read_sealed
from occamy.contracts.episode import Outcome
from occamy.contracts.manifest import seal
from occamy.contracts.release import KIND, contract_bytes, contract_path
from occamy.sandboxes.relay import Relay
from occamy.synthesis.author import Slot
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.variants import write_task
from tests.images.dockerfiles import building
from tests.manifests.rendering import ROOT, build, kubectl, of_kind

from .cluster import Cluster, eventually
from .node import NodeCluster, load_built
from .sandbox_world import OPERATOR_NAMESPACE, World, call
from .test_cluster_manifests import LEASE, Server

pytestmark = pytest.mark.node

IMAGES = ("grader", "operator", "sandbox", "trainer")
"""Named by the overlay; the node gets those that it runs."""
OPERATOR, SANDBOXES = "occamy-sandbox-operator", "occamy-sandboxes"
COUNTED = "count/sandboxleases.occamy.dev"
"""What the quota knows a while after the CRDs are there; before, it refuses leases."""
API_NAME = "kubernetes.default.svc"
CALL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)"


@pytest.fixture(scope="module")
def installed(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The overlay, with its operator serving."""
    manager = node_cluster.manager
    if not isinstance(manager, NodeCluster):
        pytest.skip("installs into namespaces of fixed names, so only on a cluster of its own")
    for image in ("operator", "sandbox"):
        load_built(manager, building.tag(image, "podman"))
    folder = tmp_path_factory.mktemp("install")
    gateway, port = manager.gateway, int(manager.server.rpartition(":")[2])
    _serve_at(gateway, port)
    resources = build(_overlay(folder / "tree", gateway, port))
    kinds = of_kind(resources, "CustomResourceDefinition")
    server = Server(node_cluster)
    for resource in [*of_kind(resources, "Namespace"), *kinds]:
        server.keep(resource)
    eventually(lambda: all(map(server.knows, kinds)))
    server.api.resources.invalidate_cache()
    for resource in resources:
        server.keep(resource)
    world = World(node_cluster, SANDBOXES, folder)
    try:
        eventually(lambda: COUNTED in world.list("resourcequotas")[0].get("status", {}).get("used", {}))
        apps = client.AppsV1Api(world.api)
        eventually(lambda: apps.read_namespaced_deployment(OPERATOR, OPERATOR_NAMESPACE).status.available_replicas == 1)
        world.ready("cowork", 2)
        yield world
    finally:
        _remove(node_cluster)


def _overlay(tree: Path, gateway: str, port: int) -> Path:
    """The laptop's overlay with podman's names of the images, as the page says. The test's node has no service
    addresses, so the operator is told where the API server is."""
    for name in ("kustomize", "manifests"):
        shutil.copytree(ROOT / name, tree / name)
    shutil.copy(tree / "kustomize/overlays/staging/images.yaml", tree)
    patches = [
        ("/spec/template/spec/hostAliases", [{"ip": gateway, "hostnames": [API_NAME]}]),
        (
            "/spec/template/spec/containers/0/env",
            [
                {"name": "KUBERNETES_SERVICE_HOST", "value": API_NAME},
                {"name": "KUBERNETES_SERVICE_PORT", "value": str(port)},
            ],
        ),
    ]
    patch = [{"op": "add", "path": path, "value": value} for path, value in patches]
    text = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["kustomize/overlays/kind"],
        "configurations": ["images.yaml"],
        "images": [{"name": f"occamy-{name}", "newName": f"localhost/occamy-{name}"} for name in IMAGES],
        "patches": [{"target": {"kind": "Deployment", "name": OPERATOR}, "patch": json.dumps(patch)}],
    }
    (tree / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return tree


def _serve_at(gateway: str, port: int) -> None:
    """The API server of the loopback, for pods: at the address that all of them have for this machine, to the end of
    this process."""
    Relay([socket.create_server((gateway, port))], [("127.0.0.1", port)])


def _remove(cluster: Cluster) -> None:
    """An operator for all namespaces must not meet the other tests'."""
    api = cluster.client()
    client.AppsV1Api(api).delete_namespaced_deployment(OPERATOR, OPERATOR_NAMESPACE)
    eventually(lambda: client.CoreV1Api(api).list_namespaced_pod(OPERATOR_NAMESPACE).items == [])
    for name in (SANDBOXES, "occamy"):
        client.CoreV1Api(api).delete_namespace(name)


def in_pod(world: World, namespace: str, pod: str, *command: str) -> subprocess.CompletedProcess[str]:
    """`kubectl exec`, as an administrator."""
    words = [kubectl(), "-n", namespace, "exec", pod, "--", *command]
    return subprocess.run(
        words, env={"KUBECONFIG": str(world.cluster.admin), "HOME": "/nonexistent"}, capture_output=True, text=True
    )


def taken(world: World, lease: dict[str, Any]) -> bool:
    """Make a lease. False where the quota, which counts the pool's pods as well, was just being changed."""
    try:
        return bool(call(world.api, "POST", world.path("sandboxleases"), lease))
    except ApiException as refused:
        if refused.status == 409 and "resourcequotas" in str(refused.body):
            return False
        raise


def test_the_page_works_to_its_end(installed: World) -> None:
    installed.ready("cowork", 2)
    eventually(lambda: taken(installed, yaml.safe_load(LEASE)))
    status = installed.until("try", "Bound")
    assert (status["launch"], status["pod"].rpartition("-")[0]) == ("warm", "cowork")
    api = installed.cluster.control_plane.server.rpartition(":")[2]
    reached = in_pod(installed, OPERATOR_NAMESPACE, f"deployment/{OPERATOR}", "python", "-c", CALL, API_NAME, api)
    assert reached.returncode == 0, reached.stderr
    tried = in_pod(
        installed, SANDBOXES, status["pod"], "python3", "-c", "import os; print(os.getuid(), os.listdir('.'))"
    )
    assert (tried.stdout, tried.stderr) == ("10001 []\n", "")
    refused = in_pod(installed, SANDBOXES, status["pod"], "sh", "-c", "echo 1 > /opt/occamy/x")
    assert "Read-only file system" in refused.stderr
    installed.delete("sandboxleases", "try")
    eventually(lambda: installed.read("pods", status["pod"]) is None)
    installed.ready("cowork", 2)


def operator_log(world: World) -> list[dict[str, Any]]:
    """What the operator has logged, one object a line."""
    pods = client.CoreV1Api(world.api)
    (pod,) = pods.list_namespaced_pod(OPERATOR_NAMESPACE).items
    return [
        json.loads(line) for line in pods.read_namespaced_pod_log(pod.metadata.name, OPERATOR_NAMESPACE).splitlines()
    ]


def test_the_operator_says_what_it_does_and_where_it_stands(installed: World) -> None:
    (pod,) = client.CoreV1Api(installed.api).list_namespaced_pod(OPERATOR_NAMESPACE).items
    assert pod.spec.containers[0].image == building.tag("operator", "podman")
    assert pod.status.container_statuses[0].restart_count == 0
    ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/metrics').read().decode())"
    said = in_pod(installed, OPERATOR_NAMESPACE, pod.metadata.name, "python", "-c", ask).stdout
    assert f'occamy_sandbox_pool_target{{namespace="{SANDBOXES}",pool="cowork"}} 2.0' in said
    lines = operator_log(installed)
    assert lines and [line for line in lines if line["severity"] == "error"] == []


ROLLOUT = f"""rollout --harness react --tasks admission --limit 4 --out try --concurrency 2
--set rollout.sandbox.backend=kubernetes --set rollout.sandbox.namespace={SANDBOXES}"""
"""docs/sandboxes.md, step 6."""


def test_the_rollout_of_the_page_runs_in_these_pods(installed: World, tmp_path: Path) -> None:
    """As the service account that the overlay lets lease."""
    page = " ".join((ROOT / "docs" / "sandboxes.md").read_text().replace("\\\n", " ").split())
    assert " ".join(ROLLOUT.split()) in page.replace("RUN/stages/admission", "admission")
    for n in range(4):
        task = write_task(Slot("train", "long", n), SynthesisConfig(), 7)
        path = contract_path(tmp_path / "admission", task.meta.task_id)
        path.parent.mkdir(parents=True)
        path.write_bytes(contract_bytes(task))
    seal(tmp_path / "admission", KIND)
    kubeconfig = installed.cluster.service_account("occamy", "occamy-rollout")
    for words in (ROLLOUT, "replay state try/sealed"):
        done = subprocess.run(
            [Path(sys.executable).with_name("occamy"), *words.split()],
            env={**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    records = read_sealed(tmp_path / "try" / "sealed", "episodes").records
    assert [(r.outcome, r.quarantine, r.score) for r in records] == [(Outcome.completed, None, 1.0)] * 4
    bound = [line for line in operator_log(installed) if line.get("run") == "rollout" and line.get("phase") == "Bound"]
    assert len(bound) == 4
    eventually(lambda: installed.list("sandboxleases") == [])
