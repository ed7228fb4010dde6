"""What the operator remembers and when it looks again: cache, queue, freshness, answers, snapshots."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from made_sandboxes import NOW, lease, pod, pool

from operators.sandbox.api import (
    Api,
    ApiError,
    Conflict,
    Exists,
    NotFound,
    Refused,
    Unclear,
    failure,
    path,
    server_of,
)
from operators.sandbox.cache import Cache
from operators.sandbox.events import Events
from operators.sandbox.health import BLIND_S, SILENT_S, Freshness
from operators.sandbox.pods import Pods
from operators.sandbox.queue import Queue
from operators.sandbox.reconcile import Key, Reconciler
from operators.sandbox.snapshots import judge
from operators.sandbox.views import Lease


def test_an_older_version_never_replaces_a_newer_one() -> None:
    pods = Cache().pods
    assert pods.put(pod(0, version=5, lease_uid="x"))
    assert not pods.put(pod(0, version=4))
    assert not pods.put(pod(0, version=5))
    assert [p.version for p in pods.where("lease", "ns/x")] == [5] and pods.where("idle", "ns/pool") == ()


def test_what_is_gone_stays_gone_and_its_namesake_is_another() -> None:
    pods = Cache().pods
    pods.put(pod(0))
    assert pods.drop("pod-0") is not None
    assert not pods.put(pod(0, version=99))
    assert pods.put(pod(0, uid="again")) and pods.named("ns", "p-0") == pod(0, uid="again")
    assert [p.uid for p in pods.where("pool", "ns/pool")] == ["again"]


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        ("0.25", 0.25),
        ("0", 0.0),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("86401", None),
        ("soon", None),
        ("", None),
    ],
)
def test_what_a_tenant_says_about_its_first_command_counts_if_it_can_be(said: str, counts: float | None) -> None:
    notes = {"occamy.dev/first-exec-seconds": said}
    meta = {"namespace": "ns", "name": "l", "uid": "u", "resourceVersion": "1", "annotations": notes}
    spec = {"pool": "p", "owner": {"run": "r"}, "ttlSeconds": 60}
    lease = Lease.parse({"metadata": meta | {"creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": spec})
    assert lease.first_exec == counts


def test_a_late_word_about_a_namesake_that_is_gone_hides_nobody() -> None:
    pods = Cache().pods
    pods.put(pod(0, uid="old", version=1))
    pods.put(pod(0, uid="new", version=9))
    pods.put(pod(0, uid="old", version=5))
    assert pods.named("ns", "p-0") == pod(0, uid="new", version=9)
    pods.drop("old")
    assert pods.named("ns", "p-0") == pod(0, uid="new", version=9)


def test_labels_of_another_namespace_make_no_pod_of_a_pool_or_a_lease() -> None:
    """Whoever makes pods somewhere can write there what UIDs they like."""
    cache = Cache()
    for stranger in (pod(0, namespace="other"), pod(1, namespace="other", lease_uid="uid-l")):
        cache.pods.put(stranger)
    pods = Pods(Api(), cache, Random(0))
    seen = pods.observe_lease(lease(), pool(warm=1), NOW)
    assert (seen.own, seen.candidates, seen.slots[0]) == ((), [], 0)
    assert pods.observe(pool(warm=1), NOW).pods == ()


def test_a_list_removes_what_it_lacks_unless_that_is_newer() -> None:
    pods = Cache().pods
    for slot, version in ((0, 5), (1, 6), (2, 20)):
        pods.put(pod(slot, version=version))
    changed, lost = pods.replace([pod(0, version=9)], version=10)
    assert [p.name for p in changed] == ["p-0"] and [p.name for p in lost] == ["p-1"]
    assert sorted(p.name for p in pods) == ["p-0", "p-2"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans(), st.booleans()), max_size=60))
def test_indexes_agree_with_the_items(steps: list[tuple[int, int, bool, bool]]) -> None:
    pods = Cache().pods
    for slot, version, leased, gone in steps:
        if gone:
            pods.drop(f"pod-{slot}")
        else:
            pods.put(pod(slot, version=version, lease_uid="x" if leased else ""))
    everything = set(pods)
    assert set(pods.where("pool", "ns/pool")) == everything
    assert set(pods.where("lease", "ns/x")) == {p for p in everything if p.lease_uid}
    assert set(pods.where("idle", "ns/pool")) == {p for p in everything if not p.lease_uid}


def test_a_key_waits_once_and_is_worked_on_by_one_at_a_time() -> None:
    async def scene() -> list[str]:
        queue: Queue[str] = Queue()
        for key in ("a", "b", "a"):
            queue.add(key)
        seen = [await queue.get(), await queue.get()]
        queue.add("a")  # while it is worked on
        assert queue._ready.empty()
        queue.done("a")
        seen.append(await queue.get())
        return seen

    assert asyncio.run(scene()) == ["a", "b", "a"]


def test_nothing_is_kept_for_a_key_that_has_nothing_left_to_do() -> None:
    async def scene() -> tuple[bool, bool]:
        queue: Queue[str] = Queue()
        queue.add_after("a", 14400)
        waits = bool(queue._timers)
        queue.cancel("a")
        return waits, bool(queue._timers)

    assert asyncio.run(scene()) == (True, False)


def test_what_is_gone_is_forgotten_however_the_operator_hears_of_it() -> None:
    """A list tells of what a broken watch will never tell."""

    async def scene() -> tuple[list[int], list[int]]:
        cache = Cache()
        pods = Pods(Api(), cache, Random(0))
        reconciler = Reconciler(Api(), cache, pods, Events(Api()))
        cache.pools.put(pool())
        cache.leases.put(lease())
        cache.pods.put(pod(0))
        pods.furnished.add("pod-0")
        pods.deleting.add("pod-0")
        pods.observe(pool(), NOW)
        reconciler.lease_changed(lease())
        lease_queue = reconciler._queues["lease"]
        lease_queue.add_after(Key("lease", "ns", "l"), 14400)
        kept = [pods.furnished, pods.deleting, pods._pools, reconciler.seen, lease_queue._timers]
        before = [len(each) for each in kept]
        for shelf, gone in (
            (cache.pools, reconciler.pool_gone),
            (cache.leases, reconciler.lease_gone),
            (cache.pods, reconciler.pod_gone),
        ):
            _, lost = shelf.replace([], version=99)  # type: ignore[attr-defined]
            for each in lost:
                gone(each)  # type: ignore[operator]
        working = asyncio.create_task(reconciler.work())
        async with asyncio.timeout(30):
            while lease_queue._timers or lease_queue._dirty:
                await asyncio.sleep(0)
        working.cancel()
        reconciler.close()
        return before, [len(each) for each in kept]

    assert asyncio.run(scene()) == ([1, 1, 1, 1, 1], [0, 0, 0, 0, 0])


def test_failures_are_retried_later_each_time_and_success_forgets() -> None:
    async def scene() -> list[float]:
        queue: Queue[str] = Queue()
        delays = [queue.retry("a") for _ in range(9)]
        queue.forget("a")
        delays.append(queue.retry("a", at_least=3.0))
        queue.close()
        return delays

    assert asyncio.run(scene()) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 3.0]


def test_of_several_moments_the_earliest_counts() -> None:
    async def scene() -> str:
        queue: Queue[str] = Queue()
        queue.add_after("a", 60)
        queue.add_after("a", 0.01)
        queue.add_after("a", 90)
        return await asyncio.wait_for(queue.get(), 5)

    assert asyncio.run(scene()) == "a"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_watch_that_owes_a_change_is_found_silent() -> None:
    clock = Clock()
    freshness = Freshness(clock)
    freshness.told("pods", "a", 5)
    freshness.listed("pods", [("a", 5)])
    freshness.complete({"a"})
    clock.now = 100.0
    assert freshness.lag() == 0.0 and freshness.problems() == []  # a quiet cluster is no silent watch
    freshness.listed("pods", [("a", 6)])
    freshness.complete({"a"})
    clock.now = 100.0 + SILENT_S + 1
    freshness.listed("pods", [("a", 9)])
    freshness.complete({"a"})
    assert freshness.lag() == SILENT_S + 1 and "watch of pods" in freshness.problems()[0]
    freshness.told("pods", "a", 6)
    assert freshness.problems() == []


def test_an_object_that_is_gone_owes_nothing() -> None:
    clock = Clock()
    freshness = Freshness(clock)
    freshness.listed("pods", [("a", 6), ("b", 6)])  # b is never told of: missing from the next list
    clock.now = SILENT_S + 1
    freshness.told("pods", "a", 7, gone=True)
    freshness.complete({"a"})
    assert freshness.problems() == []


def test_lists_that_fail_for_long_are_unhealthy() -> None:
    clock = Clock()
    freshness = Freshness(clock)
    assert (freshness.problems(), freshness.unready()) == ([], ["the cluster has not been listed yet"])
    clock.now = BLIND_S + 1
    assert "no complete list" in freshness.problems()[0] and freshness.unready() == freshness.problems()
    freshness.complete({"a"})
    assert freshness.problems() == freshness.unready() == []


def test_the_api_server_is_where_every_pod_is_told_it_is() -> None:
    assert (
        server_of({"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"})
        == "https://10.96.0.1:6443"
    )
    assert server_of({"KUBERNETES_SERVICE_HOST": "fd00::1"}) == "https://[fd00::1]:443"
    assert server_of({}) == ""


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (404, "NotFound", NotFound),
        (409, "Conflict", Conflict),
        (409, "AlreadyExists", Exists),
        (403, "Forbidden", Refused),
        (422, "Invalid", Refused),
        (405, "MethodNotAllowed", ApiError),
        (500, "InternalError", Unclear),
        (504, "Timeout", Unclear),
    ],
)
def test_what_an_answer_means_for_a_write(status: int, reason: str, kind: type[Exception]) -> None:
    assert type(failure(status, json.dumps({"reason": reason, "message": "m"}).encode(), None)) is kind


def test_a_busy_api_server_says_when_to_come_back() -> None:
    busy = failure(429, b"<html>", "7")
    assert isinstance(busy, ApiError) and busy.retry_s == 7.0 and "<html>" in busy.message


@pytest.mark.parametrize("text", [b"null", b'"bad gateway"', b"[]", b"<html>", b""])
def test_an_answer_that_is_no_object_is_an_answer(text: bytes) -> None:
    assert isinstance(failure(502, text, None), Unclear) and isinstance(failure(403, text, None), Refused)


def test_a_token_that_is_renewed_under_many_calls_fails_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More calls than connections: some wait for one while the first is told 401."""
    file = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(file))

    async def answer(request: web.Request) -> web.Response:
        if request.headers["Authorization"] == "Bearer new":
            return web.json_response({})
        file.write_text(file.read_text().replace("token: old", "token: new"))
        return web.json_response({"reason": "Unauthorized"}, status=401)

    async def scene() -> list[object]:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        async with TestServer(app) as server:
            cluster = f"clusters: [{{name: c, cluster: {{server: 'http://127.0.0.1:{server.port}'}}}}]\n"
            users = "users:\n- name: u\n  user:\n    token: old\n"
            contexts = "contexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"
            file.write_text(cluster + users + contexts)
            api = Api()
            try:
                return list(await asyncio.gather(*(api.call("GET", "/x") for _ in range(60)), return_exceptions=True))
            finally:
                await api.close()

    assert asyncio.run(scene()) == [{}] * 60


def test_paths() -> None:
    assert path("pods", "ns", "p-0") == "/api/v1/namespaces/ns/pods/p-0"
    assert (
        path("sandboxleases", "ns", "l", "status") == "/apis/occamy.dev/v1alpha1/namespaces/ns/sandboxleases/l/status"
    )
    assert path("sandboxpools") == "/apis/occamy.dev/v1alpha1/sandboxpools"


SNAPSHOT = {"lease": "l", "leaseUid": "u", "uri": "s3://b/k", "fingerprint": "sha256:" + "0" * 64}


def test_a_snapshot_is_sealed_once_and_refused_when_it_changes() -> None:
    first = judge(SNAPSHOT, None)
    assert first.phase == "Sealed" and judge(SNAPSHOT, first.sealed) == first
    changed = judge({**SNAPSHOT, "uri": "s3://b/other"}, first.sealed)
    assert changed.phase == "Refused" and changed.sealed == first.sealed
    assert judge({**SNAPSHOT, "fingerprint": "md5:0"}, None).phase == "Refused"


def test_a_slot_is_read_from_our_names_only() -> None:
    assert pod(7).slot == 7
    assert replace(pod(7), name="strange-name").slot == -1
