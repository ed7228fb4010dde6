"""The local control plane itself: it starts fast, outlives a crash of its API server, and ends with the tests."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import urllib3
from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException

from .assets import Assets
from .cluster import Cluster, eventually
from .control_plane import running_control_plane


def running_below(folder: Path) -> list[str]:
    """Command lines of processes that name the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(str(folder) in word for word in words) and int(entry.parent.name) != os.getpid():
            found.append(" ".join(words[:2]))
    return found


def test_says_how_long_it_took_to_start_and_leaves_no_process(
    assets: Assets, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_control_plane(assets, tmp_path / "plane") as plane:
        with capsys.disabled():
            print(f"\ncontrol plane of Kubernetes 1.{assets.minor()} started in {plane.started_s:.1f} s")
        programs = {Path(command.split(" ")[0]).name for command in running_below(tmp_path)}
        assert programs == {"etcd", "kube-apiserver", "kube-controller-manager"}
        assert plane.version() == (1, assets.minor())
    assert running_below(tmp_path) == []


def test_everything_ends_when_the_tests_are_killed(assets: Assets, tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from tests.cluster.assets import find_assets\n"
        "from tests.cluster.control_plane import running_control_plane\n"
        "with running_control_plane(find_assets(), Path(sys.argv[1])): print('up', flush=True); time.sleep(600)\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, str(tmp_path / "plane")]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None and tests.stdout.readline() == "up\n"
        assert len(running_below(tmp_path)) == 4
        tests.send_signal(signal.SIGKILL)
    eventually(lambda: running_below(tmp_path) == [])


def test_only_who_shows_a_certificate_of_this_cluster_gets_in(cluster: Cluster) -> None:
    plane = cluster.control_plane
    trusting = ssl.create_default_context(cafile=str(plane.authority.pair.certificate))
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{plane.server}/api/v1/namespaces", context=trusting)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"{plane.server}/api/v1/namespaces", context=ssl.create_default_context())


class Follower(threading.Thread):
    """Lists and watches config maps of `default`, and lists again after an error, as every controller has to."""

    def __init__(self, api: client.CoreV1Api) -> None:
        super().__init__(daemon=True)
        self.api, self.seen, self.broken = api, list[str](), 0
        self.pause = threading.Event()
        self.start()

    def run(self) -> None:
        while "last" not in self.seen:
            try:
                self.follow()
            except (urllib3.exceptions.HTTPError, ApiException):
                self.broken += 1
                self.pause.wait(0.2)

    def follow(self) -> None:
        listed = self.api.list_namespaced_config_map("default", _request_timeout=60)
        self.see(*(item.metadata.name for item in listed.items))
        version = listed.metadata.resource_version
        for change in watch.Watch().stream(
            self.api.list_namespaced_config_map, "default", resource_version=version, timeout_seconds=180
        ):
            self.see(change["object"].metadata.name)
            if "last" in self.seen:
                return

    def see(self, *names: str) -> None:
        self.seen += [name for name in sorted(names) if name not in self.seen and name != "kube-root-ca.crt"]


def test_a_watch_goes_on_after_the_api_server_crashed(assets: Assets, tmp_path: Path) -> None:
    """Not on the shared cluster, whose other tests would notice."""
    with running_control_plane(assets, tmp_path / "plane") as plane:
        cluster = Cluster(plane, tmp_path)
        api = client.CoreV1Api(cluster.client())
        follower = Follower(client.CoreV1Api(cluster.client(plane.kubeconfig_for("f", "f", ("system:masters",)))))
        api.create_namespaced_config_map("default", {"metadata": {"name": "before"}})
        eventually(lambda: follower.seen == ["before"])
        assert follower.broken == 0

        plane.stop_api_server(crash=True)
        eventually(lambda: follower.broken)
        plane.start_api_server()
        created = api.create_namespaced_config_map("default", {"metadata": {"name": "after"}})
        eventually(lambda: "after" in follower.seen)

        broken = follower.broken
        plane.stop_api_server()
        plane.start_api_server()
        assert api.read_namespaced_config_map("after", "default").metadata.uid == created.metadata.uid
        api.create_namespaced_config_map("default", {"metadata": {"name": "last"}})
        eventually(lambda: not follower.is_alive())
        assert follower.seen == ["before", "after", "last"]
        assert follower.broken > broken
        cluster.close()


def test_pods_stay_pending_without_a_node(cluster: Cluster, namespace: str) -> None:
    plane = cluster.control_plane
    api = client.CoreV1Api(cluster.client())
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "any"}]}}
    api.create_namespaced_pod(namespace, pod)
    assert api.read_namespaced_pod("p", namespace).status.phase == "Pending"
    with pytest.raises(RuntimeError, match="this cluster has no node"):
        plane.load_image("any")


def test_children_go_with_their_owner(cluster: Cluster, namespace: str) -> None:
    api = client.CoreV1Api(cluster.client())
    owner = api.create_namespaced_config_map(namespace, {"metadata": {"name": "owner"}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid}
    api.create_namespaced_secret(namespace, {"metadata": {"name": "child", "ownerReferences": [reference]}})
    api.delete_namespaced_config_map("owner", namespace)

    def gone() -> bool:
        try:
            api.read_namespaced_secret("child", namespace)
        except ApiException as problem:
            return problem.status == 404
        return False

    eventually(gone)
