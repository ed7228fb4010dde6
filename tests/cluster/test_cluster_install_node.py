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
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from occamy.contracts.manifest import seal
from occamy.contracts.release import KIND, contract_bytes, contract_path
from occamy.sandboxes.relay import Relay
from occamy.synthesis.author import Slot
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.variants import write_task
from tests.images.dockerfiles import building
from tests.manifests.rendering import ROOT, build, kubectl

from .cluster import Cluster, eventually
from .node import NodeCluster, load_built
from .sandbox_world import OPERATOR_NAMESPACE, World, call
from .test_cluster_manifests import LEASE, Server

pytestmark = pytest.mark.node

IMAGES = ("grader", "operator", "sandbox", "trainer")
"""Named by the overlay; the node gets those that it runs."""
OPERATOR, SANDBOXES = "occamy-sandbox-operator", "occamy-sandboxes"
API_NAME = "kubernetes.default.svc"
CALL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)"
_IP_FREEBIND = 15


@pytest.fixture(scope="module")
def installed(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The overlay, with its operator serving."""
    manager = node_cluster.manager
    if not isinstance(manager, NodeCluster):
        pytest.skip("installs into namespaces of fixed names, so only on a cluster of its own")
    for image in ("operator", "sandbox"):
        load_built(manager, building.tag(image, "podman"))
    folder = tmp_path_factory.mktemp("install")
    gateway = f"10.213.{manager.octet}.1"
    resources = build(_overlay(folder / "tree", gateway, manager.server.rpartition(":")[2]))
    server = Server(node_cluster)
    with _reachable(gateway, int(manager.server.rpartition(":")[2])):
        for resource in resources:
            if resource["kind"] in ("Namespace", "CustomResourceDefinition"):
                server.keep(resource)
        eventually(lambda: all(map(server.knows, [r for r in resources if r["kind"] == "CustomResourceDefinition"])))
        server.api.resources.invalidate_cache()
        for resource in resources:
            server.keep(resource)
        try:
            yield World(node_cluster, SANDBOXES, folder)
        finally:
            _remove(node_cluster)


def _overlay(tree: Path, gateway: str, port: str) -> Path:
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
                {"name": "KUBERNETES_SERVICE_PORT", "value": port},
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


@contextmanager
def _reachable(gateway: str, port: int) -> Iterator[None]:
    """The API server of the loopback, for pods: at the address that all of them have for this machine."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_IP, _IP_FREEBIND, 1)  # the address is there as soon as a pod is
        listener.bind((gateway, port))
        listener.listen()
        Relay([listener], [("127.0.0.1", port)])
        yield


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


def leased(world: World) -> bool:
    """Make the page's lease; at first the quota controller does not know the kind."""
    try:
        return bool(call(world.api, "POST", world.path("sandboxleases"), yaml.safe_load(LEASE)))
    except ApiException as problem:
        assert b"status unknown for quota" in problem.body
        return False


def test_the_page_works_to_its_end(installed: World) -> None:
    apps = client.AppsV1Api(installed.api)
    eventually(lambda: apps.read_namespaced_deployment(OPERATOR, OPERATOR_NAMESPACE).status.available_replicas == 1)
    installed.ready("cowork", 2)
    installed.ready("graders", 0)
    eventually(lambda: leased(installed))
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


def test_the_operator_says_what_it_does_and_where_it_stands(installed: World) -> None:
    pods = client.CoreV1Api(installed.api)
    (pod,) = pods.list_namespaced_pod(OPERATOR_NAMESPACE).items
    assert (pod.spec.containers[0].image, pod.status.container_statuses[0].restart_count) == (
        building.tag("operator", "podman"),
        0,
    )
    installed.ready("cowork", 2)
    said = in_pod(
        installed,
        OPERATOR_NAMESPACE,
        pod.metadata.name,
        "python",
        "-c",
        "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/metrics').read().decode())",
    ).stdout
    assert "occamy_sandbox_pool_pods{" in said and 'pool="cowork"' in said
    log = pods.read_namespaced_pod_log(pod.metadata.name, OPERATOR_NAMESPACE)
    lines = [json.loads(line) for line in log.splitlines()]
    assert lines and [line for line in lines if line["severity"] == "error"] == []


def test_the_rollout_of_the_page_runs_in_these_pods(installed: World, tmp_path: Path) -> None:
    """docs/sandboxes.md, step 6, as the service account that the overlay lets lease."""
    tasks = tmp_path / "admission"
    for n in range(4):
        task = write_task(Slot("train", "long", n), SynthesisConfig(), 7)
        path = contract_path(tasks, task.meta.task_id)
        path.parent.mkdir(parents=True)
        path.write_bytes(contract_bytes(task))
    seal(tasks, KIND)
    kubeconfig = installed.cluster.service_account("occamy", "occamy-rollout")
    installed.ready("cowork", 2)

    def occamy(*words: str) -> str:
        command = [str(Path(sys.executable).with_name("occamy")), *words]
        env = {**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pods = ["--set", "rollout.sandbox.backend=kubernetes", "--set", f"rollout.sandbox.namespace={SANDBOXES}"]
    occamy(
        "rollout",
        "--harness",
        "react",
        "--tasks",
        "admission",
        "--limit",
        "4",
        "--out",
        "try",
        "--concurrency",
        "2",
        *pods,
    )
    assert "4" in occamy("replay", "state", "try/sealed")
    eventually(lambda: installed.list("sandboxleases") == [])
