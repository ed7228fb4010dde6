"""What must hold of every overlay, whatever else changes in it: who runs as what, how long, within which limits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import occamy
from operators.sandbox.hardening import violations
from operators.sandbox.models import PoolSpec
from operators.sandbox.resources import pod as sandbox_pod
from operators.sandbox.sizing import demands, quantity
from operators.sandbox.views import LEASE_UID_LABEL

from .ends import pool_of
from .reachability import selects
from .rendering import OVERLAYS, ROOT, Resource, containers, key, of_kind, overlay, pods, with_components

OURS = {f"occamy-{path.parent.name}" for path in (ROOT / "images").glob("*/Dockerfile")} | {"occamy-trainer-gpu"}
TOKENS = {"Deployment occamy-system/occamy-sandbox-operator", "Deployment occamy/occamy-engine-router"}
"""Who talks to the API server. Nobody else has a token."""


def weaknesses(pod: Resource) -> list[str]:
    """Every way in which a pod has more rights, or fewer bounds, than ours may."""
    context = pod.get("securityContext", {})
    found = [f"{field} is on" for field in ("hostNetwork", "hostPID", "hostIPC") if pod.get(field)]
    found += [] if context.get("runAsNonRoot") is True and context.get("runAsUser", 0) >= 10000 else ["may be root"]
    found += [] if context.get("seccompProfile") == {"type": "RuntimeDefault"} else ["seccomp is not RuntimeDefault"]
    found += [f"volume {v['name']} is of the node" for v in pod.get("volumes", ()) if "hostPath" in v]
    found += [
        f"volume {v['name']} has no size" for v in pod.get("volumes", ()) if v.get("emptyDir", {"sizeLimit": 1}) == {}
    ]
    for container in containers(pod):
        own = container.get("securityContext", {})
        limits = container.get("resources", {}).get("limits", {})
        checks = {
            "may gain privileges": own.get("allowPrivilegeEscalation") is not False,
            "has a writable root": own.get("readOnlyRootFilesystem") is not True,
            "keeps capabilities": own.get("capabilities") != {"drop": ["ALL"]},
            "is privileged": bool(own.get("privileged")),
            "has limits of cpu and memory missing": not {"cpu", "memory"} <= set(limits),
            "publishes a port of the node": any("hostPort" in p for p in container.get("ports", ())),
        }
        found += [f"{container['name']} {words}" for words, weak in checks.items() if weak]
    return found


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_pod_is_hardened_and_bounded(name: str) -> None:
    found = dict(pods(overlay(name)))
    assert len(found) >= 2
    assert {k: weaknesses(pod) for k, pod in found.items() if weaknesses(pod)} == {}


def test_the_check_of_pods_finds_each_weakness() -> None:
    weak = {
        "hostNetwork": True,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 0},
        "volumes": [{"name": "etc", "hostPath": {"path": "/etc"}}, {"name": "tmp", "emptyDir": {}}],
        "containers": [{"name": "c", "securityContext": {"privileged": True}, "ports": [{"hostPort": 80}]}],
    }
    assert weaknesses(weak) == [
        "hostNetwork is on",
        "may be root",
        "seccomp is not RuntimeDefault",
        "volume etc is of the node",
        "volume tmp has no size",
        "c may gain privileges",
        "c has a writable root",
        "c keeps capabilities",
        "c is privileged",
        "c has limits of cpu and memory missing",
        "c publishes a port of the node",
    ]


@pytest.mark.parametrize("name", OVERLAYS)
def test_only_who_talks_to_the_api_server_has_a_token(name: str) -> None:
    resources = overlay(name)
    accounts = {
        (r["metadata"]["namespace"], r["metadata"]["name"]): r.get("automountServiceAccountToken", True)
        for r in of_kind(resources, "ServiceAccount")
    }
    with_token = set()
    for place, pod in pods(resources):
        namespace = place.split()[1].split("/")[0]
        default = accounts.get((namespace, pod.get("serviceAccountName", "default")), True)
        if pod.get("automountServiceAccountToken", default):
            with_token.add(place)
    assert with_token == TOKENS & set(dict(pods(resources)))


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_ends_by_itself_has_a_deadline(name: str) -> None:
    resources = overlay(name)
    jobs = [r["spec"]["jobTemplate"]["spec"] for r in of_kind(resources, "CronJob")]
    for runtime in of_kind(resources, "ClusterTrainingRuntime"):
        jobs += [job["template"]["spec"] for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]]
    assert jobs
    assert all(0 < job["activeDeadlineSeconds"] <= 7 * 86400 for job in jobs)
    assert all(r["spec"]["concurrencyPolicy"] == "Forbid" for r in of_kind(resources, "CronJob"))


def images(resources: list[Resource]) -> dict[str, str]:
    """Every image, with who runs it."""
    found = {f"{k} {c['name']}": c["image"] for k, pod in pods(resources) for c in containers(pod)}
    return found | {key(r): r["spec"]["template"]["image"] for r in of_kind(resources, "SandboxPool")}


def unpinned(image: str) -> str | None:
    """Why an image may not be deployed: it is not ours, or not pinned to one build of this version."""
    name, digest = re.fullmatch(r"([^@]+)(@sha256:[0-9a-f]{64})?", image).groups()  # type: ignore[union-attr]
    repository, _, tag = name.rpartition("/")[2].partition(":")
    if repository not in OURS:
        return f"{image} is not one of ours"
    if digest is None and tag != occamy.__version__:
        return f"{image} is not pinned to {occamy.__version__}"
    return None


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_image_is_ours_and_pinned(name: str) -> None:
    found = images(overlay(name))
    assert {k: unpinned(image) for k, image in found.items() if unpinned(image)} == {}
    if name != "kind":
        assert {k: i for k, i in found.items() if not i.startswith("registry.example.com/occamy/")} == {}


def test_an_image_of_somebody_else_or_without_a_pin_is_found() -> None:
    version = occamy.__version__
    assert unpinned(f"r.example/occamy/occamy-engine@sha256:{'0' * 64}") is None
    assert unpinned(f"occamy-engine:{version}") is None
    assert [unpinned(i) for i in ("occamy-engine", "occamy-engine:latest", f"busybox:{version}")] == [
        f"occamy-engine is not pinned to {version}",
        f"occamy-engine:latest is not pinned to {version}",
        f"busybox:{version} is not one of ours",
    ]


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_sandboxes_of_every_pool_are_hardened_and_fit_the_quota(name: str) -> None:
    resources = overlay(name)
    quota = of_kind(resources, "ResourceQuota")[0]["spec"]["hard"]
    pools = of_kind(resources, "SandboxPool")
    assert pools
    for resource in pools:
        assert violations(sandbox_pod(pool_of(resource), 0, "nonce", None, 0.0)["spec"]) == []
    full = [d for d in demands(resources) if d.name.endswith(", at most")]
    needed = {
        "pods": sum(d.pods for d in full),
        "secrets": sum(d.pods for d in full),
        "limits.cpu": sum(d.cpu_limits for d in full),
        "limits.memory": sum(d.memory for d in full),
        "limits.ephemeral-storage": sum(d.disk for d in full),
    }
    assert {what: n for what, n in needed.items() if quantity(quota[what]) < n} == {}
    assert quota["persistentvolumeclaims"] == quota["services"] == "0"


def test_production_sandboxes_have_a_kernel_of_their_own() -> None:
    resources = overlay("production")
    classes = {r["metadata"]["name"]: r["handler"] for r in of_kind(resources, "RuntimeClass")}
    for pool in of_kind(resources, "SandboxPool"):
        template = pool["spec"]["template"]
        assert template["isolation"] == "gvisor"
        assert classes[template["runtimeClassName"]] == "runsc"


def test_the_component_agent_sandbox_hands_the_pools_over(tmp_path: Path) -> None:
    resources = with_components(tmp_path, "agent-sandbox")
    for pool in of_kind(resources, "SandboxPool"):
        assert PoolSpec.model_validate(pool["spec"]).backend.value == "agent-sandbox"
    granted = {g for r in of_kind(resources, "ClusterRole") for rule in r["rules"] for g in rule["apiGroups"]}
    assert "extensions.agents.x-k8s.io" in granted
    base = {g for r in of_kind(overlay("kind"), "ClusterRole") for rule in r["rules"] for g in rule["apiGroups"]}
    assert "extensions.agents.x-k8s.io" not in base, "only clusters with that controller need these rights"


def test_an_operator_of_one_namespace_has_no_right_elsewhere_whatever_makes_its_pods(tmp_path: Path) -> None:
    resources = with_components(tmp_path, "agent-sandbox", "one-namespace")
    operator = [
        r for r in of_kind(resources, "ClusterRoleBinding", "RoleBinding") if _binds(r, "occamy-sandbox-operator")
    ]
    assert {(r["kind"], r["metadata"].get("namespace"), r["roleRef"]["name"]) for r in operator} == {
        ("RoleBinding", "occamy-sandboxes", "occamy-sandbox-operator"),
        ("RoleBinding", "occamy-sandboxes", "occamy-sandbox-operator-agent-sandbox"),
    }


def _binds(binding: Resource, account: str) -> bool:
    return account in [subject["name"] for subject in binding["subjects"]]


@pytest.mark.parametrize("name", OVERLAYS)
def test_no_secret_is_in_git_and_nobody_may_do_everything(name: str) -> None:
    resources = overlay(name)
    assert of_kind(resources, "Secret") == []
    for role in of_kind(resources, "Role", "ClusterRole"):
        for rule in role["rules"]:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]], key(role)


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_namespace_enforces_the_restricted_standard(name: str) -> None:
    found = {n["metadata"]["name"]: n["metadata"]["labels"] for n in of_kind(overlay(name), "Namespace")}
    levels = {n: labels["pod-security.kubernetes.io/enforce"] for n, labels in found.items()}
    assert levels == dict.fromkeys(("occamy", "occamy-sandboxes", "occamy-system"), "restricted")
    assert [n for n, labels in found.items() if "occamy.dev/rollouts" in labels] == ["occamy"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_graders_reach_nothing_and_share_neither_image_nor_user_with_agents(name: str) -> None:
    pools = {p["metadata"]["name"]: p["spec"] for p in of_kind(overlay(name), "SandboxPool")}
    agents, graders = PoolSpec.model_validate(pools["cowork"]), PoolSpec.model_validate(pools["graders"])
    assert (graders.network.profile.value, graders.network.proxy, graders.network.allow) == ("none", None, ())
    assert agents.template.image.rpartition("/")[2].startswith("occamy-sandbox:")
    assert graders.template.image.rpartition("/")[2].startswith("occamy-grader:")
    assert (agents.template.user, graders.template.user) == (10001, 10002)


def drains(budget: Resource, labels: dict[str, str], replicas: int) -> bool:
    """Whether a budget covers pods with these labels, and lets a node with one of them be drained all the same."""
    spec = budget["spec"]
    return selects(spec["selector"], labels) and (
        spec.get("maxUnavailable", 0) >= 1 or spec.get("minAvailable", replicas) < replicas
    )


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_serves_from_several_pods_keeps_serving_while_nodes_are_drained(name: str) -> None:
    resources = overlay(name)
    budgets = of_kind(resources, "PodDisruptionBudget")
    for deployment in of_kind(resources, "Deployment"):
        labels, replicas = deployment["spec"]["template"]["metadata"]["labels"], deployment["spec"]["replicas"]
        if deployment["spec"].get("strategy", {}).get("type") == "Recreate":
            continue  # one operator, never two: draining its node replaces it
        assert [b for b in budgets if drains(b, labels, replicas)], key(deployment)


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_drain_waits_for_leased_sandboxes_and_for_no_idle_ones(name: str) -> None:
    resources = overlay(name)
    budgets = [b["spec"] for b in of_kind(resources, "PodDisruptionBudget") if b["metadata"]["name"] == "leased"]
    assert len(budgets) == 1
    assert budgets[0]["minAvailable"] > max(p["spec"]["max"] for p in of_kind(resources, "SandboxPool"))
    for resource in of_kind(resources, "SandboxPool"):
        idle = sandbox_pod(pool_of(resource), 0, "nonce", None, 0.0)["metadata"]["labels"]
        assert not selects(budgets[0]["selector"], idle)
        assert selects(budgets[0]["selector"], {**idle, LEASE_UID_LABEL: "u"})
