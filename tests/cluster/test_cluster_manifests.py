"""A real API server takes every resource of every overlay, by server-side apply, which knows all fields or refuses.

Custom resource definitions are created instead: servers before 1.25 take rules of theirs so, and so alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import dynamic
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic.exceptions import ResourceNotFoundError

from tests.manifests.rendering import COMPONENTS, OVERLAYS, Resource, key, of_kind, overlay, with_components

from .cluster import Cluster, eventually

FOREIGN = {"ClusterTrainingRuntime", "ServiceMonitor"}
"""Kinds whose custom resource definitions come with Kubeflow Trainer and the Prometheus operator."""
EARLIER = {"policy/v1": "policy/v1beta1", "batch/v1": "batch/v1beta1"}
"""Where servers before 1.21 have PodDisruptionBudget and CronJob, with the same fields."""


class Server:
    """Applies resources without keeping them."""

    def __init__(self, cluster: Cluster) -> None:
        self.api = dynamic.DynamicClient(cluster.client())

    def keep(self, resource: Resource) -> None:
        """Create a resource that others need to be there, unless it is."""
        try:
            self._kind(resource).create(body=resource)
        except ApiException as problem:
            if problem.status != 409:
                raise

    def knows(self, resource: Resource) -> bool:
        """Whether the server serves this kind."""
        try:
            self._kind(resource)
        except ResourceNotFoundError:
            return False
        return True

    def refusals(self, resources: list[Resource]) -> dict[str, str]:
        """What the server has against which of the resources whose kind it serves."""
        asked = [r for r in resources if self.knows(r) and r["kind"] != "CustomResourceDefinition"]
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
    """The API server, with our namespaces and custom resource definitions."""
    found = Server(cluster)
    needed = of_kind(overlay("production"), "Namespace", "CustomResourceDefinition")
    for resource in needed:
        found.keep(resource)
    pool = of_kind(overlay("kind"), "SandboxPool")[0]
    eventually(lambda: found.api.resources.invalidate_cache() or found.knows(pool), 20)
    yield found


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_server_takes_every_resource_of_an_overlay(server: Server, name: str) -> None:
    resources = overlay(name)
    assert {r["kind"] for r in resources if not server.knows(r)} <= FOREIGN
    assert server.refusals(resources) == {}


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


def test_a_dry_run_keeps_nothing(server: Server) -> None:
    deployment = of_kind(overlay("kind"), "Deployment")[0]
    assert server.refusal(deployment) is None
    kind = server.api.resources.get(api_version="apps/v1", kind="Deployment")
    kept = kind.get(namespace=deployment["metadata"]["namespace"]).items
    assert deployment["metadata"]["name"] not in [d.metadata.name for d in kept]
