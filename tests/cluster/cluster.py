"""What a test sees of a cluster, whichever provider runs it: identities, namespaces, clients, who used which verbs."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from pytest_kubernetes.providers.base import AClusterManager

from .certificates import client_entry, new_key, signing_request, write_kubeconfig
from .control_plane import ControlPlane
from .daemons import PATIENCE_S

T = TypeVar("T")

IDENTITY_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Use:
    """One request in the audit log."""

    user: str
    verb: str
    group: str
    """API group; empty for the core group."""
    resource: str
    """Plural, with `/subresource` where there is one; empty for addresses that are no resources."""
    namespace: str
    name: str
    code: int
    """HTTP status of the answer."""
    path: str


@dataclass
class Cluster:
    """A running cluster."""

    manager: AClusterManager
    """The provider; `control_plane` where a test needs more than every provider can do."""
    folder: Path
    """Kubeconfigs of identities are written here."""
    _clients: dict[Path, client.ApiClient] = field(default_factory=dict)

    @property
    def admin(self) -> Path:
        """Kubeconfig that may do everything."""
        found: Path | None = self.manager.kubeconfig
        assert found is not None
        return found

    @property
    def control_plane(self) -> ControlPlane:
        """The local control plane. Skips on other providers, whose API server is not ours to stop or to read."""
        if not isinstance(self.manager, ControlPlane):
            pytest.skip(f"needs the local control plane, not {type(self.manager).__name__}: run without --k8s-provider")
        return self.manager

    def client(self, kubeconfig: Path | None = None) -> client.ApiClient:
        """Client for a kubeconfig, the admin's by default; closed with the cluster."""
        path = kubeconfig or self.admin
        if path not in self._clients:
            self._clients[path] = config.new_client_from_config(config_file=str(path))
        return self._clients[path]

    def identity(self, user: str, groups: Sequence[str] = ()) -> Path:
        """Kubeconfig with a client certificate for any user and groups, signed by the cluster itself.

        Works wherever `kubernetes.io/kube-apiserver-client` is signed, which is refused for `system:masters` alone.

        Raises:
            TimeoutError: the cluster signs no client certificates.
        """
        stem = f"identity-{secrets.token_hex(4)}"
        key = new_key(self.folder / f"{stem}.key")
        api = client.CertificatesV1Api(self.client())
        request = client.V1CertificateSigningRequest(
            metadata=client.V1ObjectMeta(name=stem),
            spec=client.V1CertificateSigningRequestSpec(
                request=base64.b64encode(signing_request(key, user, groups)).decode(),
                signer_name="kubernetes.io/kube-apiserver-client",
                usages=["client auth"],
                expiration_seconds=IDENTITY_SECONDS,
            ),
        )
        created = api.create_certificate_signing_request(request)
        try:
            approved = client.V1CertificateSigningRequestCondition(type="Approved", status="True", reason="Tests")
            created.status = client.V1CertificateSigningRequestStatus(conditions=[approved])
            api.replace_certificate_signing_request_approval(stem, created)
            signed = eventually(lambda: api.read_certificate_signing_request(stem).status.certificate)
        finally:
            api.delete_certificate_signing_request(stem)
        pem = (self.folder / f"{stem}.key").read_bytes()
        return self._write(stem, client_entry(base64.b64decode(signed), pem))

    def service_account(self, namespace: str, name: str, seconds: int = IDENTITY_SECONDS) -> Path:
        """Kubeconfig with a bound token for a service account, which is made if it is not there."""
        api = client.CoreV1Api(self.client())
        try:
            api.create_namespaced_service_account(namespace, {"metadata": {"name": name}})
        except ApiException as problem:
            if problem.status != 409:
                raise
        wanted = {"spec": {"expirationSeconds": seconds, "audiences": []}}
        token = api.create_namespaced_service_account_token(name, namespace, wanted).status.token
        return self._write(f"{namespace}-{name}-{secrets.token_hex(4)}", {"token": token})

    @contextmanager
    def namespace(self, prefix: str = "test") -> Iterator[str]:
        """A fresh namespace that takes pods; deleted at the end, without waiting for it."""
        api = client.CoreV1Api(self.client())
        name = f"{prefix}-{secrets.token_hex(4)}"
        api.create_namespace({"metadata": {"name": name}})
        try:
            eventually(lambda: _takes_pods(api, name))
            yield name
        finally:
            api.delete_namespace(name)

    def uses(self, user: str | None = None) -> list[Use]:
        """Requests in the audit log so far, in order, of one user or of all. Skips on other providers."""
        seen: dict[str, Use] = {}
        for line in self.control_plane.audit_log.read_text().splitlines():
            event = json.loads(line)
            if user in (None, event["user"]["username"]):
                seen[event["auditID"]] = _use(event)
        return list(seen.values())

    def close(self) -> None:
        """Close the clients."""
        for each in self._clients.values():
            each.close()

    def _write(self, stem: str, user: dict[str, str]) -> Path:
        known = yaml.safe_load(self.admin.read_text())
        current = next(c["context"] for c in known["contexts"] if c["name"] == known["current-context"])
        cluster = next(c["cluster"] for c in known["clusters"] if c["name"] == current["cluster"])
        return write_kubeconfig(self.folder / f"{stem}.kubeconfig", cluster, user)


def _takes_pods(api: client.CoreV1Api, namespace: str) -> bool:
    """Whether the default service account is there, with its token where the server's release gives it one."""
    pod = {"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}
    try:
        return bool(api.create_namespaced_pod(namespace, pod, dry_run="All"))
    except ApiException as problem:
        if problem.status not in (403, 500):
            raise
        return False


def eventually(ask: Callable[[], T], seconds: float = PATIENCE_S) -> T:
    """The first answer that is true. The time bounds a hang, and decides nothing on a slow machine.

    Raises:
        TimeoutError: there was none in that time. The message holds the last answer.
    """
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {answer!r} after {seconds} s")
        time.sleep(0.05)
    return answer


def _use(event: dict[str, Any]) -> Use:
    target = event.get("objectRef", {})
    subresource = f"/{target['subresource']}" if target.get("subresource") else ""
    return Use(
        user=event["user"]["username"],
        verb=event["verb"],
        group=target.get("apiGroup", ""),
        resource=target.get("resource", "") + subresource,
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=event.get("responseStatus", {}).get("code", 0),
        path=event["requestURI"],
    )
