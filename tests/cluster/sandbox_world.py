"""A namespace with the sandbox operator as a process of its own, and what a node would do to its pods."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from .cluster import Cluster, eventually
from .daemons import PATIENCE_S, Daemon, free_port

MANIFESTS = Path(__file__).parents[2] / "manifests"
OPERATOR_NAMESPACE = "occamy-system"
ACCOUNT = "occamy-sandbox-operator"
GROUP, VERSION = "occamy.dev", "v1alpha1"
MERGE = "application/merge-patch+json"
POOL: dict[str, Any] = {
    "template": {"image": "sandbox:1", "resources": {"cpu": "10m", "memory": "16Mi", "ephemeralStorage": "16Mi"}},
    "warm": 0,
    "max": 20,
    "network": {"proxy": {"podLabels": {"app": "proxy"}, "ports": [8080]}},
}


def call(api: client.ApiClient, method: str, path: str, body: Any = None, **query: str) -> dict[str, Any]:
    """One request as plain JSON. Raises ApiException."""
    headers = {"Accept": "application/json", "Content-Type": MERGE if method == "PATCH" else "application/json"}
    answer = api.call_api(
        path,
        method,
        query_params=list(query.items()),
        header_params=headers,
        body=body,
        auth_settings=["BearerToken"],
        _preload_content=False,
    )[0]
    found: dict[str, Any] = json.loads(answer.data)
    return found


def install(cluster: Cluster) -> None:
    """CRDs, RBAC and the operator's namespace, once per cluster."""
    api = cluster.client()
    with_ignored(409, client.CoreV1Api(api).create_namespace, {"metadata": {"name": OPERATOR_NAMESPACE}})
    places = {
        "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
        "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        "ServiceAccount": f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/serviceaccounts",
    }
    for file in ("crds/sandbox.yaml", "operator/rbac.yaml", "operator/tenant.yaml"):
        for document in yaml.safe_load_all((MANIFESTS / file).read_text()):
            with_ignored(409, call, api, "POST", places[document["kind"]], document)
    for plural in ("sandboxpools", "sandboxleases", "sandboxsnapshots"):
        eventually(lambda plural=plural: served(api, plural))  # type: ignore[misc]


def served(api: client.ApiClient, plural: str) -> bool:
    """Whether the API server answers for a custom resource."""
    try:
        return bool(call(api, "GET", f"/apis/{GROUP}/{VERSION}/{plural}"))
    except ApiException:
        return False


def with_ignored(status: int, do: Callable[..., Any], *arguments: Any) -> None:
    """Call, and take this refusal as done."""
    try:
        do(*arguments)
    except ApiException as problem:
        if problem.status != status:
            raise


class World:
    """One namespace, one operator for it."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self.api = cluster.client()
        self.kubeconfig = cluster.service_account(OPERATOR_NAMESPACE, ACCOUNT)
        self.port = free_port()
        self.operator: Daemon | None = None

    def start(self, *options: str, all_namespaces: bool = False) -> None:
        """Run the operator, for this namespace unless told otherwise, and wait until it is healthy."""
        command = ["env", f"KUBECONFIG={self.kubeconfig}", sys.executable, "-m", "operators.sandbox"]
        served = ["--host", "127.0.0.1", "--port", str(self.port)]
        served += [] if all_namespaces else ["--namespace", self.namespace]
        self.operator = Daemon([*command, *served, *options], self.folder / "operator.log")
        self.operator.wait_until(lambda: self.get("/healthz") is not None)

    def kill(self) -> None:
        """End the operator as kill -9 does."""
        assert self.operator is not None
        self.operator.kill()

    def get(self, path: str) -> str | None:
        """What the operator serves, None where it does not answer with 200."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_S) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return None

    def path(self, plural: str, name: str = "", sub: str = "") -> str:
        """URL path in this namespace."""
        root = "/api/v1" if plural in ("pods", "secrets", "events", "resourcequotas") else f"/apis/{GROUP}/{VERSION}"
        root = "/apis/networking.k8s.io/v1" if plural == "networkpolicies" else root
        return "/".join(p for p in (root, "namespaces", self.namespace, plural, name, sub) if p)

    def list(self, plural: str, **query: str) -> list[dict[str, Any]]:
        """All objects of a kind."""
        items: list[dict[str, Any]] = call(self.api, "GET", self.path(plural), **query)["items"]
        return items

    def read(self, plural: str, name: str) -> dict[str, Any] | None:
        """One object, or None."""
        try:
            return call(self.api, "GET", self.path(plural, name))
        except ApiException as problem:
            if problem.status == 404:
                return None
            raise

    def pool(self, name: str = "p", **spec: Any) -> dict[str, Any]:
        """Make a pool."""
        return self._make("sandboxpools", "SandboxPool", name, POOL | spec)

    def lease(self, name: str, pool: str = "p", **spec: Any) -> dict[str, Any]:
        """Make a lease."""
        wanted = {"pool": pool, "owner": {"run": "r"}, "ttlSeconds": 600} | spec
        return self._make("sandboxleases", "SandboxLease", name, wanted)

    def snapshot(self, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Make a snapshot's record."""
        return self._make("sandboxsnapshots", "SandboxSnapshot", name, spec)

    def patch(self, plural: str, name: str, body: dict[str, Any], sub: str = "") -> dict[str, Any]:
        """Merge a change into an object."""
        return call(self.api, "PATCH", self.path(plural, name, sub), body)

    def delete(self, plural: str, name: str) -> None:
        """Delete an object; one that is gone is no problem."""
        with_ignored(404, call, self.api, "DELETE", self.path(plural, name))

    def status(self, lease: str) -> dict[str, Any]:
        """The status of a lease, empty while there is none."""
        return (self.read("sandboxleases", lease) or {}).get("status") or {}

    def until(self, lease: str, phase: str) -> dict[str, Any]:
        """Wait for a phase and return the status."""

        def reached() -> dict[str, Any] | None:
            status = self.status(lease)
            return status if status.get("phase") == phase else None

        found = eventually(reached)
        assert found is not None
        return found

    def ready(self, pool: str, count: int) -> None:
        """Wait until that many warm pods of a pool serve, as its status tells."""

        def reached() -> bool:
            status = (self.read("sandboxpools", pool) or {}).get("status") or {}
            return bool(status.get("ready") == count)

        eventually(reached)

    def _make(self, plural: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": {"name": name}, "spec": spec}
        return call(self.api, "POST", self.path(plural), body)


@contextmanager
def operated(cluster: Cluster, namespace: str, folder: Path, *options: str) -> Iterator[World]:
    """A namespace with a running operator, which no fault must surprise."""
    install(cluster)
    made = World(cluster, namespace, folder)
    made.start(*options)
    yield made
    if made.operator is not None:
        made.operator.stop(10)
        log = made.operator.log.read_text()
        assert "Traceback" not in log, log[-5000:]


@contextmanager
def nodes(
    world: World, serves: Callable[[dict[str, Any]], bool] = lambda _: True, *, linger: bool = True
) -> Iterator[None]:
    """Do to pods what a node does: mark those that `serves` chooses ready once their secret is there, and let those
    that are being deleted go. A finalizer stands for the time that a container takes to stop, unless none `linger`."""
    stop, done = threading.Event(), set[tuple[str, bool]]()

    def loop() -> None:
        with ThreadPoolExecutor(4) as workers:
            while not stop.is_set():
                try:
                    for pod in following(world, stop):
                        gone = "deletionTimestamp" in pod["metadata"]
                        key = (pod["metadata"]["uid"], gone)
                        if key not in done and (gone or serves(pod)):
                            done.add(key)
                            workers.submit(act, pod, key)
                except Exception:  # the API server is away in some tests; a node keeps asking
                    stop.wait(0.2)

    def act(pod: dict[str, Any], key: tuple[str, bool]) -> None:
        try:
            settle(world, pod, linger)
        except Exception:
            done.discard(key)  # tried again while it is listed

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE_S)


def following(world: World, stop: threading.Event) -> Iterator[dict[str, Any]]:
    """The pods of a namespace as they are now, and again as they change, for a second."""
    listed = call(world.api, "GET", world.path("pods"))
    yield from listed["items"]
    query = {"watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"], "timeoutSeconds": "1"}
    answer = world.api.call_api(
        world.path("pods"),
        "GET",
        query_params=list(query.items()),
        header_params={"Accept": "application/json"},
        auth_settings=["BearerToken"],
        _preload_content=False,
    )[0]
    with answer:
        rest = b""
        for data in answer.stream(decode_content=False):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if stop.is_set() or event["type"] == "ERROR":
                    return
                if event["type"] != "DELETED":
                    yield event["object"]


def settle(world: World, pod: dict[str, Any], linger: bool = True) -> None:
    """One pod: to Ready, or out of the way."""
    name, meta = pod["metadata"]["name"], pod["metadata"]
    same = {"uid": meta["uid"]}
    if "deletionTimestamp" in meta:
        world.patch("pods", name, {"metadata": {**same, "finalizers": None}})
        return
    for volume in pod["spec"].get("volumes", ()):
        if secret := volume.get("secret"):
            eventually(lambda name=secret["secretName"]: world.read("secrets", name), 1)  # type: ignore[misc]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("PodScheduled", "Ready")]
    status = {"phase": "Running", "podIP": "10.1.2.3", "startTime": now, "conditions": conditions}
    if linger:
        world.patch("pods", name, {"metadata": {**same, "finalizers": ["test.occamy.dev/node"]}})
    world.patch("pods", name, {"metadata": same, "status": status}, "status")
