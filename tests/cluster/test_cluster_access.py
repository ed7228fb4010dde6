"""RBAC denies, identities are apart, and the audit log tells who used which verbs. Runs on every provider."""

from __future__ import annotations

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from .cluster import Cluster, Use, eventually

READER = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "list"]}


def grant(cluster: Cluster, namespace: str, rule: dict[str, object], subject: dict[str, str]) -> None:
    """A role with one rule in the namespace, bound to one subject, once the API server's authorizer knows of it."""
    api = client.RbacAuthorizationV1Api(cluster.client())
    api.create_namespaced_role(namespace, {"metadata": {"name": "r"}, "rules": [rule]})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"}
    api.create_namespaced_role_binding(namespace, {"metadata": {"name": "r"}, "roleRef": role, "subjects": [subject]})
    names = {"ServiceAccount": f"system:serviceaccount:{namespace}:{subject['name']}"}
    who = (
        {"groups": [subject["name"]]}
        if subject["kind"] == "Group"
        else {"user": names.get(subject["kind"], subject["name"])}
    )
    what = {"namespace": namespace, "verb": rule["verbs"][0], "resource": rule["resources"][0]}
    review = {"spec": {**who, "resourceAttributes": what}}
    reviews = client.AuthorizationV1Api(cluster.client())
    eventually(lambda: reviews.create_subject_access_review(review).status.allowed)


def person(name: str) -> dict[str, str]:
    return {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": name}


def refused(status: int, call: object, *arguments: object) -> str:
    """The message of the refusal."""
    with pytest.raises(ApiException) as problem:
        call(*arguments)  # type: ignore[operator]
    assert problem.value.status == status
    return str(problem.value.body)


def test_an_identity_may_do_what_it_was_granted_and_nothing_else(cluster: Cluster, namespace: str) -> None:
    admin = client.CoreV1Api(cluster.client())
    admin.create_namespaced_secret(namespace, {"metadata": {"name": "s"}, "stringData": {"k": "v"}})
    alice = client.CoreV1Api(cluster.client(cluster.identity("alice")))

    message = refused(403, alice.read_namespaced_secret, "s", namespace)
    assert 'User \\"alice\\" cannot get resource \\"secrets\\"' in message

    grant(cluster, namespace, READER, person("alice"))
    assert alice.read_namespaced_secret("s", namespace).data == {"k": "dg=="}
    refused(403, alice.delete_namespaced_secret, "s", namespace)
    refused(403, alice.read_namespaced_secret, "s", "kube-system")
    refused(403, alice.list_namespace)


def test_two_identities_and_a_group_are_apart(cluster: Cluster, namespace: str) -> None:
    grant(cluster, namespace, READER, person("team") | {"kind": "Group"})
    inside = client.CoreV1Api(cluster.client(cluster.identity("carol", ["staff", "team"])))
    outside = client.CoreV1Api(cluster.client(cluster.identity("team", ["staff"])))
    assert inside.list_namespaced_secret(namespace).kind == "SecretList"
    assert 'User \\"team\\"' in refused(403, outside.list_namespaced_secret, namespace)


def test_a_service_account_acts_as_itself(cluster: Cluster, namespace: str) -> None:
    kubeconfig = cluster.service_account(namespace, "robot")
    robot = client.CoreV1Api(cluster.client(kubeconfig))
    assert f"system:serviceaccount:{namespace}:robot" in refused(403, robot.list_namespaced_secret, namespace)
    grant(cluster, namespace, READER, {"kind": "ServiceAccount", "name": "robot", "namespace": namespace})
    robot.list_namespaced_secret(namespace)
    assert cluster.service_account(namespace, "robot") != kubeconfig


def test_nobody_becomes_an_administrator_by_a_signed_request(cluster: Cluster) -> None:
    with pytest.raises(ApiException) as problem:
        cluster.identity("mallory", ["system:masters"])
    assert problem.value.status == 403
    kubeconfig = cluster.control_plane.kubeconfig_for("mallory", "mallory", ("system:masters",))
    assert client.CoreV1Api(cluster.client(kubeconfig)).list_namespace().items


def test_the_audit_log_names_verb_resource_and_outcome(cluster: Cluster, namespace: str) -> None:
    user = f"system:serviceaccount:{namespace}:robot"
    assert cluster.uses(user) == []
    robot = client.CoreV1Api(cluster.client(cluster.service_account(namespace, "robot")))
    rule = {"apiGroups": [""], "resources": ["pods", "pods/status"], "verbs": ["create", "get", "patch"]}
    grant(cluster, namespace, rule, {"kind": "ServiceAccount", "name": "robot", "namespace": namespace})
    robot.create_namespaced_pod(
        namespace, {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    )
    robot.patch_namespaced_pod_status("p", namespace, {"status": {"message": "m"}})
    refused(403, robot.delete_namespaced_pod, "p", namespace)

    path = f"/api/v1/namespaces/{namespace}/pods"
    eventually(lambda: len(cluster.uses(user)) == 3)
    assert cluster.uses(user) == [
        Use(user, "create", "", "pods", namespace, "p", 201, path),
        Use(user, "patch", "", "pods/status", namespace, "p", 200, f"{path}/p/status"),
        Use(user, "delete", "", "pods", namespace, "p", 403, f"{path}/p"),
    ]
