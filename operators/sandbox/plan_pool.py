"""What a pool needs next, as a pure function of its specification and what is observed. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from operators.sandbox.models import PoolSpec, PoolStatus
from operators.sandbox.views import LEASE_UID_LABEL, POOL_UID_LABEL, Pod, Pool

RETRY_S = 30.0
"""How long a warm pod that ended keeps its place: bounds how fast a crashing image is retried. Our choice."""


@dataclass(frozen=True)
class Hold:
    """The API server refused a pod; nothing is created until it is over."""

    reason: str
    message: str
    until: float


@dataclass(frozen=True)
class Observed:
    """The pods of a pool, and what is under way that no list shows yet."""

    pods: tuple[Pod, ...]
    creating: Mapping[int, bool] = field(default_factory=dict)
    """Slots whose creation was sent and not answered: True for a warm pod, False for one that a lease waits for."""
    deleting: frozenset[str] = frozenset()
    """UIDs whose deletion was sent."""
    reserved: frozenset[str] = frozenset()
    """UIDs that a claim is about to swap."""
    blocked: frozenset[int] = frozenset()
    """Slots whose name somebody else's pod has."""
    hold: Hold | None = None


@dataclass(frozen=True)
class Deletion:
    """A pod to delete, if it still is what was observed."""

    pod: Pod
    reason: str


@dataclass(frozen=True)
class PoolPlan:
    """Actions of one reconcile."""

    create: tuple[int, ...]
    """Slots in which to create warm pods."""
    delete: tuple[Deletion, ...]
    status: PoolStatus
    wake: float | None
    """Unix time at which to look again without any event."""


def plan_pool(pool: Pool, seen: Observed, now: float) -> PoolPlan:
    """Bring a pool towards its target, never above it and never above its maximum.

    Everything that is not gone counts: starting, ended, terminating, and creations without an answer.
    """
    if pool.spec is None or pool.deleting:
        status = _status(pool, seen, "Refused" if pool.spec is None else "", pool.problem)
        return PoolPlan((), (), status, None)
    spec = pool.spec
    idle = [p for p in seen.pods if not p.lease_uid]
    busy = seen.deleting | seen.reserved
    alive = [p for p in idle if not p.terminating and p.ended is None and p.uid not in busy]
    fresh = [p for p in alive if p.template == pool.template and now - p.created < spec.idle_seconds]
    late = {p.uid for p in fresh if not p.ready and now - p.created > spec.start_seconds}
    kept = [p for p in fresh if p.uid not in late]
    leaving = sum(p.terminating or p.ended is not None or p.uid in seen.deleting for p in seen.pods)
    room = spec.max - (len(seen.pods) - leaving - len(kept))
    deletions = _ended(idle, seen, now) + _surplus(kept, max(0, min(spec.warm, room)))
    going = sum(p.terminating or p.uid in seen.deleting for p in idle) + len(deletions)
    deletions += _outdated(alive, kept, late, max(0, spec.batch - going - sum(not p.ready for p in kept)))
    create, reason, message = _creations(spec, seen, idle, now)
    status = _status(pool, seen, reason, message)
    return PoolPlan(create, tuple(deletions), status, _wake(spec, seen, idle, now))


def free_slots(spec: PoolSpec, seen: Observed) -> list[int]:
    """Slots in which a pod may be created now, lowest first: names make the maximum hold even across operators."""
    used = {p.slot for p in seen.pods} | set(seen.creating) | seen.blocked
    room = spec.max - len(seen.pods) - len(seen.creating)
    return [slot for slot in range(spec.max) if slot not in used][: max(0, room)]


def claimable(pod: Pod, pool: Pool, now: float) -> bool:
    """Whether a lease may take this pod: it serves, nobody holds it, nothing takes it away, its template is current."""
    return (
        pool.spec is not None
        and pod.ready
        and not pod.lease_uid
        and not pod.terminating
        and pod.ended is None
        and pod.pool_uid == pool.uid
        and pod.template == pool.template
        and now - pod.created < pool.spec.idle_seconds
    )


def _ended(idle: Iterable[Pod], seen: Observed, now: float) -> list[Deletion]:
    return [
        Deletion(p, "Ended")
        for p in idle
        if p.ended is not None and now - p.ended >= RETRY_S and not p.terminating and p.uid not in seen.deleting
    ]


def _surplus(kept: list[Pod], warm: int) -> list[Deletion]:
    """Beyond the target, or what a lowered max leaves of it: those that do not serve first, then the oldest."""
    if len(kept) <= warm:
        return []
    ranked = sorted(kept, key=lambda p: (p.ready, p.created, p.slot))
    return [Deletion(p, "ScaledDown") for p in ranked[: len(kept) - warm]]


def _outdated(alive: list[Pod], kept: list[Pod], late: set[str], budget: int) -> list[Deletion]:
    """Pods of an older template, too old or too slow, as many as the batch allows."""
    keep = {p.uid for p in kept}
    old = sorted((p for p in alive if p.uid not in keep), key=lambda p: (p.ready, p.created, p.slot))
    return [Deletion(p, "Late" if p.uid in late else "Outdated") for p in old[:budget]]


def _creations(spec: PoolSpec, seen: Observed, idle: list[Pod], now: float) -> tuple[tuple[int, ...], str, str]:
    """Slots to fill, and why not more."""
    want = spec.warm - len(idle) - sum(seen.creating.values())
    if want <= 0:
        return (), "", ""
    if seen.hold and seen.hold.until > now:
        return (), seen.hold.reason, seen.hold.message
    stuck = [p for p in idle if p.unschedulable and not p.terminating]  # a lease may ask for what no node has
    if stuck:
        return (), "Unschedulable", f"{len(stuck)} pods find no node, {stuck[0].name} among them; no more are created"
    slots = free_slots(spec, seen)
    if not slots:
        return (), "AtMax", f"{spec.max} pods, which is max, and {want} more wanted"
    return tuple(slots[: min(want, spec.batch)]), "", ""


def _status(pool: Pool, seen: Observed, reason: str, message: str) -> PoolStatus:
    idle = [p for p in seen.pods if not p.lease_uid]
    return PoolStatus(
        observed_generation=pool.generation,
        replicas=len(idle),
        ready=sum(p.ready and not p.terminating and p.template == pool.template for p in idle),
        leased=len(seen.pods) - len(idle),
        total=len(seen.pods),
        selector=f"{POOL_UID_LABEL}={pool.uid},!{LEASE_UID_LABEL}",
        template_hash=pool.template or None,
        reason=reason or None,
        message=message[:1000] or None,
    )


def _wake(spec: PoolSpec, seen: Observed, idle: list[Pod], now: float) -> float | None:
    """The next moment at which time alone changes the plan."""
    moments = [seen.hold.until] if seen.hold else []
    for p in idle:
        if p.ended is not None:
            moments.append(p.ended + RETRY_S)
        elif not p.ready:
            moments.append(p.created + min(spec.start_seconds, spec.idle_seconds))
    serving = {p.created for p in idle if p.ready and p.ended is None}
    moments += [created + spec.idle_seconds for created in serving]
    return min((m for m in moments if m > now), default=None)
