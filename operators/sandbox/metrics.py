"""What the operator tells Prometheus. Ratios are left to queries: warm hits over all claims by label `launch`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as _Counter
from prometheus_client import Gauge as _Gauge
from prometheus_client import Histogram as _Histogram

from operators.sandbox.views import Pod, Pool

REGISTRY = CollectorRegistry()

Counter = partial(_Counter, registry=REGISTRY)
Gauge = partial(_Gauge, registry=REGISTRY)
Histogram = partial(_Histogram, registry=REGISTRY)

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

CLAIM_SECONDS = Histogram(
    "occamy_sandbox_claim_seconds",
    "From the moment the operator saw a lease until it was bound.",
    ["namespace", "pool", "launch"],
    buckets=_BUCKETS,
)
FIRST_EXEC_SECONDS = Histogram(
    "occamy_sandbox_first_exec_seconds",
    "From the moment a lease was asked for until the agent in its pod answered: as its holder measured and says.",
    ["namespace", "pool", "launch"],
    buckets=_BUCKETS,
)
CONFLICTS = Counter(
    "occamy_sandbox_claim_conflicts_total", "Claims that found their pod changed.", ["namespace", "pool"]
)
PODS = Gauge("occamy_sandbox_pool_pods", "Pods by state.", ["namespace", "pool", "state"])
TARGET = Gauge("occamy_sandbox_pool_target", "Warm pods that a pool should have.", ["namespace", "pool"])
LEASES = Gauge("occamy_sandbox_leases", "Leases by phase.", ["phase"])
CREATED = Counter("occamy_sandbox_pods_created_total", "Pods created.", ["namespace", "pool", "launch"])
DELETED = Counter("occamy_sandbox_pods_deleted_total", "Pods deleted, by why.", ["reason"])
REAPED = Counter("occamy_sandbox_reaped_total", "Pods that nothing owned any more.", ["reason"])
ERRORS = Counter("occamy_sandbox_reconcile_errors_total", "Reconciles that failed.", ["kind", "error"])
WATCH_LAG = Gauge("occamy_sandbox_watch_lag_seconds", "How long a listed change has been missing from the watch.")
RESYNC_AGE = Gauge("occamy_sandbox_resync_age_seconds", "Since the last complete list.")


def observe_pool(pool: Pool, pods: Iterable[Pod]) -> None:
    """Count a pool's pods by state."""
    states = dict.fromkeys(("ready", "starting", "leased", "terminating", "ended"), 0)
    for pod in pods:
        if pod.terminating:
            state = "terminating"
        elif pod.ended is not None:
            state = "ended"
        elif pod.lease_uid:
            state = "leased"
        else:
            state = "ready" if pod.ready else "starting"
        states[state] += 1
    for state, count in states.items():
        PODS.labels(pool.namespace, pool.name, state).set(count)
    TARGET.labels(pool.namespace, pool.name).set(pool.spec.warm if pool.spec else 0)


def forget_pool(pool: Pool) -> None:
    """A pool is gone: stop reporting it."""
    for state in ("ready", "starting", "leased", "terminating", "ended"):
        PODS.remove(pool.namespace, pool.name, state)
    TARGET.remove(pool.namespace, pool.name)
    CONFLICTS.remove(pool.namespace, pool.name)
    for launch in ("warm", "cold"):
        for metric in (CLAIM_SECONDS, FIRST_EXEC_SECONDS, CREATED):
            metric.remove(pool.namespace, pool.name, launch)
