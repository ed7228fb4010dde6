"""The sandbox operator against a real API server: leases, pools, policies, what is left when things are deleted."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from .cluster import Cluster, eventually
from .sandbox_world import World, call, nodes, operated


@pytest.fixture
def world(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    """A running operator and its namespace."""
    with operated(cluster, namespace, tmp_path) as made:
        yield made


def test_a_lease_gets_a_warm_pod_with_all_that_belongs_to_it(world: World) -> None:
    with nodes(world):
        world.pool(warm=2)
        world.ready("p", 2)
        world.lease("one")
        status = world.until("one", "Bound")
        pod = world.read("pods", status["pod"])
        assert pod is not None
        assert status["podUid"] == pod["metadata"]["uid"] and status["launch"] == "warm"
        assert status["endpoint"] == "http://10.1.2.3:8750"
        lease = world.read("sandboxleases", "one")
        assert lease is not None
        assert [(o["kind"], o["uid"]) for o in pod["metadata"]["ownerReferences"]] == [
            ("SandboxLease", lease["metadata"]["uid"])
        ]
        secret = world.read("secrets", status["tokenSecret"])
        assert secret is not None and len(base64.b64decode(secret["data"]["token"])) >= 32
        assert secret["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
        policy = world.read("networkpolicies", status["tokenSecret"])
        assert policy is not None and policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert policy["spec"]["egress"] == [
            {"to": [{"podSelector": {"matchLabels": {"app": "proxy"}}}], "ports": [{"protocol": "TCP", "port": 8080}]}
        ]
        world.ready("p", 2)  # refilled


def test_deleting_a_lease_takes_pod_policy_and_secret_with_the_operator_down(world: World) -> None:
    with nodes(world):
        world.pool(warm=1, max=1)
        world.ready("p", 1)
        world.lease("one")
        status = world.until("one", "Bound")
        world.kill()
        world.operator = None
        world.delete("sandboxleases", "one")
        assert world.read("sandboxleases", "one") is None
        eventually(lambda: world.read("pods", status["pod"]) is None)
        eventually(lambda: world.read("secrets", status["tokenSecret"]) is None)
        eventually(lambda: world.read("networkpolicies", status["tokenSecret"]) is None)
        world.delete("sandboxpools", "p")
        assert world.read("sandboxpools", "p") is None


def test_deleting_a_pool_takes_its_warm_pods_and_leaves_leased_ones(world: World) -> None:
    with nodes(world):
        world.pool(warm=2)
        world.ready("p", 2)
        world.lease("one")
        held = world.until("one", "Bound")["pod"]
        world.ready("p", 2)
        world.delete("sandboxpools", "p")
        eventually(lambda: [p["metadata"]["name"] for p in world.list("pods")] == [held])
        assert world.status("one")["phase"] == "Bound"


def test_the_deadline_takes_everything_away_and_the_record_tells(world: World) -> None:
    with nodes(world):
        world.pool(warm=0, max=2)
        world.lease("short", ttlSeconds=20)
        bound = world.until("short", "Bound")
        assert bound["launch"] == "cold"
        ended = world.until("short", "Expired")
        assert ended["reason"] == "DeadlinePassed"
        eventually(lambda: world.list("pods") == [])
        eventually(lambda: world.read("secrets", bound["tokenSecret"]) is None)
        eventually(lambda: world.read("networkpolicies", bound["tokenSecret"]) is None)


def test_a_pool_of_pods_that_never_serve_stays_at_its_target(world: World) -> None:
    """A hundred reconciles, each forced by a change of the pool; and target and max are moved on the way."""
    world.pool(warm=5, max=8)
    most = 0
    for turn in range(100):
        world.patch("sandboxpools", "p", {"metadata": {"labels": {"turn": str(turn)}}})
        most = max(most, len(world.list("pods")))
    eventually(lambda: len(world.list("pods")) == 5)
    time.sleep(0.5)
    assert most <= 5 and len(world.list("pods")) == 5


def test_max_and_quota_are_never_exceeded(world: World) -> None:
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "3"}}}
    with nodes(world):
        world.pool("small", warm=0, max=2)
        for n in range(4):
            world.lease(f"s{n}", "small")
        eventually(lambda: sum(world.status(f"s{n}").get("phase") == "Bound" for n in range(4)) == 2)
        eventually(lambda: sum(world.status(f"s{n}").get("reason") == "AtMax" for n in range(4)) == 2)
        _post(world, "resourcequotas", quota)
        eventually(
            lambda: (world.read("resourcequotas", "q") or {}).get("status", {}).get("used", {}).get("pods") == "2"
        )
        world.pool("big", warm=5, max=10)
        eventually(lambda: _status(world, "sandboxpools", "big").get("reason") == "QuotaExceeded")
        assert len(world.list("pods")) <= 3
        world.patch("sandboxpools", "big", {"spec": {"warm": 1}})  # or it takes what the leases set free
        world.delete("sandboxleases", "s0")
        world.delete("sandboxleases", "s1")
        eventually(lambda: all(world.status(f"s{n}").get("phase") == "Bound" for n in (2, 3)))


def _status(world: World, plural: str, name: str) -> dict[str, Any]:
    return (world.read(plural, name) or {}).get("status") or {}


def _post(world: World, plural: str, body: dict[str, Any]) -> None:
    call(world.api, "POST", world.path(plural), body)


def test_settings_that_cannot_be_honoured_are_refused_with_a_reason(world: World) -> None:
    with nodes(world):
        world.pool(warm=1, max=4, maxLeaseSeconds=600)
        world.ready("p", 1)
        world.lease("hot", launch="warm", overrides={"env": [{"name": "A", "value": "1"}]})
        assert "cannot honour overrides" in world.until("hot", "Failed")["message"]
        world.lease("long", ttlSeconds=601)
        assert world.until("long", "Failed")["reason"] == "TtlTooLong"
        world.lease("special", overrides={"env": [{"name": "A", "value": "1"}]})
        status = world.until("special", "Bound")
        pod = world.read("pods", status["pod"])
        assert pod is not None and status["launch"] == "cold"
        assert {"name": "A", "value": "1"} in pod["spec"]["containers"][0]["env"]
        world.pool("broken", warm=9, max=2)  # refused by servers that evaluate rules; by the operator on others
        eventually(lambda: _status(world, "sandboxpools", "broken").get("reason") == "Refused")


def test_a_schema_refuses_what_it_can(world: World) -> None:
    for spec in ({"ttlSeconds": 1}, {"launch": "hot"}, {"owner": {}}):
        with pytest.raises(ApiException) as problem:
            world.lease("bad", **spec)
        assert problem.value.status == 422


def test_a_changed_template_replaces_warm_pods_only(world: World) -> None:
    with nodes(world):
        world.pool(warm=3, max=8, batch=1)
        world.ready("p", 3)
        world.lease("one")
        held = world.until("one", "Bound")
        world.patch("sandboxpools", "p", {"spec": {"template": {"image": "sandbox:2"}}})

        def replaced() -> bool:
            images = [
                p["spec"]["containers"][0]["image"] for p in world.list("pods") if p["metadata"]["name"] != held["pod"]
            ]
            return images == ["sandbox:2"] * 3

        eventually(replaced)
        assert world.status("one")["podUid"] == held["podUid"]


def test_a_pod_that_dies_fails_its_lease_and_is_not_replaced_by_its_namesake(world: World) -> None:
    with nodes(world):
        world.pool(warm=1, max=1)
        world.ready("p", 1)
        world.lease("one")
        status = world.until("one", "Bound")
        world.delete("pods", status["pod"])
        assert world.until("one", "Failed")["reason"] == "PodLost"

        def namesake() -> bool:
            pod = world.read("pods", status["pod"])
            return pod is not None and pod["metadata"]["uid"] != status["podUid"]

        eventually(namesake)
        world.ready("p", 1)
        assert world.status("one")["phase"] == "Failed"


def test_a_release_by_its_holder(world: World) -> None:
    with nodes(world):
        world.pool(warm=1)
        world.ready("p", 1)
        world.lease("one")
        pod = world.until("one", "Bound")["podUid"]
        world.patch("sandboxleases", "one", {"spec": {"released": True}})
        assert world.until("one", "Released")["reason"] == "Released"
        eventually(lambda: pod not in [p["metadata"]["uid"] for p in world.list("pods")])


def test_scaling_by_the_scale_subresource(world: World) -> None:
    with nodes(world):
        world.pool(warm=1, max=6)
        world.ready("p", 1)
        world.patch("sandboxpools", "p", {"spec": {"replicas": 4}}, "scale")
        world.ready("p", 4)
        world.patch("sandboxpools", "p", {"spec": {"replicas": 2}}, "scale")
        world.ready("p", 2)
        eventually(lambda: len(world.list("pods")) == 2)


def test_metrics_events_and_logs_tell_what_happened_once(world: World) -> None:
    with nodes(world):
        world.pool(warm=1)
        world.ready("p", 1)
        world.lease("one")
        world.until("one", "Bound")
        text = world.get("/metrics") or ""
        labels = f'launch="warm",namespace="{world.namespace}",pool="p"'
        assert f"occamy_sandbox_claim_seconds_count{{{labels}}} 1.0" in text
        assert 'occamy_sandbox_leases{phase="Bound"} 1.0' in text
        for turn in range(5):
            world.patch("sandboxleases", "one", {"metadata": {"labels": {"turn": str(turn)}}})
        about = eventually(lambda: [e for e in world.list("events") if e["involvedObject"]["name"] == "one"])
        assert [e["reason"] for e in about] == ["Bound"]
        assert world.operator is not None
        assert '"phase": "Bound"' in world.operator.log.read_text()
