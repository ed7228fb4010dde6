"""etcd, kube-apiserver and kube-controller-manager on loopback, as one more provider of pytest-kubernetes."""

from __future__ import annotations

import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from pytest_kubernetes.options import ClusterOptions
from pytest_kubernetes.providers.base import AClusterManager

from .assets import Assets
from .certificates import (
    Authority,
    Pair,
    client_entry,
    cluster_entry,
    new_key,
    write_kubeconfig,
    write_public_key,
)
from .daemons import PATIENCE_S, Daemon, free_port

SERVICE_RANGE = "10.96.0.0/16"
HOSTS = ("localhost", "127.0.0.1", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "10.96.0.1")
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "users": ["system:apiserver", "system:kube-controller-manager", "system:kube-scheduler"]},
        {"level": "None", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]},
        {"level": "Metadata"},
    ],
}
"""Who did what to which object, without bodies; the cluster's own parts are left out."""


class ControlPlane(AClusterManager):
    """A cluster without nodes: objects, RBAC, quotas, owners and garbage collection are real, pods are never run."""

    def __init__(self, assets: Assets, folder: Path) -> None:
        """Nothing is started yet. `folder` (absent or empty) takes keys, data, logs, the audit log, kubeconfigs."""
        self.assets = assets
        self.folder = folder
        self.started_s: float | None = None
        """Seconds that `create` took until the API server and the default service account were there."""
        self._daemons: dict[str, Daemon] = {}
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__("control-plane")
        self._cluster_options = ClusterOptions(self.cluster_name, kubeconfig_path=folder / "admin.kubeconfig")

    @classmethod
    def get_binary_name(cls) -> str:
        """The program that stands for this provider."""
        return "kube-apiserver"

    @property
    def _exec_path(self) -> Path:
        return self.assets.program(self.get_binary_name())

    @property
    def audit_log(self) -> Path:
        """One JSON object a line: who asked for what, and what came of it."""
        return self.folder / "audit.log"

    @property
    def server(self) -> str:
        """Address of the API server."""
        return f"https://127.0.0.1:{self._port}"

    def kubeconfig_for(self, name: str, user: str, groups: tuple[str, ...] = ()) -> Path:
        """Sign a certificate for any identity, `system:masters` too, and write `NAME.kubeconfig`. NAME is used once."""
        pair = self.authority.issue(name, user, groups)
        entry = client_entry(pair.certificate.read_bytes(), pair.key.read_bytes())
        cluster = cluster_entry(self.server, self.authority.pair.certificate.read_bytes())
        return write_kubeconfig(self.folder / f"{name}.kubeconfig", cluster, entry)

    def stop_api_server(self, crash: bool = False) -> None:
        """End the API server, in order or as with kill -9. etcd and the controllers go on."""
        server = self._daemons.pop("kube-apiserver")
        if crash:
            server.kill()
        else:
            server.stop()

    def start_api_server(self) -> None:
        """Start it at the same address, on the same data, and wait until it is ready."""
        self._start("kube-apiserver", *self._api_server_options)
        self._daemons["kube-apiserver"].wait_until(lambda: self._answers("/readyz"))

    def ready(self, timeout: int = 20) -> bool:
        """Whether the API server is ready and gives new pods an identity, within that many seconds."""
        if "kube-controller-manager" not in self._daemons:
            return False
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self._daemons["kube-controller-manager"].wait_until(lambda: self._answers(account), timeout)
        return self._answers("/readyz")

    def load_image(self, image: str) -> None:
        """Refused: no node, so nowhere to load it.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"cannot load {image}: this cluster has no node; use the fixture `node_cluster`")

    def _on_create(self, cluster_options: ClusterOptions, **kwargs: object) -> None:
        start = time.monotonic()
        self._port = free_port()
        self.authority = Authority(self.folder / "pki")
        self._admin = self.authority.issue("admin-probe", "admin", ("system:masters",))
        self.kubeconfig_for("admin", "admin", ("system:masters",))
        etcd_port, etcd_pair, etcd_authority = self._start_etcd()
        self._api_server_options = self._options(etcd_port, etcd_pair, etcd_authority)
        self.start_api_server()
        manager = self.kubeconfig_for("controller-manager", "system:kube-controller-manager")
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={manager}",
            f"--authentication-kubeconfig={manager}",
            f"--authorization-kubeconfig={manager}",
            f"--root-ca-file={self.authority.pair.certificate}",
            f"--cluster-signing-cert-file={self.authority.pair.certificate}",
            f"--cluster-signing-key-file={self.authority.pair.key}",
            f"--service-account-private-key-file={self.folder / 'pki/accounts.key'}",
            "--use-service-account-credentials",
            "--kube-api-qps=500",  # 20 by itself: garbage collection would be what tests wait for
            "--kube-api-burst=1000",
            "--resource-quota-sync-period=5s",  # 5 minutes by itself, which a quota of a new kind may wait
            # It ends pods that were deleted before any node had them, by name: where none is ever scheduled, namesakes.
            "--controllers=*,-podgc",
            *self.quiet_options(),
        )
        self.ready(int(PATIENCE_S))
        self.started_s = time.monotonic() - start

    def quiet_options(self) -> list[str]:
        """Options of controller-manager and scheduler for a single copy that serves nothing itself."""
        insecure = ["--port=0"] if self.assets.minor() < 24 else []
        return ["--leader-elect=false", "--bind-address=127.0.0.1", "--secure-port=0", *insecure]

    def _on_delete(self) -> None:
        for name in ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            if daemon := self._daemons.pop(name, None):
                daemon.stop()
        shutil.rmtree(self.folder / "etcd", ignore_errors=True)  # 64 MiB and more; keys and logs are small

    def _start(self, name: str, *options: str) -> Daemon:
        daemon = Daemon([self.assets.program(name), *options], self.folder / f"{name}.log")
        self._daemons[name] = daemon
        return daemon

    def _start_etcd(self) -> tuple[int, Pair, Authority]:
        # An authority of its own: a certificate for the API server must not open the database.
        authority = Authority(self.folder / "etcd-pki")
        pair = authority.issue("etcd", "etcd", hosts=("localhost", "127.0.0.1"))
        port, peer = free_port(), free_port()
        trust = {"cert-file": pair.certificate, "key-file": pair.key, "trusted-ca-file": authority.pair.certificate}
        self._start(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls=https://127.0.0.1:{port}",
            f"--advertise-client-urls=https://127.0.0.1:{port}",
            f"--listen-peer-urls=https://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=https://127.0.0.1:{peer}",
            f"--initial-cluster=default=https://127.0.0.1:{peer}",
            *(f"--{prefix}{name}={path}" for name, path in trust.items() for prefix in ("", "peer-")),
            "--client-cert-auth",
            "--peer-client-cert-auth",
            "--unsafe-no-fsync",
        )
        return port, pair, authority

    def _options(self, etcd_port: int, etcd_pair: Pair, etcd_authority: Authority) -> list[str]:
        serving = self.authority.issue("kube-apiserver", "kube-apiserver", hosts=HOSTS)
        kubelet_client = self.authority.issue("kubelet-client", "kube-apiserver-kubelet-client", ("system:masters",))
        accounts = self.folder / "pki/accounts.key"
        public = write_public_key(new_key(accounts), self.folder / "pki/accounts.pub")
        policy = self.folder / "audit-policy.yaml"
        policy.write_text(yaml.safe_dump(AUDIT_POLICY))
        return [
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--etcd-servers=https://127.0.0.1:{etcd_port}",
            f"--etcd-cafile={etcd_authority.pair.certificate}",
            f"--etcd-certfile={etcd_pair.certificate}",
            f"--etcd-keyfile={etcd_pair.key}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={self.authority.pair.certificate}",
            f"--kubelet-client-certificate={kubelet_client.certificate}",
            f"--kubelet-client-key={kubelet_client.key}",
            f"--kubelet-certificate-authority={self.authority.pair.certificate}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={public}",
            f"--service-account-signing-key-file={accounts}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--allow-privileged=true",
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self.audit_log}",
        ]

    def _answers(self, path: str) -> bool:
        context = ssl.create_default_context(cafile=str(self.authority.pair.certificate))
        context.load_cert_chain(self._admin.certificate, self._admin.key)
        try:
            with urllib.request.urlopen(self.server + path, timeout=5, context=context) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def running_control_plane(assets: Assets, folder: Path) -> Iterator[ControlPlane]:
    """A control plane for the length of the block."""
    plane = ControlPlane(assets, folder)
    try:
        plane.create()
        yield plane
    finally:
        plane.delete()
