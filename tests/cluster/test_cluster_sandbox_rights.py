"""What a rollout may do is asked before it begins: every missing right by name, and what no lease could be made for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kubernetes import client

from occamy.harness.loading import load
from occamy.nano.base import base_checkpoint
from occamy.rollout.config import RolloutConfig
from occamy.rollout.session import RolloutSession
from occamy.sandboxes.kubernetes.backend import KubernetesBackend
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig
from occamy.sandboxes.protocol import SandboxError

from .cluster import Cluster, eventually
from .pod_processes import tenant
from .sandbox_world import install

BY_LEASES = ["create", "delete", "get", "list", "patch", "watch"]
IN_ORDER = ["create pods/exec", "get pods/exec", "get secrets", *(f"{verb} sandboxleases" for verb in BY_LEASES)]


@pytest.fixture
def config(cluster: Cluster, namespace: str) -> KubernetesSandboxConfig:
    """A tenant's, whom the API server knows already."""
    install(cluster)
    made = KubernetesSandboxConfig(namespace=namespace, kubeconfig=tenant(cluster, namespace))
    eventually(lambda: not said(made))
    return made


def said(config: KubernetesSandboxConfig) -> str:
    """What the check complains of."""

    async def check() -> str:
        backend = KubernetesBackend(config)
        try:
            await backend.check()
        except SandboxError as e:
            return str(e)
        finally:
            await backend.close()
        return ""

    return asyncio.run(check())


def test_what_is_missing_is_named(cluster: Cluster, config: KubernetesSandboxConfig) -> None:
    stranger = config.model_copy(update={"namespace": "default", "route": "exec"})
    missing = f"namespace default: not allowed to {', '.join(IN_ORDER)}; bind the ClusterRole occamy-sandbox-tenant"
    assert said(stranger).startswith(missing)
    without_exec = f"not allowed to {', '.join(IN_ORDER[2:])}; bind"
    assert without_exec in said(stranger.model_copy(update={"route": "agent"}))
    rights = client.RbacAuthorizationV1Api(cluster.client())
    role = {
        "metadata": {"name": "part"},
        "rules": [{"apiGroups": ["occamy.dev"], "resources": ["sandboxleases"], "verbs": BY_LEASES}],
    }
    rights.create_namespaced_role("default", role)
    try:
        bound = rights.read_namespaced_role_binding("tenant", config.namespace)
        ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "part"}
        rights.create_namespaced_role_binding(
            "default", {"metadata": {"name": "part"}, "roleRef": ref, "subjects": bound.subjects}
        )
        eventually(lambda: "not allowed to create pods/exec, get pods/exec, get secrets; bind" in said(stranger))
    finally:
        rights.delete_namespaced_role_binding("part", "default")
        rights.delete_namespaced_role("part", "default")


def test_a_namespace_that_is_not_there_is_named(cluster: Cluster, config: KubernetesSandboxConfig) -> None:
    everywhere = config.model_copy(update={"namespace": "absent", "kubeconfig": cluster.admin})
    assert '404 namespaces "absent" not found' in said(everywhere)


def test_a_full_quota_passes(cluster: Cluster, config: KubernetesSandboxConfig) -> None:
    core, full = client.CoreV1Api(cluster.client()), {"count/sandboxleases.occamy.dev": "0"}
    core.create_namespaced_resource_quota(config.namespace, {"metadata": {"name": "full"}, "spec": {"hard": full}})
    eventually(lambda: core.read_namespaced_resource_quota("full", config.namespace).status.hard == full)
    assert said(config) == ""


def test_no_session_begins_without_rights(config: KubernetesSandboxConfig, tmp_path: Path) -> None:
    rollout = RolloutConfig(sandbox=config.model_copy(update={"namespace": "default"}))
    harness = load("react")
    session = RolloutSession(
        tmp_path, checkpoint=base_checkpoint(), engine_url="http://127.0.0.1:1", harness=harness, config=rollout
    )
    with pytest.raises(SandboxError, match="namespace default: not allowed to get secrets, create sandboxleases"):
        session.__enter__()
    rollout = RolloutConfig(sandbox=config)
    with RolloutSession(
        tmp_path, checkpoint=base_checkpoint(), engine_url="http://127.0.0.1:1", harness=harness, config=rollout
    ) as begun:
        assert begun.records() == []
