"""Pools, leases and pods for tests of the planner: everything ordinary unless told otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from operators.sandbox.models import LeaseSpec, LeaseStatus, PoolSpec
from operators.sandbox.views import Lease, Pod, Pool

NOW = 1_800_000_000.0
PROXY = {"podLabels": {"app": "proxy"}, "ports": [8080]}
SPEC: dict[str, Any] = {"template": {"image": "sandbox:1"}, "max": 10, "network": {"proxy": PROXY}}


def pool(**spec: Any) -> Pool:
    """A pool `p` with UID `pool`, whose current template hash is `t`."""
    return Pool(
        namespace="ns",
        name="p",
        uid="pool",
        version=1,
        generation=1,
        deleting=False,
        spec=PoolSpec.model_validate(SPEC | spec),
        problem="",
        template="t",
        status={},
    )


def pod(slot: int, **changes: Any) -> Pod:
    """A pod of that pool that serves since a minute, and nobody holds."""
    made = Pod(
        namespace="ns",
        name=f"p-{slot}",
        uid=f"pod-{slot}",
        version=10,
        pool_uid="pool",
        template="t",
        nonce=f"n{slot}",
        lease_uid="",
        lease="",
        created=NOW - 60,
        started=NOW - 59,
        limit=40000,
        deadline=None,
        ready=True,
        ended=None,
        terminating=False,
        unschedulable=False,
        ip="10.0.0.1",
        port=8750,
        cold=False,
    )
    return replace(made, **changes)


def lease(name: str = "l", status: LeaseStatus | None = None, **spec: Any) -> Lease:
    """A lease on that pool, created ten seconds ago, for ten minutes."""
    wanted = LeaseSpec.model_validate({"pool": "p", "owner": {"run": "r"}, "ttlSeconds": 600} | spec)
    return Lease(
        namespace="ns",
        name=name,
        uid=f"uid-{name}",
        version=1,
        created=NOW - 10,
        deleting=False,
        pool="p",
        spec=wanted,
        problem="",
        terms="terms",
        status=status or LeaseStatus(),
        first_exec=None,
    )
