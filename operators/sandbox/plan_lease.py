"""What a lease needs next, as a pure function of its specification and what is observed. No I/O, no clock, no chance:
among the candidates the caller picks one at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from operators.sandbox.models import Launch, LeaseSpec, LeaseStatus, Phase
from operators.sandbox.plan_pool import Deletion, Hold
from operators.sandbox.views import Lease, Pod, Pool, moment, seconds

RETENTION_S = 300.0
"""How long the record of a lease that ended is kept. Our choice."""


@dataclass(frozen=True)
class LeaseObserved:
    """What a lease has and could have."""

    pool: Pool | None
    own: tuple[Pod, ...] = ()
    """Pods that carry its UID."""
    candidates: Sequence[Pod] = ()
    """Warm pods that it could claim."""
    slots: Sequence[int] = ()
    """Slots in which a pod could be created for it."""
    hold: Hold | None = None
    deleting: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LeasePlan:
    """Actions of one reconcile. At most one of claim and create is there."""

    claim: Sequence[Pod] = ()
    """Take one of these."""
    create: int | None = None
    """Create a pod for it in this slot."""
    status: LeaseStatus | None = None
    """Write this, unless it is there already."""
    delete: tuple[Deletion, ...] = ()
    remove: bool = False
    """Delete the lease itself."""
    wake: float | None = None
    """Unix time at which to look again without any event."""


def plan_lease(lease: Lease, seen: LeaseObserved, now: float) -> LeasePlan:
    """Bind a lease to exactly one pod, and take everything away when it is over.

    What a deleted lease owns is collected with it, also without the operator; while somebody's finalizer keeps the
    lease itself, its pods go all the same.
    """
    status = lease.status
    if lease.deleting:
        return LeasePlan(delete=_all(seen, "LeaseDeleted"))
    if status.phase.final:
        return _after(lease, seen, now)
    if ending := over(lease, now):
        return finish(lease, seen, now, *ending)
    return _hold_one(lease, seen, now)


def over(lease: Lease, now: float) -> tuple[Phase, str, str] | None:
    """Phase, reason and words of a lease whose time is up, or that never should have been; None while it goes on."""
    if lease.spec is None:
        return Phase.failed, "Refused", lease.problem
    if lease.status.accepted is not None and lease.status.accepted != lease.terms:
        return Phase.failed, "TermsChanged", "only renewed and released may change"
    if lease.spec.released:
        return Phase.released, "Released", "by its holder"
    if now >= lease.deadline():
        reason = "HeartbeatMissed" if now < lease.latest() else "DeadlinePassed"
        return Phase.expired, reason, f"at {moment(lease.deadline())}"
    return None


def refused(spec: LeaseSpec, pool: Pool) -> tuple[str, str] | None:
    """Reason and words when this pool can never honour the lease. Not for one that has a pod: pools are edited."""
    if pool.spec is None:
        return None
    if spec.ttl_seconds > pool.spec.max_lease_seconds:
        return "TtlTooLong", f"ttlSeconds {spec.ttl_seconds}; pool {pool.name} allows {pool.spec.max_lease_seconds}"
    if spec.launch is Launch.warm and pool.spec.warm == 0:
        return "NoWarmPods", f"pool {pool.name} keeps no warm pods; use launch any or cold"
    return None


def _hold_one(lease: Lease, seen: LeaseObserved, now: float) -> LeasePlan:
    """Keep the pod that the lease has, or get one."""
    assert lease.spec is not None
    status = lease.status
    living = [p for p in seen.own if not p.terminating and p.ended is None and p.uid not in seen.deleting]
    if status.phase is Phase.bound:
        kept = [p for p in living if p.uid == status.pod_uid]
        if not kept:
            return finish(lease, seen, now, Phase.failed, "PodLost", f"pod {status.pod} is gone or has ended")
        return LeasePlan(delete=_others(seen, kept[0]), wake=lease.deadline())
    if any(p.ended is not None for p in seen.own):
        return finish(lease, seen, now, Phase.failed, "PodEnded", "its pod ended before it served")
    if living:
        pod = min(living, key=lambda p: (not p.ready, p.created, p.name))
        if pod.ready:
            return LeasePlan(status=bound(lease, pod, now), delete=_others(seen, pod), wake=lease.deadline())
        return wait(lease, "Starting", f"pod {pod.name} does not serve yet", now, _others(seen, pod))
    if seen.pool is None or seen.pool.deleting:
        return wait(lease, "NoPool", f"there is no pool {lease.pool} in {lease.namespace}", now)
    if seen.pool.spec is None:
        return wait(lease, "PoolRefused", seen.pool.problem, now)
    if refusal := refused(lease.spec, seen.pool):
        return finish(lease, seen, now, Phase.failed, *refusal)
    return _get(lease, seen, now)


def takes_warm(spec: LeaseSpec) -> bool:
    """Whether a pod that runs already can honour the lease."""
    return spec.launch is not Launch.cold and spec.overrides is None


def _get(lease: Lease, seen: LeaseObserved, now: float) -> LeasePlan:
    """A warm pod where that is wanted and honoured, else a new one."""
    assert lease.spec is not None
    if takes_warm(lease.spec) and seen.candidates:
        return LeasePlan(claim=seen.candidates)
    if lease.spec.launch is Launch.warm:
        return wait(lease, "NoWarmPod", "waits for a warm pod", now)
    if seen.hold and seen.hold.until > now:
        held = wait(lease, seen.hold.reason, seen.hold.message, now)
        return replace(held, wake=min(lease.deadline(), seen.hold.until))
    if not seen.slots:
        return wait(lease, "AtMax", f"pool {lease.pool} has as many pods as its max allows", now)
    return LeasePlan(create=seen.slots[0])


def bound(lease: Lease, pod: Pod, now: float) -> LeaseStatus:
    """The status of a lease that has this pod."""
    assert lease.spec is not None
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    return lease.status.model_copy(
        update={
            **accepted(lease, now),
            "phase": Phase.bound,
            "reason": None,
            "message": None,
            "pod": pod.name,
            "pod_uid": pod.uid,
            "launch": "cold" if pod.cold else "warm",
            "endpoint": f"http://{host}:{pod.port}" if pod.ip else None,
            "token_secret": f"{pod.name}-{pod.nonce}",
            "bound_at": moment(now),
        }
    )


def accepted(lease: Lease, now: float) -> dict[str, str]:
    """What is written once, when the lease is first seen."""
    return {
        "accepted": lease.terms,
        "accepted_at": lease.status.accepted_at or moment(now),
        "expires": moment(lease.latest()),
    }


def wait(lease: Lease, reason: str, message: str, now: float, delete: tuple[Deletion, ...] = ()) -> LeasePlan:
    """Pending, and why; looked at again when something happens, and at the deadline."""
    words = {"phase": Phase.pending, "reason": reason, "message": message[:1000]}
    status = lease.status.model_copy(update={**accepted(lease, now), **words})
    return LeasePlan(status=status, delete=delete, wake=lease.deadline())


def finish(lease: Lease, seen: LeaseObserved, now: float, phase: Phase, reason: str, message: str) -> LeasePlan:
    """Final: the pods go, and with them all that they own; the record stays for a while."""
    words = {"phase": phase, "reason": reason, "message": message[:1000], "ended_at": moment(now)}
    status = lease.status.model_copy(update=words)
    return LeasePlan(status=status, delete=_all(seen, reason), wake=now + RETENTION_S)


def _after(lease: Lease, seen: LeaseObserved, now: float) -> LeasePlan:
    """A lease that has ended: nothing of it may be left, and in the end not the record either."""
    ended = seconds(lease.status.ended_at) if lease.status.ended_at else lease.created
    remove = now >= ended + RETENTION_S
    return LeasePlan(delete=_all(seen, "LeaseEnded"), remove=remove, wake=None if remove else ended + RETENTION_S)


def _all(seen: LeaseObserved, reason: str) -> tuple[Deletion, ...]:
    return tuple(Deletion(p, reason) for p in seen.own if not p.terminating and p.uid not in seen.deleting)


def _others(seen: LeaseObserved, kept: Pod) -> tuple[Deletion, ...]:
    """Pods that the lease holds besides the one that counts: left by a claim whose answer was lost."""
    return tuple(d for d in _all(seen, "HeldTwice") if d.pod.uid != kept.uid)
