"""Backend agent-sandbox on a real API server. That project's controller is played by the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from .cluster import Cluster, eventually
from .sandbox_world import MANIFESTS, World, call, install, with_ignored

CRDS = Path(__file__).parents[1] / "operators" / "data" / "agent_sandbox_v1beta1.yaml"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUP = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces"
TEMPLATE = {"image": "sandbox:1", "command": ["sleep", "infinity"]}


class Backend(World):
    """An operator's namespace, and that project's objects in it."""

    def at(self, kind: str, name: str = "") -> str:
        """URL path of an object of that project."""
        return f"{GROUP}/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    def theirs(self, kind: str, name: str) -> dict[str, Any] | None:
        """One of its objects, or None."""
        return _read(self.api, self.at(kind, name))


@pytest.fixture
def world(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Backend]:
    """Rights for an operator that is not started yet."""
    install(cluster)
    api = cluster.client()
    places = {"ClusterRole": "clusterroles", "ClusterRoleBinding": "clusterrolebindings"}
    for document in yaml.safe_load_all((MANIFESTS / "agent-sandbox/rbac.yaml").read_text()):
        where = f"/apis/rbac.authorization.k8s.io/v1/{places[document['kind']]}"
        with_ignored(409, call, api, "POST", where, document)
    made = Backend(cluster, namespace, tmp_path)
    yield made
    if made.operator is not None:
        made.operator.stop(10)
        assert "Traceback" not in made.operator.log.read_text()


@pytest.fixture
def kinds(world: Backend) -> Iterator[None]:
    """That project's definitions, for one test where the cluster has none."""
    made = []
    for crd in yaml.safe_load_all(CRDS.read_text()):
        try:
            made.append(call(world.api, "POST", DEFINITIONS, crd)["metadata"]["name"])
        except ApiException as problem:
            if problem.status != 409:
                raise
    eventually(lambda: _read(world.api, world.at("sandboxclaims")) is not None)
    yield
    for name in made:
        call(world.api, "DELETE", f"{DEFINITIONS}/{name}")
        eventually(lambda name=name: _read(world.api, f"{DEFINITIONS}/{name}") is None)  # type: ignore[misc]


@pytest.mark.usefixtures("kinds")
def test_a_pool_of_agent_sandbox_is_kept_by_its_own_controller(world: Backend) -> None:
    world.start()
    world.pool(warm=2, max=2, backend="agent-sandbox", template=TEMPLATE)
    warm = eventually(lambda: world.theirs("sandboxwarmpools", "p"))
    assert warm is not None and warm["spec"]["replicas"] == 2
    made = world.theirs("sandboxtemplates", "p")
    assert made is not None
    assert made["spec"]["podTemplate"]["spec"]["containers"][0]["securityContext"]["privileged"] is False
    world.lease("one", ttlSeconds=40)
    claim = eventually(lambda: world.theirs("sandboxclaims", "one"))
    assert claim is not None and claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"
    shrunk = world.theirs("sandboxwarmpools", "p")
    assert shrunk is not None and shrunk["spec"]["replicas"] == 1
    _serve_claim(world)
    status = world.until("one", "Bound")
    assert (status["pod"], status["launch"]) == ("adopted", "warm") and "tokenSecret" not in status
    world.lease("cold", launch="cold", ttlSeconds=30)
    assert world.until("cold", "Failed")["reason"] == "LaunchRefused"
    assert world.until("one", "Expired")["reason"] == "DeadlinePassed"
    eventually(lambda: world.theirs("sandboxclaims", "one") is None)


@pytest.mark.usefixtures("kinds")
def test_leases_at_once_make_no_more_claims_than_max(world: Backend) -> None:
    world.pool(warm=0, max=2, backend="agent-sandbox", template=TEMPLATE)
    for n in range(8):
        world.lease(f"l{n}")
    world.start()
    eventually(lambda: all(world.status(f"l{n}").get("reason") for n in range(8)))
    assert len(call(world.api, "GET", world.at("sandboxclaims"))["items"]) == 2


@pytest.mark.usefixtures("kinds")
def test_a_claim_of_a_namesake_is_neither_used_nor_deleted(world: Backend) -> None:
    """As of a lease that was deleted and made again while its claim still goes."""
    world.start()
    world.pool(max=2, backend="agent-sandbox", template=TEMPLATE)
    old = {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxClaim",
        "metadata": {"name": "one", "labels": {"occamy.dev/lease-uid": "old"}},
        "spec": {"warmPoolRef": {"name": "p"}},
    }
    call(world.api, "POST", world.at("sandboxclaims"), old)
    _serve_claim(world)
    uid = world.lease("one")["metadata"]["uid"]
    eventually(lambda: world.status("one").get("reason") == "NameTaken")
    call(world.api, "DELETE", world.at("sandboxclaims", "one"))

    def again() -> bool:
        claim = world.theirs("sandboxclaims", "one")
        return claim is not None and claim["metadata"]["labels"]["occamy.dev/lease-uid"] == uid

    eventually(again)
    call(world.api, "DELETE", world.at("sandboxclaims", "one"))
    call(world.api, "POST", world.at("sandboxclaims"), old)
    world.patch("sandboxleases", "one", {"spec": {"released": True}})
    world.until("one", "Released")
    assert world.theirs("sandboxclaims", "one") is not None


@pytest.mark.usefixtures("kinds")
def test_a_lease_ends_with_its_pod_although_the_claim_stays(world: Backend) -> None:
    """That controller makes another pod for the claim: another sandbox, which the lease does not get."""
    world.start()
    world.pool(max=2, backend="agent-sandbox", template=TEMPLATE)
    world.lease("one")
    eventually(lambda: world.theirs("sandboxclaims", "one"))
    _serve_claim(world)
    world.until("one", "Bound")
    call(world.api, "DELETE", world.path("pods", "adopted"), {"gracePeriodSeconds": 0})
    call(world.api, "POST", world.path("pods"), POD)
    assert world.until("one", "Failed")["reason"] == "PodLost"
    eventually(lambda: world.theirs("sandboxclaims", "one") is None)


@pytest.mark.usefixtures("kinds")
def test_what_a_pool_no_longer_has_leaves_its_template(world: Backend) -> None:
    world.start()
    hosts = [{"name": "proxy", "ip": "10.0.0.9"}]
    proxy = {"podLabels": {"app": "proxy"}, "ports": [8080]}
    world.pool(backend="agent-sandbox", template=TEMPLATE, network={"proxy": proxy, "hosts": hosts})

    def aliases() -> bool:
        made = world.theirs("sandboxtemplates", "p")
        return made is not None and "hostAliases" in made["spec"]["podTemplate"]["spec"]

    eventually(aliases)
    world.patch("sandboxpools", "p", {"spec": {"network": {"hosts": None}}})
    eventually(lambda: not aliases())


def test_without_that_project_pool_and_lease_say_so(world: Backend) -> None:
    if _read(world.api, world.at("sandboxclaims")) is not None:
        pytest.skip("this cluster has kubernetes-sigs/agent-sandbox")
    world.start()
    world.pool(backend="agent-sandbox", template=TEMPLATE)
    eventually(lambda: (world.read("sandboxpools", "p") or {}).get("status", {}).get("reason") == "BackendRefused")
    world.lease("one")
    eventually(lambda: world.status("one").get("reason") == "BackendRefused")
    world.lease("short", ttlSeconds=10)
    assert world.until("short", "Expired")["reason"] == "DeadlinePassed"


POD = {"metadata": {"name": "adopted"}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}


def _serve_claim(world: Backend) -> None:
    """What that controller does: a pod from the pool becomes the sandbox of the claim `one`."""
    call(world.api, "POST", world.path("pods"), POD)
    sandbox = {
        "apiVersion": "agents.x-k8s.io/v1beta1",
        "kind": "Sandbox",
        "metadata": {
            "name": "s",
            "annotations": {"agents.x-k8s.io/pod-name": "adopted"},
            "labels": {"agents.x-k8s.io/launch-type": "warm"},
        },
    }
    call(world.api, "POST", f"/apis/agents.x-k8s.io/v1beta1/namespaces/{world.namespace}/sandboxes", sandbox)
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "sandbox": {"name": "s"}}
    call(world.api, "PATCH", world.at("sandboxclaims", "one") + "/status", {"status": ready})


def _read(api: client.ApiClient, path: str) -> dict[str, Any] | None:
    try:
        return call(api, "GET", path)
    except ApiException as problem:
        if problem.status != 404:
            raise
        return None
