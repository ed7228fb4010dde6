"""Real clusters for tests: the local control plane, or any provider that pytest-kubernetes is told to use.

`make kube-assets` once; then `cluster` is etcd, API server and controllers, and `node_cluster` (marker `node`) can
also run pods. With `--k8s-provider external --k8s-kubeconfig FILE`, or kind, k3d, minikube, both are that cluster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pytest_kubernetes.providers.base import AClusterManager

from .api_faults import known_tenant
from .assets import Assets, MissingAssetsError, find_assets
from .cluster import Cluster
from .control_plane import running_control_plane
from .node import TINY, NodeCluster, running_node_cluster, unusable
from .sandbox_world import World, install

Managers = Callable[[str | None], type[AClusterManager]]
CHOICES = ("k8s_provider", "k8s_kubeconfig", "k8s_kubeconfig_override")


@pytest.fixture(scope="session")
def assets() -> Iterator[Assets]:
    """The programs of the local control plane; their kubectl is the one that pytest-kubernetes finds in PATH."""
    try:
        found = find_assets()
    except MissingAssetsError as problem:
        pytest.skip(str(problem))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{found.folder}{os.pathsep}{os.environ['PATH']}")
        yield found


@pytest.fixture(scope="session")
def cluster(
    request: pytest.FixtureRequest, k8s_manager: Managers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster that need not run pods, shared by all tests: each takes a namespace of its own."""
    folder = tmp_path_factory.mktemp("cluster")
    if any(request.config.getoption(choice) for choice in CHOICES):
        yield from _chosen(request, k8s_manager, folder)
        return
    with running_control_plane(request.getfixturevalue("assets"), folder) as plane:
        yield from _closing(Cluster(plane, folder))


@pytest.fixture(scope="session")
def node_cluster(
    request: pytest.FixtureRequest, k8s_manager: Managers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster that runs pods, shared by all tests with the marker `node`."""
    folder = tmp_path_factory.mktemp("node")
    if any(request.config.getoption(choice) for choice in CHOICES):
        yield from _chosen(request, k8s_manager, folder)
        return
    if reason := unusable():
        pytest.skip(reason)
    with running_node_cluster(request.getfixturevalue("assets"), folder) as one_node:
        yield from _closing(Cluster(one_node, folder))


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A fresh namespace in `cluster`."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture
def world(cluster: Cluster, namespace: str, tmp_path: Path) -> World:
    """A namespace without an operator; modules that need one have a fixture of this name."""
    install(cluster)
    return World(cluster, namespace, tmp_path)


@pytest.fixture
def kubeconfig(world: World) -> Path:
    """That of a tenant there whom the API server knows."""
    return known_tenant(world)


@pytest.fixture
def node_namespace(node_cluster: Cluster) -> Iterator[str]:
    """A fresh namespace in `node_cluster`."""
    with node_cluster.namespace() as name:
        yield name


@pytest.fixture(scope="session")
def tiny_image(node_cluster: Cluster) -> str:
    """Name of an image with a shell that `node_cluster` can run: made here, or what that cluster pulls by itself."""
    return TINY if isinstance(node_cluster.manager, NodeCluster) else "busybox:1.36"


def _chosen(request: pytest.FixtureRequest, k8s_manager: Managers, folder: Path) -> Iterator[Cluster]:
    manager = k8s_manager(None)(request.config.getoption("k8s_cluster_name"))
    try:
        manager.create(timeout=240)
        yield from _closing(Cluster(manager, folder))
    finally:
        manager.delete()


def _closing(cluster: Cluster) -> Iterator[Cluster]:
    yield cluster
    cluster.close()
