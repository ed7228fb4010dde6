"""Snapshots are records: sealed when first seen, refused when they break a rule or were changed since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from occamy.contracts.record import digest
from operators.sandbox.api import Api, Conflict, NotFound, path
from operators.sandbox.models import SnapshotSpec, SnapshotStatus
from operators.sandbox.views import parse_spec


def judge(spec: Mapping[str, Any], sealed: str | None) -> SnapshotStatus:
    """What a snapshot's status should say; `sealed` is the digest in its present status. Pure."""
    parsed, problem = parse_spec(SnapshotSpec, spec)
    if parsed is None:
        return SnapshotStatus(phase="Refused", sealed=sealed, message=problem)
    now = digest(parsed)
    if sealed is not None and sealed != now:
        return SnapshotStatus(phase="Refused", sealed=sealed, message="changed since it was sealed")
    return SnapshotStatus(phase="Sealed", sealed=now)


async def judge_snapshot(api: Api, body: Mapping[str, Any]) -> None:
    """Write the status, unless it is there already."""
    known = body.get("status") or {}
    status = judge(body.get("spec") or {}, known.get("sealed")).wire()
    if status == known:
        return
    meta = body["metadata"]
    gone = {name: None for name in known if name not in status}
    same = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}  # or it was changed since it was seen
    patch = {"metadata": same, "status": status | gone}
    try:
        await api.call("PATCH", path("sandboxsnapshots", meta["namespace"], meta["name"], "status"), patch)
    except (NotFound, Conflict):
        return
