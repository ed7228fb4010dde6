"""The operator against a real API server when things go wrong: each a fault that somebody in this field reported."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from operators.sandbox.views import moment

from .cluster import Cluster, eventually
from .sandbox_world import World, call, nodes, operated, settle


@pytest.fixture
def world(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    """A running operator that lists everything every two seconds."""
    with operated(cluster, namespace, tmp_path, "--resync-seconds", "2") as made:
        yield made


def test_a_pod_that_is_being_deleted_is_never_claimed(world: World) -> None:
    """All warm pods are on their way out and still there: they fill the pool, and the lease waits."""
    with nodes(world):
        world.pool(warm=3, max=3)
        world.ready("p", 3)
    leaving = {pod["metadata"]["uid"] for pod in world.list("pods")}
    for pod in world.list("pods"):
        world.delete("pods", pod["metadata"]["name"])  # a finalizer of the node holds each
    world.lease("one")
    eventually(lambda: world.status("one").get("reason") == "AtMax")
    time.sleep(2.5)
    pods = world.list("pods")
    assert {pod["metadata"]["uid"] for pod in pods} == leaving
    assert all("occamy.dev/lease-uid" not in pod["metadata"]["labels"] for pod in pods)
    with nodes(world):
        assert world.until("one", "Bound")["podUid"] not in leaving


def test_pods_deleted_while_leases_are_bound_are_given_to_nobody(world: World) -> None:
    """Deletions race claims: a bound lease always holds a pod that was not being deleted when it was claimed."""
    with nodes(world):
        world.pool(warm=6, max=30)
        world.ready("p", 6)
        for turn in range(6):
            names = [pod["metadata"]["name"] for pod in world.list("pods", labelSelector="!occamy.dev/lease-uid")]
            for n, name in enumerate(names[:3]):
                world.lease(f"t{turn}-{n}")
                world.delete("pods", name)
        leases = eventually(lambda: _ended(world))
        assert leases is not None
        held = [lease["status"]["podUid"] for lease in leases if lease["status"]["phase"] == "Bound"]
        assert len(held) == len(set(held)) > 0
        lost = [lease["status"] for lease in leases if lease["status"]["phase"] == "Failed"]
        assert all(status["reason"] == "PodLost" and status.get("podUid") for status in lost)


def _ended(world: World) -> list[dict[str, dict[str, str]]] | None:
    """All leases once each is bound, or has lost the pod that was taken from under it."""
    leases = world.list("sandboxleases")
    done = all((lease.get("status") or {}).get("phase") in ("Bound", "Failed") for lease in leases)
    return leases if done else None


def test_a_network_policy_that_somebody_removes_comes_back(world: World) -> None:
    with nodes(world):
        world.pool(warm=1)
        world.ready("p", 1)
        world.lease("one")
        name = world.until("one", "Bound")["tokenSecret"]
        before = world.read("networkpolicies", name)
        world.delete("networkpolicies", name)
        after = eventually(lambda: world.read("networkpolicies", name))
        assert before is not None and after is not None and after["spec"] == before["spec"]


def test_a_holder_that_dies_loses_its_lease_to_the_heartbeat(world: World) -> None:
    """Its last word counts, by its own clock: here one that is ahead, and then one that stood still."""
    with nodes(world):
        world.pool(warm=1)
        world.ready("p", 1)
        world.lease("one", heartbeatSeconds=5, renewed=moment(time.time() + 300))
        pod = world.until("one", "Bound")["pod"]
        time.sleep(6)  # without the renewal it would be over
        assert world.status("one")["phase"] == "Bound"
        world.patch("sandboxleases", "one", {"spec": {"renewed": moment(time.time() - 6)}})
        assert world.until("one", "Expired")["reason"] == "HeartbeatMissed"
        eventually(lambda: world.read("pods", pod) is None)


def test_what_lost_its_owner_while_the_operator_was_away_is_reaped(world: World) -> None:
    """A pod of a pool and a lease that nobody knows, as after a restored backup, without an owner to collect it by."""
    warm = {"occamy.dev/pool": "gone", "occamy.dev/pool-uid": "nobody"}
    for name, labels in (("gone-0", warm), ("gone-1", {**warm, "occamy.dev/lease-uid": "nobody"})):
        body = {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}
        call(world.api, "POST", world.path("pods"), body)
    eventually(lambda: world.list("pods") == [])
    for reason in ("LeaseGone", "PoolGone"):
        line = f'occamy_sandbox_reaped_total{{reason="{reason}"}} 1.0'
        eventually(lambda line=line: line in (world.get("/metrics") or ""))  # type: ignore[misc]


def test_a_huge_annotation_does_not_block_deletion(world: World) -> None:
    with nodes(world):
        world.pool(warm=1)
        world.ready("p", 1)
        world.lease("one")
        pod = world.until("one", "Bound")["pod"]
        world.patch("sandboxleases", "one", {"metadata": {"annotations": {"note": "x" * 260_000}}})
        lease = world.read("sandboxleases", "one")
        assert lease is not None and "finalizers" not in lease["metadata"]
        assert set(lease["metadata"]["annotations"]) == {"note"}  # the operator writes none of its own
        world.delete("sandboxleases", "one")
        eventually(lambda: world.read("pods", pod) is None)


def test_a_pool_whose_pods_find_no_node_is_held_and_goes_on(world: World) -> None:
    world.pool(warm=4, max=8, batch=1)
    first = eventually(lambda: world.list("pods"))[0]["metadata"]
    lost = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": None}
    for pod in eventually(lambda: pods if len(pods := world.list("pods")) == 4 else None) or []:
        world.patch("pods", pod["metadata"]["name"], {"status": {"conditions": [lost]}}, "status")
    world.patch("sandboxpools", "p", {"spec": {"warm": 6}})
    eventually(lambda: ((world.read("sandboxpools", "p") or {}).get("status") or {}).get("reason") == "Unschedulable")
    time.sleep(1)
    assert len(world.list("pods")) == 4
    with nodes(world):
        world.ready("p", 6)
    assert first["name"] == "p-0"


def test_an_operator_that_is_killed_while_a_pod_waits_for_its_secret_finishes_it(world: World) -> None:
    """Pod without policy and secret: what is left of a creation that was cut short."""
    world.pool(warm=1, max=1)
    pod = eventually(lambda: world.list("pods"))[0]
    name = f"{pod['metadata']['name']}-{pod['metadata']['labels']['occamy.dev/nonce']}"
    eventually(lambda: world.read("secrets", name))
    world.kill()
    world.delete("secrets", name)
    world.delete("networkpolicies", name)
    world.start("--resync-seconds", "2")
    eventually(lambda: world.read("secrets", name) and world.read("networkpolicies", name))
    settle(world, pod)
    world.ready("p", 1)
    settle(world, {"metadata": pod["metadata"] | {"deletionTimestamp": "now"}})
