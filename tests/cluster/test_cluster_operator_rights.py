"""What the operator may do is what it does, by the API server's audit log; what tenants may do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from .cluster import Cluster, eventually
from .sandbox_world import ACCOUNT, MANIFESTS, OPERATOR_NAMESPACE, World, call, install, nodes

USER = f"system:serviceaccount:{OPERATOR_NAMESPACE}:{ACCOUNT}"
SNAPSHOT = {"lease": "one", "leaseUid": "u", "uri": "s3://b/k", "fingerprint": "sha256:" + "0" * 64}


@pytest.fixture
def world(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    """A running operator for all namespaces."""
    install(cluster)
    made = World(cluster, namespace, tmp_path)
    yield made
    if made.operator is not None:
        made.operator.stop(10)


def granted(file: str, role: str) -> set[tuple[str, str, str]]:
    """API group, resource and verb of a ClusterRole in the manifests."""
    documents = yaml.safe_load_all((MANIFESTS / "operator" / file).read_text())
    rules = next(d["rules"] for d in documents if d["kind"] == "ClusterRole" and d["metadata"]["name"] == role)
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


def used(cluster: Cluster) -> set[tuple[str, str, str]]:
    return {(use.group, use.resource, use.verb) for use in cluster.uses(USER) if use.resource}


def test_every_right_is_used_and_nothing_is_asked_for_that_is_not_granted(cluster: Cluster, world: World) -> None:
    cluster.control_plane  # noqa: B018 - skips where the audit log cannot be read
    foreign = {"metadata": {"name": "p-0"}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}
    call(world.api, "POST", world.path("pods"), foreign)
    world.start(all_namespaces=True)
    with nodes(world):
        world.pool(warm=2, max=30)
        world.ready("p", 2)
        assert "p-0" in [p["metadata"]["name"] for p in world.list("pods")]  # a stranger's, left alone
        world.snapshot("s", SNAPSHOT)
        eventually(lambda: ((world.read("sandboxsnapshots", "s") or {}).get("status") or {}).get("phase") == "Sealed")

        def reread() -> bool:
            """A lease that changes while its status is written is read again."""
            n = len(world.list("sandboxleases"))
            world.lease(f"l{n}")
            for turn in range(20):
                world.patch("sandboxleases", f"l{n}", {"metadata": {"labels": {"turn": str(turn)}}})
            world.until(f"l{n}", "Bound")
            return ("occamy.dev", "sandboxleases", "get") in used(cluster)

        eventually(reread)
        world.patch("sandboxleases", "l0", {"spec": {"released": True}})
        world.until("l0", "Released")
        world.patch("sandboxleases", "l0", {"status": {"endedAt": "2026-01-01T00:00:00Z"}}, "status")
        eventually(lambda: world.read("sandboxleases", "l0") is None)
    assert world.operator is not None
    world.operator.stop(10)  # API server 1.20 logs a watch when it ends
    world.operator = None
    rights = granted("rbac.yaml", "occamy-sandbox-operator")
    own = {use for use in used(cluster) if not use[0].endswith("agents.x-k8s.io")}  # of a component, tested elsewhere
    assert own == rights
    refused = [use for use in cluster.uses(USER) if use.code == 403]  # an exhausted quota answers 403 as well
    assert [use for use in refused if (use.group, use.resource, use.verb) not in rights] == []


def test_a_tenant_leases_in_its_namespace_and_cannot_read_anothers_token(cluster: Cluster, world: World) -> None:
    world.start()
    rbac = client.RbacAuthorizationV1Api(cluster.client())
    with nodes(world), cluster.namespace("other") as other:
        world.pool(warm=1)
        world.ready("p", 1)
        for namespace, name in ((world.namespace, "tenant"), (other, "stranger")):
            role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "occamy-sandbox-tenant"}
            subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
            binding = {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]}
            rbac.create_namespaced_role_binding(namespace, binding)
        tenant = cluster.client(cluster.service_account(world.namespace, "tenant"))
        stranger = cluster.client(cluster.service_account(other, "stranger"))
        body = {
            "apiVersion": "occamy.dev/v1alpha1",
            "kind": "SandboxLease",
            "metadata": {"name": "mine"},
            "spec": {"pool": "p", "owner": {"run": "r"}, "ttlSeconds": 60},
        }
        call(tenant, "POST", world.path("sandboxleases"), body)
        status = world.until("mine", "Bound")
        token = world.path("secrets", status["tokenSecret"])
        assert call(tenant, "GET", token)["data"]["token"]
        refused: list[tuple[client.ApiClient, str, str, Any]] = [
            (stranger, "GET", token, None),
            (stranger, "POST", world.path("sandboxleases"), body),
            (tenant, "GET", world.path("secrets"), None),
            (tenant, "GET", world.path("pods"), None),
            (tenant, "PATCH", world.path("sandboxleases", "mine", "status"), {"status": {"phase": "Bound"}}),
            (tenant, "POST", world.path("sandboxpools"), {}),
            (tenant, "PATCH", world.path("sandboxpools", "p"), {"spec": {"max": 99}}),
            (tenant, "DELETE", world.path("networkpolicies", status["tokenSecret"]), None),
            (tenant, "DELETE", world.path("pods", status["pod"]), None),
        ]
        for who, method, path, content in refused:
            with pytest.raises(ApiException) as problem:
                call(who, method, path, content)
            assert problem.value.status == 403, (method, path)
