"""What a lease does next: hand-computed cases, and the claim, the deletion race and the leak as properties."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_sandboxes import NOW, lease, pod, pool

from operators.sandbox.models import LeaseStatus, Phase
from operators.sandbox.plan_lease import RETENTION_S, LeaseObserved, plan_lease
from operators.sandbox.plan_pool import Hold, claimable
from operators.sandbox.resources import GRACE_S, claim_patch
from operators.sandbox.resync import orphaned
from operators.sandbox.views import Lease, Pod, Pool, moment

BOUND = LeaseStatus(phase=Phase.bound, pod="p-0", pod_uid="pod-0", accepted="terms")


def held(slot: int = 0, **changes: object) -> Pod:
    return pod(slot, lease_uid="uid-l", lease="l", **changes)


def test_a_warm_pod_is_claimed_where_there_is_one() -> None:
    plan = plan_lease(lease(), LeaseObserved(pool(), candidates=(pod(0), pod(1)), slots=(2,)), NOW)
    assert [p.name for p in plan.claim] == ["p-0", "p-1"] and plan.create is None and plan.status is None


def test_without_one_a_pod_is_created_and_waited_for() -> None:
    assert plan_lease(lease(), LeaseObserved(pool(), slots=(2, 3)), NOW).create == 2
    waiting = plan_lease(lease(), LeaseObserved(pool(), own=(held(ready=False),)), NOW)
    assert waiting.status is not None and waiting.status.reason == "Starting"
    assert waiting.status.expires == moment(NOW + 590) and waiting.wake == NOW + 590


def test_a_pod_that_serves_is_bound_with_all_that_its_holder_needs() -> None:
    status = plan_lease(lease(), LeaseObserved(pool(), own=(held(),)), NOW).status
    assert status is not None
    assert (status.phase, status.pod, status.pod_uid) == (Phase.bound, "p-0", "pod-0")
    assert (status.endpoint, status.token_secret, status.launch) == ("http://10.0.0.1:8750", "p-0-n0", "warm")
    cold = plan_lease(lease(), LeaseObserved(pool(), own=(held(cold=True, ip="fd00::1"),)), NOW).status
    assert cold is not None and cold.launch == "cold" and cold.endpoint == "http://[fd00::1]:8750"


def test_a_bound_lease_is_left_alone_until_its_deadline() -> None:
    plan = plan_lease(lease(status=BOUND), LeaseObserved(pool(), own=(held(),)), NOW)
    assert plan.status is None and plan.delete == () and plan.wake == NOW + 590


def test_overrides_are_honoured_by_a_new_pod_and_never_by_a_warm_one() -> None:
    wants = lease(overrides={"env": [{"name": "A", "value": "1"}]})
    plan = plan_lease(wants, LeaseObserved(pool(), candidates=(pod(0),), slots=(4,)), NOW)
    assert plan.claim == () and plan.create == 4


@pytest.mark.parametrize(
    ("changes", "spec", "reason"),
    [
        ({"ttlSeconds": 20000}, {}, "TtlTooLong"),
        ({"launch": "warm"}, {"warm": 0}, "NoWarmPods"),
    ],
)
def test_what_the_pool_can_never_honour_is_refused(
    changes: dict[str, object], spec: dict[str, int], reason: str
) -> None:
    status = plan_lease(lease(**changes), LeaseObserved(pool(**spec), slots=(0,)), NOW).status
    assert status is not None and (status.phase, status.reason) == (Phase.failed, reason)


@pytest.mark.parametrize(
    ("seen", "reason", "again"),
    [
        (LeaseObserved(pool()), "AtMax", 590),
        (LeaseObserved(None), "NoPool", 590),
        (LeaseObserved(replace(pool(), spec=None, problem="broken")), "PoolRefused", 590),
        (LeaseObserved(pool(), slots=(0,), hold=Hold("QuotaExceeded", "no", NOW + 5)), "QuotaExceeded", 5),
        (LeaseObserved(pool(), slots=(0,), hold=Hold("QuotaExceeded", "no", NOW + 900)), "QuotaExceeded", 590),
    ],
)
def test_a_lease_that_cannot_have_a_pod_yet_waits_and_says_why(seen: LeaseObserved, reason: str, again: int) -> None:
    plan = plan_lease(lease(), seen, NOW)
    assert plan.status is not None and (plan.status.phase, plan.status.reason) == (Phase.pending, reason)
    assert plan.create is None and plan.claim == () and plan.wake == NOW + again


def test_a_warm_launch_waits_for_a_warm_pod() -> None:
    plan = plan_lease(lease(launch="warm"), LeaseObserved(pool(warm=1), slots=(0,)), NOW)
    assert plan.create is None and plan.status is not None and plan.status.reason == "NoWarmPod"


def test_the_deadline_takes_everything_away() -> None:
    plan = plan_lease(lease(status=BOUND), LeaseObserved(pool(), own=(held(),)), NOW + 590)
    assert [d.pod.uid for d in plan.delete] == ["pod-0"]
    assert plan.status is not None and (plan.status.phase, plan.status.reason) == (Phase.expired, "DeadlinePassed")


def test_a_heartbeat_that_stays_away_ends_the_lease_early() -> None:
    renewed = lease(status=BOUND, heartbeatSeconds=30, renewed=moment(NOW))
    alive = plan_lease(renewed, LeaseObserved(pool(), own=(held(),)), NOW + 29)
    assert alive.status is None and alive.wake == NOW + 30
    dead = plan_lease(renewed, LeaseObserved(pool(), own=(held(),)), NOW + 30)
    assert dead.status is not None and dead.status.reason == "HeartbeatMissed" and len(dead.delete) == 1


def test_release_by_its_holder_keeps_the_record_for_a_while() -> None:
    plan = plan_lease(lease(status=BOUND, released=True), LeaseObserved(pool(), own=(held(),)), NOW)
    assert plan.status is not None and plan.status.phase is Phase.released and len(plan.delete) == 1
    done = lease(status=plan.status)
    assert plan_lease(done, LeaseObserved(pool()), NOW + RETENTION_S - 1).remove is False
    assert plan_lease(done, LeaseObserved(pool()), NOW + RETENTION_S).remove is True


def test_a_pod_that_is_lost_fails_the_lease_and_one_of_the_same_name_is_not_it() -> None:
    again = held(uid="another")
    plan = plan_lease(lease(status=BOUND), LeaseObserved(pool(), own=(again,)), NOW)
    assert plan.status is not None and plan.status.reason == "PodLost"
    assert [d.pod.uid for d in plan.delete] == ["another"]


def test_terms_cannot_be_changed_once_accepted() -> None:
    changed = replace(lease(status=BOUND), terms="others")
    status = plan_lease(changed, LeaseObserved(pool(), own=(held(),)), NOW).status
    assert status is not None and status.reason == "TermsChanged"


def test_of_two_pods_that_a_lost_answer_left_one_goes() -> None:
    plan = plan_lease(lease(), LeaseObserved(pool(), own=(held(0, ready=False), held(1))), NOW)
    assert plan.status is not None and plan.status.pod == "p-1"
    assert [(d.pod.name, d.reason) for d in plan.delete] == [("p-0", "HeldTwice")]


def test_a_lease_that_is_being_deleted_gets_nothing_and_keeps_no_pod() -> None:
    leaving = replace(lease(status=BOUND), deleting=True)
    plan = plan_lease(leaving, LeaseObserved(pool(), own=(held(),), candidates=(pod(1),), slots=(2,)), NOW)
    assert (plan.claim, plan.create, plan.status) == ((), None, None)
    assert [d.pod.uid for d in plan.delete] == ["pod-0"]  # a finalizer may keep the lease for ever


@pytest.mark.parametrize(
    ("spec", "edited"), [({"launch": "warm"}, {"warm": 0}), ({"ttlSeconds": 3000}, {"maxLeaseSeconds": 60})]
)
def test_an_edit_of_the_pool_refuses_new_leases_and_leaves_those_that_have_a_pod(
    spec: dict[str, object], edited: dict[str, int]
) -> None:
    current = pool(**edited)
    bound = plan_lease(lease(status=BOUND, **spec), LeaseObserved(current, own=(held(),)), NOW)
    assert bound.status is None and bound.delete == ()
    claimed = plan_lease(lease(**spec), LeaseObserved(current, own=(held(),)), NOW)
    assert claimed.status is not None and claimed.status.phase is Phase.bound
    fresh = plan_lease(lease(**spec), LeaseObserved(current, candidates=(pod(1),)), NOW)
    assert fresh.status is not None and fresh.status.phase is Phase.failed


def test_a_claim_swaps_one_version_of_one_pod_and_shortens_its_life() -> None:
    patch = claim_patch(pod(0), lease(), NOW)
    assert patch["metadata"]["uid"] == "pod-0" and patch["metadata"]["resourceVersion"] == "10"
    assert patch["metadata"]["ownerReferences"][0]["uid"] == "uid-l"
    assert patch["spec"]["activeDeadlineSeconds"] == 59 + 590 + GRACE_S
    assert claim_patch(pod(0, limit=100), lease(), NOW)["spec"]["activeDeadlineSeconds"] == 100


STEPS = st.tuples(
    st.sampled_from(["claim", "claim", "touch", "terminate", "vanish", "look"]), st.integers(0, 5), st.integers(0, 7)
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.lists(STEPS, min_size=5, max_size=60), st.integers(0, 9))
def test_concurrent_claims_on_a_stale_view_never_share_a_pod(
    pods: int, steps: list[tuple[str, int, int]], seed: int
) -> None:
    """Leases plan on an old copy of the pods; the API server takes a swap only for the version it has. Pods are
    touched, deleted and finished meanwhile. No pod gets two leases, no lease two living pods, and none is swapped
    that is being deleted."""
    store = {f"pod-{slot}": pod(slot) for slot in range(pods)}
    view = dict(store)
    leases = [lease(f"l{n}") for n in range(8)]
    random = Random(seed)
    current = pool(max=20)
    for what, slot, number in steps:
        uid = f"pod-{slot}"
        if what == "claim":
            _attempt(leases[number], current, store, view, random)
        elif what == "look":
            view = dict(store)
        elif uid in store and what == "vanish":
            del store[uid]
        elif uid in store:
            store[uid] = replace(store[uid], version=store[uid].version + 1, terminating=what == "terminate")
    holders = [p.lease_uid for p in store.values() if p.lease_uid and not p.terminating]
    assert len(holders) == len(set(holders))


def _attempt(wants: Lease, current: Pool, store: dict[str, Pod], view: dict[str, Pod], random: Random) -> None:
    """One claim as the operator makes it: plan on the view (its own writes included), swap in the store."""
    own = tuple(p for p in store.values() if p.lease_uid == wants.uid)
    ready = [p for p in view.values() if claimable(p, current, NOW)]
    plan = plan_lease(wants, LeaseObserved(current, own=own, candidates=ready), NOW)
    if not plan.claim:
        return
    patch = claim_patch(random.choice(plan.claim), wants, NOW)["metadata"]
    target = store.get(patch["uid"])
    if target is None or str(target.version) != patch["resourceVersion"]:
        view.pop(patch["uid"])
        if target is not None:
            view[target.uid] = target
        return
    assert not target.lease_uid and not target.terminating
    store[target.uid] = view[target.uid] = replace(target, version=target.version + 1, lease_uid=wants.uid)


@settings(max_examples=200, deadline=None)
@given(
    st.booleans(), st.booleans(), st.booleans(), st.integers(-1000, 1000), st.sampled_from(list(Phase)), st.booleans()
)
def test_no_pod_outlives_its_lease_by_more_than_the_grace(
    claimed: bool, lease_there: bool, pool_there: bool, past: int, phase: Phase, released: bool
) -> None:
    """Whatever died in between: a pod whose lease, pool or deadline is gone is deleted by the lease's plan or by the
    reaper."""
    deadline = NOW - past
    one = held(deadline=deadline) if claimed else pod(0)
    leases = {"uid-l"} if lease_there else set()
    pools = {"pool"} if pool_there else set()
    reaped = orphaned(one, leases, pools, NOW)
    if not claimed:
        assert (reaped is not None) == (not pool_there)
        return
    if not lease_there or past > GRACE_S:
        assert reaped is not None
        return
    status = BOUND.model_copy(update={"phase": phase})
    wants = replace(lease(status=status, released=released), created=deadline - 600)
    plan = plan_lease(wants, LeaseObserved(pool() if pool_there else None, own=(one,)), NOW)
    over = phase.final or released or past >= 0
    assert (len(plan.delete) == 1) == over
