"""Builds what belongs to a sandbox: its pod, its network policy, the secret with its token. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from operators.sandbox.models import GROUP, VERSION, Overrides
from operators.sandbox.template import Network, Peer, Profile, Resources, Target, Template
from operators.sandbox.views import (
    DEADLINE_ANNOTATION,
    LAUNCH_ANNOTATION,
    LEASE_ANNOTATION,
    LEASE_UID_LABEL,
    NONCE_LABEL,
    POOL_LABEL,
    POOL_UID_LABEL,
    TEMPLATE_LABEL,
    Lease,
    Pod,
    Pool,
    moment,
)

CONTAINER = "agent"
TOKEN_FOLDER = "/run/occamy"
"""The in-pod agent reads its token from the file `token` in here."""
GRACE_S = 30
"""From the deadline of a lease until the node kills its pod, whoever else is alive. Our choice."""
STOP_S = 5
"""Between the signal to end and the kill. Our choice."""


def pod(pool: Pool, slot: int, nonce: str, lease: Lease | None, now: float) -> dict[str, Any]:
    """A pod of the pool: warm, or for the lease that waits for it.

    It owns its policy and its secret, and cannot start before the secret is there: the policy is made in between.
    """
    assert pool.spec is not None
    spec = pool.spec
    name = f"{pool.name}-{slot}"
    labels = {POOL_LABEL: pool.name, POOL_UID_LABEL: pool.uid, TEMPLATE_LABEL: pool.template, NONCE_LABEL: nonce}
    meta: dict[str, Any] = {"name": name, "namespace": pool.namespace, "labels": labels}
    if lease is None:
        meta["ownerReferences"] = [owner("SandboxPool", pool.name, pool.uid)]
        seconds = spec.start_seconds + spec.idle_seconds + spec.max_lease_seconds + GRACE_S
    else:
        meta = claimed(meta, lease)
        meta["annotations"][LAUNCH_ANNOTATION] = "cold"
        seconds = max(1, int(lease.latest() - now)) + GRACE_S
    overrides = (lease.spec.overrides if lease and lease.spec else None) or Overrides()
    body = pod_spec(spec.template, spec.network, overrides)
    body["activeDeadlineSeconds"] = seconds
    container = body["containers"][0]
    container["ports"] = [{"containerPort": spec.template.port, "name": CONTAINER}]
    container["readinessProbe"] = {
        "httpGet": {"path": "/healthz", "port": spec.template.port},
        "periodSeconds": 1,
        "failureThreshold": 3,
    }
    container["volumeMounts"].append({"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True})
    body["volumes"].append({"name": "token", "secret": {"secretName": f"{name}-{nonce}", "defaultMode": 0o440}})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": body}


def pod_spec(template: Template, network: Network, overrides: Overrides) -> dict[str, Any]:
    """The hardened specification that every backend uses: one container, a workspace, no way up and no token."""
    volumes = [("workspace", template.workspace, template.workspace_size), ("tmp", "/tmp", "1Gi")]
    volumes += [(v.name, v.mount_path, v.size) for v in template.volumes]
    env = {e.name: e.value for e in (*template.env, *overrides.env)}
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": template.image,
        "imagePullPolicy": "IfNotPresent",
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "resources": _resources(overrides.resources or template.resources),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": name, "mountPath": path} for name, path, _ in volumes],
        "workingDir": template.workspace,
    }
    if template.command:
        container["command"] = list(template.command)
    body: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_S,
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": template.user,
            "runAsGroup": template.user,
            "fsGroup": template.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": name, "emptyDir": {"sizeLimit": size}} for name, _, size in volumes],
    }
    if network.hosts:
        body["hostAliases"] = [{"ip": host.ip, "hostnames": [host.name]} for host in network.hosts]
    if template.runtime_class_name:
        body["runtimeClassName"] = template.runtime_class_name
    return body


def claimed(meta: dict[str, Any], lease: Lease) -> dict[str, Any]:
    """Metadata of a pod that the lease holds: it goes with the lease, and outlives its pool."""
    return {
        **meta,
        "labels": {**meta.get("labels", {}), LEASE_UID_LABEL: lease.uid},
        "annotations": {LEASE_ANNOTATION: lease.name, DEADLINE_ANNOTATION: moment(lease.latest())},
        "ownerReferences": [owner("SandboxLease", lease.name, lease.uid)],
    }


def claim_patch(target: Pod, lease: Lease, now: float) -> dict[str, Any]:
    """The merge patch that swaps a warm pod to a lease, if it still is the version that was observed."""
    meta = claimed({"uid": target.uid, "resourceVersion": str(target.version)}, lease)
    left = int(now - (target.started or target.created)) + max(1, int(lease.latest() - now)) + GRACE_S
    limit = left if target.limit is None else min(left, target.limit)  # the API server lets it shrink only
    return {"metadata": meta, "spec": {"activeDeadlineSeconds": limit}}


def policy(pool: Pool | None, target: Pod) -> dict[str, Any]:
    """The default-deny policy of one pod, owned by it and selecting it alone.

    It opens what the pool's template opens that the pod was made from; where that is not known any more, nothing.
    """
    spec = pool.spec if pool is not None and pool.template == target.template else None
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _part_of(target),
        "spec": {
            "podSelector": {"matchLabels": {NONCE_LABEL: target.nonce}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress(spec.network, spec.template.port) if spec else [],
            "egress": egress(spec.network) if spec else [],
        },
    }


def egress(network: Network) -> list[dict[str, Any]]:
    """What may be connected to. No name server is among it."""
    targets: Iterable[Target] = () if network.profile is Profile.none else network.allow
    if network.proxy:
        targets = (network.proxy, *targets)
    return [{"to": [_peer(target)], "ports": [_port(port) for port in target.ports]} for target in targets]


def ingress(network: Network, port: int) -> list[dict[str, Any]]:
    """Who may call the in-pod agent."""
    if not network.clients:
        return []
    return [{"from": [_peer(peer) for peer in network.clients], "ports": [_port(port)]}]


def secret(target: Pod, token: str) -> dict[str, Any]:
    """The token of one pod, owned by it. Pods are not reused, so it is the token of one lease."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": _part_of(target),
        "stringData": {"token": token},
    }


def owner(kind: str, name: str, uid: str) -> dict[str, Any]:
    """An owner reference to one of our resources."""
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "name": name, "uid": uid, "controller": True}


def _part_of(target: Pod) -> dict[str, Any]:
    pool = target.name.rpartition("-")[0]
    return {
        "name": f"{target.name}-{target.nonce}",
        "namespace": target.namespace,
        "labels": {POOL_LABEL: pool, POOL_UID_LABEL: target.pool_uid, NONCE_LABEL: target.nonce},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": target.name, "uid": target.uid}],
    }


def _resources(resources: Resources) -> dict[str, Any]:
    limits = {"cpu": resources.cpu, "memory": resources.memory, "ephemeral-storage": resources.ephemeral_storage}
    return {"limits": limits, "requests": {**limits, "cpu": resources.cpu_request or resources.cpu}}


def _peer(peer: Peer) -> dict[str, Any]:
    if peer.cidr is not None:
        return {"ipBlock": {"cidr": peer.cidr}}
    out: dict[str, Any] = {"podSelector": {"matchLabels": dict(peer.pod_labels or {})}}
    if peer.namespace_labels is not None:
        out["namespaceSelector"] = {"matchLabels": dict(peer.namespace_labels)}
    return out


def _port(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}
