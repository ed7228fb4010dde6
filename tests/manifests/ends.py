"""Everything that runs with an overlay, as ends of connections, and the policies that hold then."""

from __future__ import annotations

from typing import Any

from operators.sandbox import resources as made
from operators.sandbox.views import Pod, Pool

from .reachability import End, Policy
from .rendering import Resource, of_kind

ALLOWED = {"occamy.dev/rollouts": "allowed"}
ROLLOUT = {"occamy.dev/role": "rollout"}
OUTSIDE = {
    "team rollout": End("team", ROLLOUT, ALLOWED),
    "team pod": End("team", {"app": "x"}, ALLOWED),
    "stranger": End("other", {"app": "x"}),
    "impostor": End("other", ROLLOUT),
    "mlflow": End("mlflow", {"app": "mlflow"}),
    "dns": End("kube-system", {"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"}),
    "prometheus": End("monitoring", {"app": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"}),
    "api server": End(address="10.96.0.1"),
    "cloud credentials": End(address="169.254.169.254"),
    "internet": End(address="203.0.113.7"),
}
"""Pods and addresses that are not of the overlay."""


def pool_of(resource: Resource) -> Pool:
    return Pool.parse({**resource, "metadata": {**resource["metadata"], "uid": "0", "resourceVersion": "1"}})


def sandbox(pool: Pool, slot: int) -> tuple[dict[str, Any], Policy]:
    """A pod of the pool and its own policy, as the operator makes them."""
    pod = made.pod(pool, slot, f"nonce-{pool.name}-{slot}", None, 0.0)
    now = {"uid": f"{slot}", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return pod, made.policy(pool, Pod.parse({**pod, "metadata": pod["metadata"] | now}))


def ends_and_policies(resources: list[Resource]) -> tuple[dict[str, End], list[Policy]]:
    """Everything that runs with an overlay, and the policies that hold then."""
    spaces = {n["metadata"]["name"]: n["metadata"]["labels"] for n in of_kind(resources, "Namespace")}
    spaces = {name: {**labels, "kubernetes.io/metadata.name": name} for name, labels in spaces.items()}
    policies: list[Policy] = of_kind(resources, "NetworkPolicy")
    pools = {p["metadata"]["name"]: pool_of(p) for p in of_kind(resources, "SandboxPool")}
    ends = dict(OUTSIDE)
    for name, pool, slot in (("sandbox", "cowork", 0), ("sandbox 2", "cowork", 1), ("grader", "graders", 0)):
        pod, policy = sandbox(pools[pool], slot)
        meta = pod["metadata"]
        ends[name] = End(meta["namespace"], meta["labels"], spaces[meta["namespace"]])
        policies = [*policies, policy]
    names = {"occamy-engine": "engine", "occamy-engine-router": "router", "occamy-sandbox-operator": "operator"}
    for deployment in of_kind(resources, "Deployment"):
        meta, template = deployment["metadata"], deployment["spec"]["template"]["metadata"]
        ends[names[meta["name"]]] = End(meta["namespace"], template["labels"], spaces[meta["namespace"]])
    (cron,) = of_kind(resources, "CronJob")
    labels = cron["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
    ends["retraining"] = End("occamy", labels, spaces["occamy"])
    ends["rollout"] = End("occamy", ROLLOUT, spaces["occamy"])
    ends["stage"] = End("occamy", {"app": "stage"}, spaces["occamy"])
    ends["unknown"] = End("occamy-sandboxes", {"app": "planted"}, spaces["occamy-sandboxes"])
    return ends, policies
