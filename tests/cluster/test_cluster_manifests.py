"""A real API server takes every resource of every overlay, by server-side apply, which knows all fields or refuses.

Custom resource definitions are created instead: servers before 1.25 take rules of theirs so, and so alone. Those of
Kubeflow Trainer and the Prometheus operator are made from their schemas, see tests/manifests/foreign.py.
"""

from __future__ import annotations

import copy
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, dynamic
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic.exceptions import ResourceNotFoundError

from tests.manifests import foreign
from tests.manifests.rendering import (
    COMPONENTS,
    OVERLAYS,
    ROOT,
    Resource,
    key,
    kubectl,
    of_kind,
    overlay,
    with_components,
)

from .cluster import Cluster, eventually
from .sandbox_world import ACCOUNT, World, call, install, nodes

DOCS = ROOT / "docs"
LEASE = """
apiVersion: occamy.dev/v1alpha1
kind: SandboxLease
metadata: {name: try}
spec: {pool: cowork, owner: {run: try}, ttlSeconds: 120}
"""
EARLIER = {"policy/v1": "policy/v1beta1", "batch/v1": "batch/v1beta1"}
"""Where servers before 1.21 have PodDisruptionBudget and CronJob, with the same fields."""


class Server:
    """Applies resources without keeping them."""

    def __init__(self, cluster: Cluster) -> None:
        self.api = dynamic.DynamicClient(cluster.client())

    def keep(self, resource: Resource) -> None:
        """Create a resource that others need to be there, unless it is."""
        kind = self._kind(resource)
        try:
            kind.create(body={**resource, "apiVersion": kind.group_version})
        except ApiException as problem:
            if problem.status != 409:
                raise

    def knows(self, kind: Resource) -> bool:
        """Whether the server serves the kind of this custom resource definition."""
        spec = kind["spec"]
        where = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        try:
            return bool(call(self.api.client, "GET", where))
        except ApiException:
            return False

    def refusals(self, resources: list[Resource]) -> dict[str, str]:
        """What the server has against which of the resources; custom resource definitions it has already."""
        asked = [r for r in resources if r["kind"] != "CustomResourceDefinition"]
        return {key(r): problem for r in asked if (problem := self.refusal(r))}

    def refusal(self, resource: Resource) -> str | None:
        """What the server has against a resource."""
        kind = self._kind(resource)
        body = {**copy.deepcopy(resource), "apiVersion": kind.group_version}
        try:
            kind.server_side_apply(body=body, field_manager="tests", force_conflicts=True, dry_run="All")
        except ApiException as problem:
            return f"{problem.status} {problem.body}"
        return None

    def _kind(self, resource: Resource) -> Any:
        version = resource["apiVersion"]
        try:
            return self.api.resources.get(api_version=version, kind=resource["kind"])
        except ResourceNotFoundError:
            return self.api.resources.get(api_version=EARLIER.get(version, version), kind=resource["kind"])


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[Server]:
    """The API server, with our namespaces and all custom resource definitions."""
    found = Server(cluster)
    kinds = [*of_kind(overlay("production"), "CustomResourceDefinition"), *foreign.definitions()]
    for resource in [*of_kind(overlay("production"), "Namespace"), *kinds]:
        found.keep(resource)
    eventually(lambda: all(map(found.knows, kinds)))
    found.api.resources.invalidate_cache()
    yield found


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_server_takes_every_resource_of_an_overlay(server: Server, name: str) -> None:
    assert server.refusals(overlay(name)) == {}


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_server_takes_the_base_with_one_component(server: Server, component: str, tmp_path: Path) -> None:
    assert server.refusals(with_components(tmp_path, component)) == {}


def test_the_server_refuses_a_field_it_does_not_know_and_a_value_that_cannot_be(server: Server) -> None:
    deployment = of_kind(overlay("kind"), "Deployment")[0]
    unknown, impossible = copy.deepcopy(deployment), copy.deepcopy(deployment)
    unknown["spec"]["template"]["spec"]["bogus"] = True
    impossible["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "1m"
    assert "bogus" in str(server.refusal(unknown))
    assert "must be less than or equal to cpu limit" in str(server.refusal(impossible))
    assert server.refusal(deployment) is None


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("ServiceMonitor", lambda spec: spec["endpoints"][0].update(bogus=1), "bogus"),
        ("ClusterTrainingRuntime", lambda spec: spec["mlPolicy"]["torch"].update(numProcPerNode=8), "numProcPerNode"),
        ("ClusterTrainingRuntime", lambda spec: spec["mlPolicy"].update(numNodes="two"), "numNodes"),
        ("SandboxPool", lambda spec: spec["template"].update(privileged=True), "privileged"),
        ("SandboxPool", lambda spec: spec.update(warm=-1), "warm"),
    ],
)
def test_the_server_refuses_what_a_custom_resource_may_not_be(
    server: Server, kind: str, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    resource = copy.deepcopy(of_kind(overlay("production"), kind)[0])
    change(resource["spec"])
    assert says in str(server.refusal(resource))


def test_a_dry_run_keeps_nothing(server: Server) -> None:
    deployment = of_kind(overlay("kind"), "Deployment")[0]
    assert server.refusal(deployment) is None
    kind = server.api.resources.get(api_version="apps/v1", kind="Deployment")
    kept = kind.get(namespace=deployment["metadata"]["namespace"]).items
    assert deployment["metadata"]["name"] not in [d.metadata.name for d in kept]


ROLLOUT = "system:serviceaccount:occamy:occamy-rollout"
MAY = {
    ("create", "occamy.dev", "sandboxleases", ""): True,
    ("delete", "occamy.dev", "sandboxleases", ""): True,
    ("get", "", "secrets", ""): True,
    ("get", "", "pods", "exec"): True,
    ("create", "", "pods", "exec"): True,
    ("list", "", "secrets", ""): False,
    ("get", "", "pods", ""): False,
    ("list", "", "pods", ""): False,
    ("create", "", "pods", ""): False,
    ("delete", "", "pods", ""): False,
    ("create", "", "pods", "attach"): False,
    ("create", "", "pods", "portforward"): False,
    ("patch", "occamy.dev", "sandboxleases", "status"): False,
    ("patch", "occamy.dev", "sandboxpools", ""): False,
    ("delete", "networking.k8s.io", "networkpolicies", ""): False,
}
"""Verb, API group, resource and subresource, and whether rollouts may, where sandboxes are."""


def test_rollouts_may_lease_and_exec_among_sandboxes_and_nothing_anywhere_else(
    server: Server, cluster: Cluster
) -> None:
    resources = overlay("kind")
    for resource in of_kind(resources, "ClusterRole", "RoleBinding"):
        server.keep(resource)
    api = client.AuthorizationV1Api(cluster.client())

    def may(namespace: str, verb: str, group: str, resource: str, sub: str) -> bool:
        asked = {"namespace": namespace, "verb": verb, "group": group, "resource": resource, "subresource": sub}
        review = {"spec": {"user": ROLLOUT, "resourceAttributes": asked}}
        return bool(api.create_subject_access_review(review).status.allowed)

    eventually(lambda: may("occamy-sandboxes", "create", "occamy.dev", "sandboxleases", ""))
    assert {asked: may("occamy-sandboxes", *asked) for asked in MAY} == MAY
    for namespace in ("occamy", "occamy-system", "default"):
        assert {asked for asked in MAY if may(namespace, *asked)} == set(), namespace


COMMANDS = [
    ("kubectl -n occamy-sandboxes get sandboxpools,sandboxleases", "sandboxlease.occamy.dev/try"),
    (
        "kubectl -n occamy-sandboxes get sandboxlease NAME -o jsonpath='{.status.reason}: {.status.message}{\"\\n\"}'",
        ":",
    ),
    ("kubectl -n occamy-sandboxes get sandboxlease NAME -o jsonpath={.status.launch}", ""),
    ("kubectl -n occamy-sandboxes get events --sort-by=.lastTimestamp", ""),
    ("kubectl -n occamy-sandboxes describe resourcequota sandboxes", "count/sandboxleases.occamy.dev"),
    ("kubectl auth can-i --list --as=system:serviceaccount:NAMESPACE:ACCOUNT -n occamy-sandboxes", "selfsubject"),
    ("kubectl get sandboxpools -A", "cowork"),
    ("kubectl get apiservices", "Local"),
    ("kubectl get namespace NAME -o jsonpath='{.status.conditions}'", ""),
    ("kubectl get crd sandboxleases.occamy.dev -o jsonpath='{.spec.versions[*].name}'", "v1alpha1"),
    ("kubectl scale sandboxpool cowork --replicas=N", "scaled"),
    ("kubectl -n occamy-sandboxes describe sandboxpool cowork", "Warm: 3"),
]
"""Commands of docs/troubleshooting.md and docs/operating.md, with what they print once a pool and a lease are there."""


def test_the_commands_of_the_handbook_work(server: Server, cluster: Cluster, namespace: str) -> None:
    pages = [(DOCS / name).read_text() for name in ("troubleshooting.md", "operating.md")]
    pools, quotas = of_kind(overlay("kind"), "SandboxPool"), of_kind(overlay("kind"), "ResourceQuota")
    for resource in [*pools, yaml.safe_load(LEASE), *quotas]:
        server.keep({**resource, "metadata": {**resource["metadata"], "namespace": namespace}})
    for command, prints in COMMANDS:
        assert any(command.removesuffix(" cowork") in page for page in pages), command
        words = command.replace("occamy-sandboxes", namespace).replace("NAMESPACE", namespace)
        words = words.replace("namespace NAME", f"namespace {namespace}").replace("=N", "=3")
        words = words.replace("NAME", "try").replace("scale", f"-n {namespace} scale")
        done = subprocess.run(
            [kubectl(), *shlex.split(words)[1:]],
            env={"KUBECONFIG": str(cluster.admin), "HOME": "/nonexistent"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (words, done.stderr)
        assert prints in " ".join(done.stdout.split()), (words, done.stdout)


def test_an_operator_with_rights_in_one_namespace_serves_it(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    install(cluster)
    bindings = of_kind(with_components(tmp_path / "tree", "one-namespace"), "RoleBinding")
    (binding,) = (b for b in bindings if b["metadata"]["name"] == ACCOUNT)
    binding["metadata"]["namespace"] = namespace
    binding["subjects"] = [{"kind": "ServiceAccount", "name": "narrow", "namespace": namespace}]
    Server(cluster).keep(binding)
    world = World(cluster, namespace, tmp_path)
    world.kubeconfig = cluster.service_account(namespace, "narrow")
    world.start()  # with --namespace
    try:
        with nodes(world):
            world.pool(warm=1)
            world.lease("one", ttlSeconds=20)
            world.until("one", "Bound")
            assert world.until("one", "Expired")["reason"] == "DeadlinePassed"
    finally:
        assert world.operator is not None
        world.operator.stop(10)
