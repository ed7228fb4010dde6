"""What a pool does next: hand-computed cases, and the bound as a property over many rounds of a small world."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from made_sandboxes import NOW, pod, pool

from operators.sandbox.plan_pool import RETRY_S, Hold, Observed, free_slots, plan_pool
from operators.sandbox.views import Pod


def test_an_empty_pool_is_filled_to_its_target_in_the_lowest_slots() -> None:
    plan = plan_pool(pool(warm=3), Observed(pods=()), NOW)
    assert plan.create == (0, 1, 2)
    assert plan.delete == ()
    assert plan.status.ready == 0 and plan.status.reason is None


def test_no_more_than_a_batch_is_created_at_once() -> None:
    assert plan_pool(pool(warm=9, batch=2), Observed(pods=()), NOW).create == (0, 1)


def test_pods_that_never_serve_end_and_leave_are_counted() -> None:
    pods = (
        pod(0, ready=False),
        pod(1, ready=False, ended=NOW - 1),
        pod(2, terminating=True),
    )
    plan = plan_pool(pool(warm=5), Observed(pods=pods, creating={3: True}), NOW)
    assert plan.create == (4,)


def test_a_creation_for_a_lease_takes_room_but_no_place_in_the_target() -> None:
    seen = Observed(pods=(), creating={0: False, 1: True})
    assert plan_pool(pool(warm=3, max=4), seen, NOW).create == (2, 3)
    assert plan_pool(pool(warm=3, max=3), seen, NOW).create == (2,)


def test_leased_pods_count_against_max_alone() -> None:
    held = tuple(pod(slot, lease_uid="x") for slot in range(8))
    plan = plan_pool(pool(warm=5, max=10), Observed(pods=held), NOW)
    assert plan.create == (8, 9)
    full = plan_pool(pool(warm=5, max=8), Observed(pods=held), NOW)
    assert full.create == () and full.status.reason == "AtMax"
    assert full.status.leased == 8 and full.status.total == 8


def test_a_pool_whose_pods_find_no_node_is_held() -> None:
    plan = plan_pool(pool(warm=5), Observed(pods=(pod(0, ready=False, unschedulable=True),)), NOW)
    assert plan.create == ()
    assert plan.status.reason == "Unschedulable" and "p-0" in (plan.status.message or "")


def test_a_lease_that_asks_for_what_no_node_has_stops_no_refill() -> None:
    odd = pod(0, lease_uid="x", cold=True, ready=False, unschedulable=True)
    assert plan_pool(pool(warm=2), Observed(pods=(odd,)), NOW).create == (1, 2)


def test_a_lowered_max_takes_idle_pods_until_it_holds() -> None:
    held = tuple(pod(slot, lease_uid="x") for slot in range(3))
    idle = (pod(3, created=NOW - 90), pod(4, ready=False), pod(5), pod(6), pod(7))
    plan = plan_pool(pool(warm=5, max=5), Observed(pods=held + idle), NOW)
    assert [d.pod.name for d in plan.delete] == ["p-4", "p-3", "p-5"] and plan.create == ()
    leaving = tuple(replace(p, terminating=p.name in ("p-4", "p-3", "p-5")) for p in held + idle)
    assert plan_pool(pool(warm=5, max=5), Observed(pods=leaving), NOW).delete == ()
    full = plan_pool(pool(warm=2, max=2), Observed(pods=held + idle), NOW)
    assert len(full.delete) == 5  # leased pods are never taken


def test_a_refusal_of_the_api_server_holds_until_its_time() -> None:
    hold = Hold("QuotaExceeded", "exceeded quota: pods=3", NOW + 5)
    plan = plan_pool(pool(warm=5), Observed(pods=(), hold=hold), NOW)
    assert plan.create == () and plan.status.reason == "QuotaExceeded" and plan.wake == NOW + 5
    assert plan_pool(pool(warm=1), Observed(pods=(), hold=hold), NOW + 5).create == (0,)


def test_an_ended_pod_is_replaced_after_a_while() -> None:
    ended = pod(0, ready=False, ended=NOW - 5)
    early = plan_pool(pool(warm=1), Observed(pods=(ended,)), NOW)
    assert early.delete == () and early.create == () and early.wake == NOW - 5 + RETRY_S
    late = plan_pool(pool(warm=1), Observed(pods=(ended,)), NOW + RETRY_S)
    assert [(d.pod.name, d.reason) for d in late.delete] == [("p-0", "Ended")] and late.create == ()


def test_scaling_down_takes_pods_that_do_not_serve_first_and_none_that_is_held() -> None:
    pods = (pod(0), pod(1, ready=False), pod(2, created=NOW - 90), pod(3, lease_uid="x"))
    plan = plan_pool(pool(warm=1), Observed(pods=pods), NOW)
    assert [(d.pod.name, d.reason) for d in plan.delete] == [("p-1", "ScaledDown"), ("p-2", "ScaledDown")]


def test_a_pod_that_a_claim_is_about_to_swap_is_not_deleted() -> None:
    plan = plan_pool(pool(warm=0), Observed(pods=(pod(0), pod(1)), reserved=frozenset({"pod-0"})), NOW)
    assert [d.pod.name for d in plan.delete] == ["p-1"]


def test_pods_of_an_older_template_go_a_batch_at_a_time() -> None:
    pods = tuple(pod(slot, template="old") for slot in range(4))
    plan = plan_pool(pool(warm=4, batch=2), Observed(pods=pods), NOW)
    assert [(d.pod.name, d.reason) for d in plan.delete] == [("p-0", "Outdated"), ("p-1", "Outdated")]
    assert plan.create == ()
    later = (pod(0, terminating=True, template="old"), pod(1, ready=False), *pods[2:])
    assert plan_pool(pool(warm=4, batch=2), Observed(pods=later), NOW).delete == ()


def test_pods_too_slow_or_too_old_are_replaced() -> None:
    slow, old = pod(0, ready=False, created=NOW - 601), pod(1, created=NOW - 21600)
    plan = plan_pool(pool(warm=2), Observed(pods=(slow, old)), NOW)
    assert {(d.pod.name, d.reason) for d in plan.delete} == {("p-0", "Late"), ("p-1", "Outdated")}


def test_a_pool_that_breaks_a_rule_creates_nothing_and_says_which() -> None:
    broken = replace(pool(warm=5), spec=None, problem="warm may not exceed max")
    plan = plan_pool(broken, Observed(pods=()), NOW)
    assert plan.create == () and plan.status.reason == "Refused" and plan.status.message == "warm may not exceed max"


def test_a_slot_whose_name_is_taken_by_another_pod_is_left_out() -> None:
    spec = pool(warm=2).spec
    assert spec is not None
    assert free_slots(spec, Observed(pods=(pod(1),), blocked=frozenset({0})))[:2] == [2, 3]


FATES = st.sampled_from(["stay", "ready", "end", "unschedulable", "terminate", "vanish", "lease", "stale"])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8), st.lists(FATES, max_size=8)), min_size=1, max_size=30),
    st.integers(1, 3),
)
def test_never_above_target_nor_max_whatever_becomes_of_the_pods(
    rounds: list[tuple[int, int, list[str]]], batch: int
) -> None:
    """A world of pods that start, end, leave, are leased and grow stale, while the target moves: no plan creates
    beyond target or maximum, no name is used twice, and nothing that is held is ever deleted."""
    world: dict[str, Pod] = {}
    for turn, (warm, extra, fates) in enumerate(rounds):
        now = NOW + 20 * turn
        current = pool(warm=warm, max=max(1, warm + extra), batch=batch)
        assert current.spec is not None
        plan = plan_pool(current, Observed(pods=tuple(world.values())), now)
        idle = [p for p in world.values() if not p.lease_uid]
        assert len(plan.create) <= max(0, warm - len(idle))
        assert len(world) + len(plan.create) <= max(current.spec.max, len(world))
        assert all(not d.pod.lease_uid and not d.pod.terminating for d in plan.delete)
        assert len({d.pod.uid for d in plan.delete}) == len(plan.delete)
        for slot in plan.create:
            assert f"p-{slot}" not in world
            world[f"p-{slot}"] = pod(slot, uid=f"{turn}-{slot}", ready=False, created=now)
        for deletion in plan.delete:
            world[deletion.pod.name] = replace(deletion.pod, terminating=True)
        for name, fate in zip(sorted(world), fates):
            world[name] = _befall(world[name], fate, now)
            if fate == "vanish":
                del world[name]


def _befall(pod_: Pod, fate: str, now: float) -> Pod:
    if fate == "ready" and pod_.ended is None:
        return replace(pod_, ready=True, unschedulable=False)
    if fate == "end":
        return replace(pod_, ready=False, ended=now)
    if fate == "unschedulable":
        return replace(pod_, ready=False, unschedulable=True)
    if fate == "terminate":
        return replace(pod_, terminating=True)
    if fate == "lease" and pod_.ready and not pod_.terminating:
        return replace(pod_, lease_uid="x")
    return replace(pod_, template="old") if fate == "stale" else pod_


def test_one_hundred_rounds_with_pods_that_never_serve_stay_at_the_target() -> None:
    world: dict[int, Pod] = {}
    for turn in range(100):
        plan = plan_pool(pool(warm=5), Observed(pods=tuple(world.values())), NOW + turn)
        for slot in plan.create:
            world[slot] = pod(slot, ready=False, created=NOW + turn)
        assert len(world) <= 5
    assert len(world) == 5
