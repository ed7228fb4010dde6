"""The operator's named figures: claims at once, kills at random points, an API server that goes away under load."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster, eventually
from .sandbox_world import World, install, nodes

CLAIMS = 50


@pytest.fixture
def world(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    """A namespace whose operator is not started yet."""
    install(cluster)
    made = World(cluster, namespace, tmp_path)
    yield made
    if made.operator is not None:
        made.operator.stop(10)


def phases(world: World) -> Counter[str]:
    return Counter((lease.get("status") or {}).get("phase", "") for lease in world.list("sandboxleases"))


def bound(world: World, count: int) -> list[dict[str, Any]] | None:
    """All leases, once so many are bound; any other phase than Pending and Bound fails."""
    leases = world.list("sandboxleases")
    found = Counter((lease.get("status") or {}).get("phase", "Pending") for lease in leases)
    assert set(found) <= {"Pending", "Bound"}, found
    return leases if found == {"Bound": count} else None


def pods_by_lease(world: World) -> dict[str, list[dict[str, Any]]]:
    """Pods that are not being deleted, by the lease UID that they carry."""
    found: dict[str, list[dict[str, Any]]] = {}
    for pod in world.list("pods"):
        uid = pod["metadata"]["labels"].get("occamy.dev/lease-uid")
        if uid and "deletionTimestamp" not in pod["metadata"]:
            found.setdefault(uid, []).append(pod)
    return found


@pytest.mark.timeout(1800)
def test_fifty_claims_at_once_get_fifty_pods_twenty_times(world: World) -> None:
    world.start()
    with nodes(world, linger=False), ThreadPoolExecutor(CLAIMS) as clients:
        world.pool(warm=CLAIMS, max=4 * CLAIMS, batch=50)
        for turn in range(20):
            world.ready("p", CLAIMS)
            names = [f"t{turn}-{n}" for n in range(CLAIMS)]
            list(clients.map(world.lease, names))
            leases = eventually(lambda: bound(world, CLAIMS))
            assert leases is not None
            assert len({lease["status"]["podUid"] for lease in leases}) == CLAIMS
            held = pods_by_lease(world)
            for lease in leases:
                (pod,) = held[lease["metadata"]["uid"]]
                assert pod["metadata"]["uid"] == lease["status"]["podUid"]
            list(clients.map(lambda name: world.delete("sandboxleases", name), names))
    errors = [line for line in (world.get("/metrics") or "").splitlines() if "reconcile_errors_total{" in line]
    assert errors == []


@pytest.mark.timeout(1800)
def test_killed_at_random_points_nothing_leaks_and_nothing_is_claimed_twice(world: World) -> None:
    """Two hundred leases come and go while the operator is killed with -9 again and again."""
    chance = random.Random(4)
    world.start()
    with nodes(world), ThreadPoolExecutor(8) as clients:
        world.pool(warm=6, max=14)
        kills = 0
        living: dict[str, Future[Any]] = {}
        for n in range(200):
            living[f"l{n}"] = clients.submit(world.lease, f"l{n}")
            if len(living) > 8:
                name = chance.choice(sorted(living))
                living.pop(name).result()
                clients.submit(world.delete, "sandboxleases", name)
            if n % 20 == 10:
                time.sleep(chance.random() * 0.3)
                world.kill()
                kills += 1
                time.sleep(chance.random() * 0.3)
                world.start()
        clients.shutdown(wait=True)
        assert kills == 10

        def settled() -> bool:
            leases, held = world.list("sandboxleases"), pods_by_lease(world)
            uids = {lease["metadata"]["uid"] for lease in leases}
            bound = all((lease.get("status") or {}).get("phase") == "Bound" for lease in leases)
            return bound and set(held) == uids and all(len(pods) == 1 for pods in held.values())

        eventually(settled)
        for lease in world.list("sandboxleases"):
            (pod,) = pods_by_lease(world)[lease["metadata"]["uid"]]
            assert pod["metadata"]["uid"] == lease["status"]["podUid"]
        names = [lease["metadata"]["name"] for lease in world.list("sandboxleases")]
        for name in names:
            world.delete("sandboxleases", name)
        world.ready("p", 6)

        def clean() -> bool:
            """Six warm pods that nothing takes away, and nothing that belongs to any other."""
            pods = [pod["metadata"] for pod in world.list("pods")]
            kept = {
                pod["uid"]
                for pod in pods
                if "deletionTimestamp" not in pod and "occamy.dev/lease-uid" not in pod["labels"]
            }
            return len(kept) == len(pods) == 6 and owners(world, "secrets") == owners(world, "networkpolicies") == kept

        eventually(clean)


def owners(world: World, kind: str) -> set[str]:
    """UIDs of the pods that own what the operator made of this kind."""
    made = world.list(kind, labelSelector="occamy.dev/nonce")
    return {item["metadata"]["ownerReferences"][0]["uid"] for item in made}


@pytest.mark.timeout(600)
def test_an_api_server_that_restarts_under_load_is_survived_without_a_restart(world: World) -> None:
    plane = world.cluster.control_plane
    world.start("--resync-seconds", "5")
    assert world.operator is not None
    with nodes(world):
        world.pool(warm=5, max=30)
        world.ready("p", 5)
        for n in range(5):
            world.lease(f"before{n}")
        plane.stop_api_server(crash=True)
        time.sleep(2)
        plane.start_api_server()
        for n in range(10):
            _insist(world, f"after{n}")
        eventually(lambda: phases(world) == {"Bound": 15})
        held = pods_by_lease(world)
        assert sorted(len(pods) for pods in held.values()) == [1] * 15
        world.ready("p", 5)
        assert world.operator.process.poll() is None
        assert world.get("/healthz") is not None


def _insist(world: World, name: str) -> None:
    """Make a lease against an API server that has just started."""

    def made() -> bool:
        try:
            world.lease(name)
        except Exception:
            return world.read("sandboxleases", name) is not None
        return True

    eventually(made)
