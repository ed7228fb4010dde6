"""Stands for a node: the in-pod agent of every pod of a namespace as a process of this machine.

Each agent serves at a loopback address of its own, which becomes the address of its pod; where this machine allows it,
it is the first process of a process namespace, as it is in a pod.
"""

from __future__ import annotations

import base64
import functools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubernetes import client

from occamy.sandboxes.kubernetes.bundle import write_bundle

from .cluster import Cluster
from .daemons import Daemon
from .sandbox_world import World

ALONE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
PORT = 8750
PATIENT = {"connect_seconds": 60.0, "api_seconds": 60.0, "bind_seconds": 180.0}
"""Settings of a tenant on a slow machine."""


@functools.cache
def first_process() -> bool:
    """Whether agents can be the first process of a namespace."""
    return subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


def tenant(cluster: Cluster, namespace: str) -> Path:
    """Kubeconfig of somebody who may lease in this namespace, and nothing else."""
    kubeconfig = cluster.service_account(namespace, "tenant")
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "occamy-sandbox-tenant"}
    subject = {"kind": "ServiceAccount", "name": "tenant", "namespace": namespace}
    binding = {"metadata": {"name": "tenant"}, "roleRef": role, "subjects": [subject]}
    client.RbacAuthorizationV1Api(cluster.client()).create_namespaced_role_binding(namespace, binding)
    return kubeconfig


class Node:
    """The agents, by the UID of their pod."""

    def __init__(self, world: World, folder: Path) -> None:
        folder.mkdir()
        self.world, self.folder = world, folder
        self.bundle = folder / "sandbox-agent.pyz"
        write_bundle(self.bundle)
        self.agents: dict[str, Daemon] = {}
        self.lost: set[str] = set()
        """Pods whose node is gone: their processes run on, whatever becomes of the pod."""

    def step(self) -> None:
        """Start the agents of new pods and kill those of pods that are gone."""
        pods = {pod["metadata"]["uid"]: pod for pod in self.world.list("pods")}
        for uid in self.agents.keys() - pods.keys() - self.lost:
            self.agents.pop(uid).kill()
        new = [uid for uid in pods if uid not in self.agents]
        with ThreadPoolExecutor(8) as workers:
            list(workers.map(lambda uid: self._start(pods[uid]), new))

    def workspace(self, pod: str) -> Path:
        """Folder of a pod's workspace, by the pod's name."""
        return max(self.folder.glob(f"{pod}-*/workspace"), key=lambda path: path.stat().st_ctime)

    def agent_pid(self, pod: str) -> int:
        """Process id of a pod's agent."""
        mark = str(self.workspace(pod)).encode()
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = line.read_bytes().split(b"\0")
            except OSError:
                continue
            if mark in words and words[0].endswith(Path(sys.executable).name.encode()):
                return int(line.parent.name)
        raise LookupError(f"pod {pod} has no agent")

    def stop(self) -> None:
        """Kill all agents."""
        for agent in self.agents.values():
            agent.kill()

    def _start(self, pod: dict[str, Any]) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "token")
        secret = self.world.read("secrets", volume["secret"]["secretName"])
        if secret is None:
            return  # as a kubelet, which waits for it
        room = self.folder / f"{name}-{uid[:8]}"
        (room / "workspace").mkdir(parents=True, exist_ok=True)
        (room / "token").write_bytes(base64.b64decode(secret["data"]["token"]))
        address = f"127.77.{random.randrange(256)}.{random.randrange(1, 255)}"  # other tests have theirs there as well
        command = [*ALONE] if first_process() else []
        command += ["env", "-i", "PATH=/usr/bin:/bin", sys.executable, "-I", "-S", str(self.bundle)]
        command += [
            "--workspace",
            str(room / "workspace"),
            "--home",
            str(room / "home"),
            "--token",
            str(room / "token"),
        ]
        agent = Daemon([*command, "--host", address, "--port", str(PORT)], room / f"agent-{address}.log")
        self.agents[uid] = agent
        try:
            agent.wait_until(lambda: "serves" in agent.tail())
            self._ready(name, uid, address)
        except Exception:  # that address was taken, the pod is gone, the API server is away: the next step sees
            self.agents.pop(uid).kill()

    def _ready(self, name: str, uid: str, address: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("PodScheduled", "Ready")]
        status = {"phase": "Running", "podIP": address, "startTime": now, "conditions": conditions}
        self.world.patch("pods", name, {"metadata": {"uid": uid}, "status": status}, "status")


@contextmanager
def node_of_processes(world: World, folder: Path) -> Iterator[Node]:
    """A running node for the length of the block."""
    node, stop = Node(world, folder), threading.Event()

    def loop() -> None:
        while not stop.wait(0.02):
            try:
                node.step()
            except Exception:  # the API server is away in some tests; a node keeps asking
                stop.wait(0.2)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield node
    finally:
        stop.set()
        thread.join(60)
        node.stop()
