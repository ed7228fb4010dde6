"""The operator against what people do to its objects, by mistake or by design: each concerns what it was done to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from operators.sandbox.api import Api
from operators.sandbox.snapshots import judge_snapshot

from .cluster import Cluster, eventually
from .sandbox_world import World, call, nodes, operated


@pytest.fixture
def world(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    """A running operator that lists everything every two seconds."""
    with operated(cluster, namespace, tmp_path, "--resync-seconds", "2") as made:
        yield made


def test_an_annotation_that_is_no_moment_stops_nobody(world: World) -> None:
    """Whoever may create a pod anywhere can write such a one, and the operator lists it again and again."""
    labels = {"occamy.dev/pool": "gone", "occamy.dev/pool-uid": "nobody", "occamy.dev/lease-uid": "nobody"}
    meta = {"name": "gone-0", "labels": labels, "annotations": {"occamy.dev/deadline": "soon"}}
    body = {"metadata": meta, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}
    call(world.api, "POST", world.path("pods"), body)
    eventually(lambda: world.list("pods") == [])
    assert world.get("/healthz") is not None


def test_a_renewal_that_is_no_moment_ends_the_lease(world: World) -> None:
    """API servers take an hour that there is not."""
    with nodes(world):
        world.pool(warm=1)
        world.ready("p", 1)
        world.lease("one", heartbeatSeconds=3600)
        pod = world.until("one", "Bound")["pod"]
        world.patch("sandboxleases", "one", {"spec": {"renewed": "2026-01-01T00:00:00+99:99"}})
        assert world.until("one", "Failed")["reason"] == "Refused"
        eventually(lambda: world.read("pods", pod) is None)


def test_a_pod_that_somebody_takes_out_of_its_pool_is_left_alone_and_replaced(world: World) -> None:
    """Without the label no watch tells of it, but it has its name."""
    with nodes(world):
        world.pool(warm=1, max=3)
        world.ready("p", 1)
        world.patch("pods", "p-0", {"metadata": {"labels": {"occamy.dev/pool": None}}})
        eventually(lambda: world.read("pods", "p-1"))
        world.ready("p", 1)
        world.lease("one")
        assert world.until("one", "Bound")["pod"] != "p-0"
        kept = world.read("pods", "p-0")
        assert kept is not None and "occamy.dev/lease-uid" not in kept["metadata"]["labels"]


def test_a_namespace_that_takes_no_policy_is_no_affair_of_others(world: World) -> None:
    """Not for the operator that runs, nor for one that starts: it lists everything first."""
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"count/networkpolicies.networking.k8s.io": "0"}}}
    call(world.api, "POST", world.path("resourcequotas"), quota)
    eventually(lambda: "used" in (world.read("resourcequotas", "q") or {}).get("status", {}))
    world.pool(warm=1)
    eventually(lambda: world.list("pods"))
    world.kill()
    with world.cluster.namespace("other") as other:
        world.start("--resync-seconds", "2", all_namespaces=True)
        here, world.namespace = world.namespace, other
        with nodes(world):
            world.pool(warm=1)
            world.ready("p", 1)
        world.namespace = here
    (pod,) = world.list("pods")
    assert world.list("secrets", labelSelector="occamy.dev/nonce") == []  # so it cannot start
    assert ((world.read("sandboxpools", "p") or {}).get("status") or {})["total"] == 1
    world.delete("pods", pod["metadata"]["name"])


def test_what_one_lease_asks_for_in_vain_holds_nobody_else(world: World) -> None:
    with nodes(world):
        world.pool(warm=0, max=12)
        for n in range(3):
            world.lease(f"odd{n}", overrides={"resources": {"cpu": "1", "cpuRequest": "2"}})
            eventually(lambda n=n: world.status(f"odd{n}").get("reason") == "PodRefused")  # type: ignore[misc]
        world.lease("plain")
        assert "reason" not in world.until("plain", "Bound")


def test_a_lease_that_waits_for_the_quota_goes_on_without_any_event(world: World) -> None:
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}}
    with nodes(world):
        call(world.api, "POST", world.path("resourcequotas"), quota)
        eventually(lambda: "used" in (world.read("resourcequotas", "q") or {}).get("status", {}))
        world.pool(warm=0)
        world.lease("one")
        eventually(lambda: world.status("one").get("reason") == "QuotaExceeded")
        world.patch("resourcequotas", "q", {"spec": {"hard": {"pods": "5"}}})
        world.until("one", "Bound")


def test_a_lease_that_a_finalizer_keeps_loses_its_pod(world: World) -> None:
    with nodes(world):
        world.pool(warm=1)
        world.ready("p", 1)
        world.lease("one")
        pod = world.until("one", "Bound")["pod"]
        world.patch("sandboxleases", "one", {"metadata": {"finalizers": ["example.com/mine"]}})
        world.delete("sandboxleases", "one")
        eventually(lambda: world.read("pods", pod) is None)
        assert world.read("sandboxleases", "one") is not None
        world.patch("sandboxleases", "one", {"metadata": {"finalizers": None}})


def test_a_snapshot_is_judged_as_it_is_and_not_as_it_was(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what was sealed and then changed is sealed again, by a late word about the time before."""
    world.kill()
    world.operator = None
    spec = {"lease": "one", "leaseUid": "u", "uri": "s3://b/k", "fingerprint": "sha256:" + "0" * 64}
    before = world.snapshot("s", spec)
    now = world.patch("sandboxsnapshots", "s", {"metadata": {"labels": {"turn": "1"}}})
    monkeypatch.setenv("KUBECONFIG", str(world.kubeconfig))

    async def judge(body: dict[str, Any]) -> None:
        api = Api()
        await judge_snapshot(api, body)
        await api.close()

    asyncio.run(judge(before))
    assert "status" not in (world.read("sandboxsnapshots", "s") or {})
    asyncio.run(judge(now))
    assert (world.read("sandboxsnapshots", "s") or {})["status"]["phase"] == "Sealed"
