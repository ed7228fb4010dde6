"""A real pod on this machine: it runs, is limited, can be asked and entered; and afterwards nothing of it is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from kubernetes import client
from kubernetes.stream import stream

from .assets import Assets
from .cluster import Cluster, eventually
from .daemons import PATIENCE_S
from .node import TINY, NodeCluster, running_node_cluster, unusable
from .test_cluster_control_plane import running_below

pytestmark = pytest.mark.node

SETTINGS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")
PLACES = ("/var/lib/kubelet", "/var/log/pods", "/var/log/containers", "/run/containerd", "/opt/containerd")


def pod(name: str, image: str, script: str, **container: object) -> dict[str, object]:
    """A pod of one shell script."""
    runs = {"name": "main", "image": image, "command": ["/bin/sh", "-c", script], **container}
    limits = {"limits": {"memory": "64Mi", "cpu": "500m"}}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [{"resources": limits} | runs]}
    return {"metadata": {"name": name}, "spec": spec | {"automountServiceAccountToken": False}}


def phase_of(api: client.CoreV1Api, name: str, namespace: str, phase: str) -> client.V1Pod:
    """The pod, as soon as it is in that phase."""

    def reached() -> client.V1Pod | None:
        found = api.read_namespaced_pod(name, namespace)
        return found if found.status.phase == phase else None

    found = eventually(reached)
    assert found is not None
    return found


def traces(folder: str, cgroup: str, octet: str) -> set[str]:
    """Kinds of things that a node with a running pod has on this machine, and that are there now."""
    mounts = Path("/proc/self/mountinfo").read_text()
    routes = [line.split()[1] for line in Path("/proc/net/route").read_text().splitlines()]
    groups = Path("/sys/fs/cgroup")
    found = {
        "process": running_below(Path(folder)),
        "mount": folder in mounts,
        "route": any(route.endswith(f"{int(octet):02X}D50A") for route in routes),
        "cgroup": [*groups.glob(cgroup), *groups.glob(f"*/{cgroup}")],  # those below them come and go meanwhile
    }
    return {kind for kind, there in found.items() if there}


def machine() -> dict[str, str | bool]:
    """Settings that kubelet wants otherwise, and places that it fills, of this machine."""
    settings: dict[str, str | bool] = {name: Path("/proc/sys", name).read_text() for name in SETTINGS}
    return settings | {place: os.path.exists(place) for place in PLACES}


def test_a_pod_runs_with_its_limits_and_without_a_token(
    node_cluster: Cluster, node_namespace: str, tiny_image: str
) -> None:
    api = client.CoreV1Api(node_cluster.client())
    groups = "/sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max"  # version 1 and 2
    script = f"echo hello; id -u; cat {groups} 2>/dev/null; ls /var/run/secrets 2>&1; touch /file 2>&1; exit 4"
    confined = {"runAsUser": 65534, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}
    api.create_namespaced_pod(node_namespace, pod("p", tiny_image, script, securityContext=confined))
    ended = phase_of(api, "p", node_namespace, "Failed")
    assert ended.status.container_statuses[0].state.terminated.exit_code == 4
    said = api.read_namespaced_pod_log("p", node_namespace).splitlines()
    assert said[:3] == ["hello", "65534", str(64 << 20)]
    assert said[3:] == ["ls: /var/run/secrets: No such file or directory", "touch: /file: Read-only file system"]


def test_a_pod_can_be_entered_and_reached(node_cluster: Cluster, node_namespace: str, tiny_image: str) -> None:
    api = client.CoreV1Api(node_cluster.client())
    serve = "mkdir /tmp/www; echo here > /tmp/www/index.html; exec httpd -f -p 8080 -h /tmp/www"
    api.create_namespaced_pod(node_namespace, pod("p", tiny_image, serve))
    running = phase_of(api, "p", node_namespace, "Running")
    command = ["/bin/sh", "-c", "cat /proc/1/cmdline | tr '\\0' ' '; echo; echo wrong >&2; exit 3"]
    session = stream(
        api.connect_get_namespaced_pod_exec, "p", node_namespace, command=command, stdout=True, stderr=True,
        _preload_content=False,
    )  # fmt: skip
    session.run_forever(timeout=PATIENCE_S)
    assert (session.read_stdout(), session.read_stderr(), session.returncode) == (
        "httpd -f -p 8080 -h /tmp/www \n",
        "wrong\n",
        3,
    )
    if isinstance(node_cluster.manager, NodeCluster):
        with urllib.request.urlopen(f"http://{running.status.pod_ip}:8080/", timeout=PATIENCE_S) as answer:
            assert answer.read() == b"here\n"


def test_a_pod_past_its_deadline_is_ended(node_cluster: Cluster, node_namespace: str, tiny_image: str) -> None:
    api = client.CoreV1Api(node_cluster.client())
    late = pod("p", tiny_image, "sleep 600")
    late["spec"]["activeDeadlineSeconds"] = 2  # type: ignore[index]
    api.create_namespaced_pod(node_namespace, late)
    assert phase_of(api, "p", node_namespace, "Failed").status.reason == "DeadlineExceeded"


def test_two_nodes_at_a_time_and_nothing_is_left(
    node_cluster: Cluster, assets: Assets, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the shared node, with a running pod that nobody deletes."""
    if not isinstance(node_cluster.manager, NodeCluster):
        pytest.skip("looks at this machine, not at the cluster that --k8s-provider names")
    before = machine()
    with running_node_cluster(assets, tmp_path / "node") as one:
        with capsys.disabled():
            print(f"\ncontrol plane and node started in {one.started_s:.1f} s")
        socket.create_server((one.gateway, 0)).close()  # the address for pods is there before any of theirs
        cluster = Cluster(one, tmp_path)
        api = client.CoreV1Api(cluster.client())
        api.create_namespaced_pod("default", pod("p", TINY, "sleep 600"))
        phase_of(api, "p", "default", "Running")
        where = (str(tmp_path), one.cgroup, str(one.octet))
        assert traces(*where) == {"process", "route", "cgroup"}
        assert machine() == before
        cluster.close()
    assert traces(*where) == set()
    assert machine() == before


def test_nothing_is_left_when_the_tests_are_killed(assets: Assets, tmp_path: Path) -> None:
    if reason := unusable():
        pytest.skip(reason)
    script = (
        "import sys, time; from pathlib import Path\n"
        "from kubernetes import client, config\n"
        "from tests.cluster.assets import find_assets\n"
        "from tests.cluster.node import TINY, running_node_cluster\n"
        "from tests.cluster.test_cluster_node import phase_of, pod\n"
        "with running_node_cluster(find_assets(), Path(sys.argv[1])) as one:\n"
        "    api = client.CoreV1Api(config.new_client_from_config(config_file=str(one.kubeconfig)))\n"
        "    api.create_namespaced_pod('default', pod('p', TINY, 'sleep 600'))\n"
        "    phase_of(api, 'p', 'default', 'Running'); print(one.cgroup, one.octet, flush=True); time.sleep(600)\n"
    )
    before = machine()
    command = [sys.executable, "-c", script, str(tmp_path / "node")]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        cgroup, octet = tests.stdout.readline().split()
        assert traces(str(tmp_path), cgroup, octet) == {"process", "route", "cgroup"}
        tests.send_signal(signal.SIGKILL)
    eventually(lambda: traces(str(tmp_path), cgroup, octet) == set())
    assert machine() == before
