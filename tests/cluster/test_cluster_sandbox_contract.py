"""Pods keep every promise of the sandbox contract: a real API server, the operator, and the agent of each pod."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from occamy.sandboxes.kubernetes.backend import KubernetesBackend, KubernetesSandbox
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig
from occamy.sandboxes.protocol import Sandbox
from tests.sandboxes.contract import LIMITS, PROMISES, Ground

from .cluster import Cluster
from .pod_processes import PATIENT, Node, node_of_processes, tenant
from .sandbox_world import World, install


@pytest.fixture(scope="module")
def node(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A namespace with an operator, a pool of warm pods, and their agents."""
    folder = tmp_path_factory.mktemp("contract")
    install(cluster)
    with cluster.namespace("contract") as namespace:
        world = World(cluster, namespace, folder)
        world.start()
        with node_of_processes(world, folder / "node") as started:
            world.pool("pool", warm=2, max=6)
            world.ready("pool", 2)
            yield started
        assert world.operator is not None
        world.operator.stop(10)


@pytest.fixture(scope="module")
def kubeconfig(node: Node) -> Path:
    """A tenant's, who may lease here and nothing else."""
    return tenant(node.world.cluster, node.world.namespace)


@pytest.mark.parametrize("promise", PROMISES)
def test_the_kubernetes_backend_keeps_its_promise(promise: str, node: Node, kubeconfig: Path) -> None:
    @contextmanager
    def squeeze(sandbox: Sandbox, size: int) -> Iterator[None]:
        assert isinstance(sandbox, KubernetesSandbox)
        agent = node.agent_pid(sandbox.pod)
        soft, hard = resource.prlimit(agent, resource.RLIMIT_FSIZE)
        resource.prlimit(agent, resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.prlimit(agent, resource.RLIMIT_FSIZE, (soft, hard))

    async def run() -> None:
        config = KubernetesSandboxConfig(
            namespace=node.world.namespace, kubeconfig=kubeconfig, route="agent", limits=LIMITS, **PATIENT
        )
        backend = KubernetesBackend(config)
        try:
            await PROMISES[promise](Ground(backend, squeeze))
        finally:
            await backend.close()

    asyncio.run(run())
