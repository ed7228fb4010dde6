"""One worker node on this machine: kube-scheduler, containerd, runc and kubelet beside a local control plane."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from kubernetes import client, config
from pytest_kubernetes.options import ClusterOptions

from .assets import CNI, NODE, Assets
from .control_plane import ControlPlane
from .daemons import Daemon, DaemonError, free_port
from .images import tiny_image

NAME = "localhost"
"""The API server asks the kubelet for logs and exec by this name, so it has to resolve to loopback."""
TINY = "localhost/tiny:1"
GATEWAY = f"""apiVersion: v1
kind: Pod
metadata: {{name: gateway, namespace: default}}
spec:
  terminationGracePeriodSeconds: 0
  containers: [{{name: sleep, image: {TINY}, command: [sleep, "1000000"], imagePullPolicy: Never}}]
"""
"""A pod that is always there: this machine has its address for pods only while it has one."""
KEEPER = Path(__file__).with_name("node_keeper.py")


class NodeCluster(ControlPlane):
    """A local control plane with one node that runs pods. Nothing can be pulled: images are loaded from archives.

    This machine and its pods reach one another; pods reach neither other pods nor anything outside (unless this machine
    forwards packets). No cluster DNS, no service addresses, nothing that enforces NetworkPolicy.
    """

    def __init__(self, assets: Assets, folder: Path) -> None:
        """Nothing is started yet."""
        super().__init__(assets, folder)
        self.room = folder / "node"
        self.cgroup = f"occamy-node-{secrets.token_hex(4)}"
        self._keeper: Daemon | None = None
        self.octet, self._reservation = _own_subnet()
        """Pods have the addresses 10.213.OCTET.x."""
        self.gateway = f"10.213.{self.octet}.1"
        """This machine's address for every pod."""

    def load_image(self, image: str) -> None:
        """Import an archive of `docker save` or `podman save`, or an image in podman's storage, by its name.

        Raises:
            RuntimeError: it cannot be read or imported; the message is the program's.
        """
        socket_, ctr = str(self.room / "containerd.sock"), str(self.assets.program("ctr"))
        load = [ctr, "--address", socket_, "-n", "k8s.io", "images", "import"]
        if Path(image).is_file():
            self._do(*load, image)
            return
        archive = self.room / f"{secrets.token_hex(4)}.tar"
        try:  # of the two forms the one that compresses nothing
            self._do("podman", "save", "--quiet", "--format", "docker-archive", "--output", str(archive), image)
            self._do(*load, str(archive))
        finally:
            archive.unlink(missing_ok=True)

    def _on_create(self, cluster_options: ClusterOptions, **kwargs: object) -> None:
        super()._on_create(cluster_options, **kwargs)
        scheduler = self.kubeconfig_for("scheduler", "system:kube-scheduler")
        accounts = (f"--{use}kubeconfig={scheduler}" for use in ("", "authentication-", "authorization-"))
        self._start("kube-scheduler", *accounts, *self.quiet_options())
        self._start_node()

    def _on_delete(self) -> None:
        keeper, self._keeper = self._keeper, None
        code = keeper.stop(60) if keeper else 0
        self._reservation.close()
        shutil.rmtree(self.room / "containerd", ignore_errors=True)
        super()._on_delete()
        if keeper and code:
            raise DaemonError(f"the node ended by itself, or could not be removed ({code}):\n{keeper.tail()}")

    def _start_node(self) -> None:
        (self.room / "cni").mkdir(parents=True)
        (self.room / "always").mkdir()
        (self.room / "containerd.toml").write_text(self._containerd_settings())
        (self.room / "cni/10-pods.conflist").write_text(self._network_settings())
        (self.room / "kubelet.yaml").write_text(self._kubelet_settings())
        kubeconfig = self.kubeconfig_for("kubelet", f"system:node:{NAME}", ("system:nodes",))
        endpoint = self.room / "containerd.sock"
        options = [
            f"--config={self.room / 'kubelet.yaml'}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={self.room / 'kubelet'}",
            f"--cert-dir={self.room / 'kubelet-pki'}",
            f"--hostname-override={NAME}",
            f"--container-runtime-endpoint=unix://{endpoint}",
            *(["--container-runtime=remote"] if self.assets.minor() < 27 else []),
        ]
        path = os.pathsep.join([*sorted({str(self.assets.program(name).parent) for name in NODE}), os.environ["PATH"]])
        command: list[str | Path] = [sys.executable, KEEPER, self.room, self.cgroup, path, *options]
        self._keeper = Daemon(command, self.room / "keeper.log", on_death="TERM")
        self._keeper.wait_until(endpoint.exists)
        self.load_image(str(tiny_image(self.assets.program("busybox"), self.room / "tiny.tar", TINY)))
        (self.room / "always/gateway.yaml").write_text(GATEWAY)
        api = client.CoreV1Api(config.new_client_from_config(config_file=str(self.kubeconfig)))
        try:
            self._keeper.wait_until(lambda: _schedulable(api) and _is_here(self.gateway))
        except DaemonError as problem:
            log = self.room / "kubelet.log"
            raise DaemonError(f"{problem}\n{log}:\n{log.read_text()[-4000:]}") from problem

    def _containerd_settings(self) -> str:
        unused = ["aufs", "btrfs", "devmapper", "zfs"]
        disabled = [f"io.containerd.snapshotter.v1.{name}" for name in unused]
        return f"""version = 2
root = "{self.room}/containerd/root"
state = "{self.room}/containerd/state"
disabled_plugins = {disabled}
[grpc]
  address = "{self.room}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{self.room}/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{TINY}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{self.assets.program(CNI[0]).parent}"
    conf_dir = "{self.room}/cni"
"""

    def _network_settings(self) -> str:
        addresses = {
            "type": "host-local",
            "ranges": [[{"subnet": f"10.213.{self.octet}.0/24"}]],
            "dataDir": f"{self.room}/addresses",
        }
        pairs = {"type": "ptp", "ipMasq": False, "ipam": addresses}
        return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [pairs]})

    def _kubelet_settings(self) -> str:
        serving = self.authority.issue("kubelet-serving", NAME, hosts=(NAME,))
        return yaml.safe_dump(
            {
                "apiVersion": "kubelet.config.k8s.io/v1beta1",
                "kind": "KubeletConfiguration",
                "address": "127.0.0.1",
                "port": free_port(),
                "healthzPort": 0,
                "tlsCertFile": str(serving.certificate),
                "tlsPrivateKeyFile": str(serving.key),
                "authentication": {
                    "anonymous": {"enabled": False},
                    "webhook": {"enabled": True},
                    "x509": {"clientCAFile": str(self.authority.pair.certificate)},
                },
                "authorization": {"mode": "Webhook"},
                "cgroupDriver": "cgroupfs",
                "cgroupRoot": f"/{self.cgroup}",
                "enforceNodeAllocatable": [],
                "evictionHard": {"memory.available": "10Mi"},
                "failSwapOn": False,
                "imageGCHighThresholdPercent": 100,
                "makeIPTablesUtilChains": False,
                "maxOpenFiles": 20000,
                "nodeStatusUpdateFrequency": "1s",
                "oomScoreAdj": 0,
                "resolvConf": "",
                "staticPodPath": f"{self.room}/always",
                "volumePluginDir": f"{self.room}/volume-plugins",
            }
        )

    def _do(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()}")


def load_built(manager: NodeCluster, image: str) -> None:
    """Give the node an image that `make images` has built with podman. Skips where it was not."""
    if not shutil.which("podman") or subprocess.run(["podman", "image", "exists", image]).returncode:
        pytest.skip(f"podman has no {image}; run: make images")
    manager.load_image(image)


def unusable() -> str:
    """Why this machine cannot run a node; empty when it can."""
    if os.geteuid() != 0:
        return "a node with real pods needs root; or run with --k8s-provider on a cluster of yours"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, text=True
    )
    if tried.returncode:
        return f"a node with real pods needs new namespaces, and this machine refuses: {tried.stderr.strip()}"
    return ""


@contextmanager
def running_node_cluster(assets: Assets, folder: Path) -> Iterator[NodeCluster]:
    """A control plane and its node for the length of the block."""
    assets.need(*NODE, *CNI)
    cluster = NodeCluster(assets, folder)
    try:
        cluster.create()
        yield cluster
    finally:
        cluster.delete()


def _schedulable(api: client.CoreV1Api) -> bool:
    nodes = api.list_node().items
    ready = [c for node in nodes for c in node.status.conditions or [] if c.type == "Ready" and c.status == "True"]
    return bool(ready) and not any(node.spec.taints for node in nodes)


def _is_here(address: str) -> bool:
    """Whether it is one of this machine's."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def _own_subnet() -> tuple[int, socket.socket]:
    """The third octet of this node's pod addresses, and what reserves it for as long as it is open."""
    for octet in range(256):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0occamy-test-pods-{octet}")
        except OSError:
            name.close()
        else:
            return octet, name
    raise RuntimeError("256 nodes for tests run on this machine already")
