"""What docs/operating.md says of updates: what a new operator makes of old leases, and an old one of new fields."""

from __future__ import annotations

from typing import Any

import pytest
from made_sandboxes import NOW

from operators.sandbox.models import Phase
from operators.sandbox.plan_lease import LeaseObserved, plan_lease
from operators.sandbox.plan_pool import Observed, plan_pool
from operators.sandbox.views import Lease, Pool

META = {"namespace": "ns", "name": "x", "uid": "u", "resourceVersion": "1", "creationTimestamp": "2027-01-15T08:00:00Z"}
SHORT = {"pool": "p", "owner": {"run": "r"}, "ttlSeconds": 600}
LONG = {
    "pool": "p",
    "owner": {"run": "r", "task": "t", "episode": "e"},
    "ttlSeconds": 600,
    "launch": "cold",
    "overrides": {"env": [{"name": "A", "value": "b"}], "resources": {"cpu": "2"}},
}
POOL = {"template": {"image": "s:1"}, "max": 2, "network": {"profile": "none"}}


def parsed(spec: dict[str, Any], status: dict[str, Any] | None = None) -> Lease:
    return Lease.parse({"metadata": META, "spec": spec, "status": status or {}})


@pytest.mark.parametrize(
    ("spec", "digest"),
    [
        (SHORT, "sha256:eec8f74cecea7a2693abc99a5fb20867646e8ca13491b7ce677829dc07189298"),
        (LONG, "sha256:90634e87b67e3245bcc07c94144639fd6f1817d64191c20dd1c89ef0c5068236"),
    ],
)
def test_the_terms_of_a_lease_have_the_digest_that_earlier_operators_accepted(
    spec: dict[str, Any], digest: str
) -> None:
    """Another digest would fail every lease that is bound while the operator is updated, with TermsChanged."""
    assert parsed(spec).terms == digest


def test_an_operator_that_is_older_than_the_definitions_fails_leases_and_stops_pools() -> None:
    lease = parsed({**SHORT, "newer": 1}, {"phase": "Bound", "pod": "x-0", "podUid": "u"})
    status = plan_lease(lease, LeaseObserved(None), NOW).status
    assert status is not None
    assert (status.phase, status.reason) == (Phase.failed, "Refused")
    assert "newer" in (status.message or "")
    pool = Pool.parse({"metadata": META, "spec": {**POOL, "warm": 1, "newer": 1}})
    plan = plan_pool(pool, Observed(()), NOW)
    assert (plan.create, plan.delete, plan.status.reason) == ((), (), "Refused")


def test_an_operator_that_is_newer_than_the_definitions_takes_what_they_lack_as_its_default() -> None:
    assert parsed({k: v for k, v in SHORT.items() if k != "launch"}).spec == parsed({**SHORT, "launch": "any"}).spec
