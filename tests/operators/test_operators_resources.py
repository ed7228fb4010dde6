"""Pods are hardened and closed whatever their pool says; weakening any guarantee is noticed before it is sent."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from made_sandboxes import NOW, lease, pod, pool

from operators.sandbox import resources
from operators.sandbox.hardening import NotHardened, require_hardened, violations
from operators.sandbox.resources import GRACE_S
from operators.sandbox.views import Pool


def made(held: bool = False, **spec: Any) -> dict[str, Any]:
    return resources.pod(pool(**spec), 3, "abc", lease() if held else None, NOW)


def test_a_warm_pod_is_named_after_its_slot_and_owned_by_its_pool() -> None:
    body = made()
    assert body["metadata"]["name"] == "p-3"
    assert [o["kind"] for o in body["metadata"]["ownerReferences"]] == ["SandboxPool"]
    assert "occamy.dev/lease-uid" not in body["metadata"]["labels"]
    assert body["spec"]["activeDeadlineSeconds"] == 600 + 21600 + 14400 + GRACE_S


def test_a_pod_for_a_lease_is_owned_by_it_from_birth_and_ends_with_it() -> None:
    meta, spec = made(held=True)["metadata"], made(held=True)["spec"]
    assert [(o["kind"], o["uid"]) for o in meta["ownerReferences"]] == [("SandboxLease", "uid-l")]
    assert meta["labels"]["occamy.dev/lease-uid"] == "uid-l"
    assert spec["activeDeadlineSeconds"] == 590 + GRACE_S


def test_a_pod_cannot_start_before_its_own_secret_is_there() -> None:
    token = next(v for v in made()["spec"]["volumes"] if v["name"] == "token")
    assert token["secret"]["secretName"] == "p-3-abc" and "optional" not in token["secret"]


def test_overrides_replace_variables_by_name() -> None:
    wants = lease(overrides={"env": [{"name": "A", "value": "2"}], "resources": {"cpu": "2", "memory": "1Gi"}})
    template = {"image": "s:1", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]}
    container = resources.pod(pool(template=template), 0, "n", wants, NOW)["spec"]["containers"][0]
    assert container["env"] == [{"name": "A", "value": "2"}, {"name": "B", "value": "1"}]
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "1Gi", "ephemeral-storage": "4Gi"}


SPECS: list[dict[str, Any]] = [
    {},
    {"network": {"profile": "none", "hosts": [{"name": "proxy", "ip": "10.0.0.9"}]}},
    {"template": {"image": "s:1", "isolation": "kata", "runtimeClassName": "kata", "command": ["serve"]}},
    {"template": {"image": "s:1", "volumes": [{"name": "cache", "mountPath": "/cache", "size": "1Gi"}]}},
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("held", [False, True])
def test_every_pod_is_hardened(spec: dict[str, Any], held: bool) -> None:
    require_hardened(made(held, **spec))


def weaken(path: str, value: Any) -> dict[str, Any]:
    body = copy.deepcopy(made())
    at = body["spec"]
    *folders, last = path.split("/")
    for folder in folders:
        at = at[int(folder)] if folder.isdecimal() else at.setdefault(folder, {})
    if value is None:
        del at[last]
    else:
        at[last] = value
    return body


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("hostNetwork", True, "hostNetwork"),
        ("hostPID", True, "hostPID"),
        ("automountServiceAccountToken", None, "token"),
        ("automountServiceAccountToken", True, "token"),
        ("securityContext/runAsNonRoot", False, "root"),
        ("securityContext/seccompProfile", {"type": "Unconfined"}, "seccomp"),
        ("dnsPolicy", "ClusterFirst", "name server"),
        ("activeDeadlineSeconds", None, "deadline"),
        ("volumes", [{"name": "v", "hostPath": {"path": "/"}}], "of the node"),
        ("containers/0/securityContext/privileged", True, "privileged"),
        ("containers/0/securityContext/allowPrivilegeEscalation", True, "gain privileges"),
        ("containers/0/securityContext/readOnlyRootFilesystem", False, "writable"),
        ("containers/0/securityContext/capabilities", {"drop": ["ALL"], "add": ["SYS_ADMIN"]}, "capabilities"),
        ("containers/0/securityContext/runAsUser", 0, "another user"),
        ("containers/0/securityContext/seccompProfile", {"type": "Unconfined"}, "seccomp"),
        ("containers/0/resources/limits/memory", None, "no limit of memory"),
        ("containers/0/ports", [{"containerPort": 1, "hostPort": 1}], "port 1 of the node"),
        ("initContainers", [{"name": "init"}], "init: may gain privileges"),
    ],
)
def test_every_weakening_is_found(path: str, value: Any, words: str) -> None:
    body = weaken(path, value)
    assert any(words in found for found in violations(body["spec"]))
    with pytest.raises(NotHardened, match="p-3"):
        require_hardened(body)


def test_the_policy_denies_all_but_the_proxy_and_no_name_server_is_reachable() -> None:
    policy = resources.policy(pool(), pod(0))
    assert policy["spec"]["podSelector"] == {"matchLabels": {"occamy.dev/nonce": "n0"}}
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"] and policy["spec"]["ingress"] == []
    ports = [p["port"] for rule in policy["spec"]["egress"] for p in rule["ports"]]
    assert ports == [8080] and all("to" in rule for rule in policy["spec"]["egress"])
    assert policy["metadata"]["ownerReferences"][0] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "p-0",
        "uid": "pod-0",
    }


@pytest.mark.parametrize(
    "known", [None, replace(pool(), template="newer"), replace(pool(), spec=None, template="")], ids=str
)
def test_a_policy_whose_template_is_not_known_any_more_opens_nothing(known: Pool | None) -> None:
    """Its pool was edited, broken or deleted, and a lease holds the pod still."""
    policy = resources.policy(known, pod(0))
    assert policy["spec"]["ingress"] == policy["spec"]["egress"] == []
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["metadata"] == resources.policy(pool(), pod(0))["metadata"]


def test_profile_none_reaches_nothing_and_an_allow_list_what_it_names() -> None:
    assert resources.egress(pool(network={"profile": "none"}).spec.network) == []  # type: ignore[union-attr]
    peers = {"proxy": {"podLabels": {"a": "b"}, "namespaceLabels": {"c": "d"}, "ports": [1]}}
    listed = pool(network={"profile": "allow-list", "allow": [{"cidr": "10.0.0.0/8", "ports": [2]}], **peers})
    assert listed.spec is not None
    assert resources.egress(listed.spec.network) == [
        {
            "to": [
                {
                    "podSelector": {"matchLabels": {"a": "b"}},
                    "namespaceSelector": {"matchLabels": {"c": "d"}},
                }
            ],
            "ports": [{"protocol": "TCP", "port": 1}],
        },
        {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"protocol": "TCP", "port": 2}]},
    ]


def test_only_named_clients_may_call_the_agent() -> None:
    closed = pool(network={"profile": "none", "clients": [{"podLabels": {"app": "rollout"}}]})
    assert closed.spec is not None
    assert resources.ingress(closed.spec.network, 8750) == [
        {
            "from": [{"podSelector": {"matchLabels": {"app": "rollout"}}}],
            "ports": [{"protocol": "TCP", "port": 8750}],
        }
    ]
