"""What admission leaves behind for every task: a receipt per gate, and a reason from a closed list when it refuses."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from occamy.contracts.record import Record

Gate = Literal["canonical", "feasible", "discoverable", "reference", "negatives", "release"]
GATES: tuple[Gate, ...] = ("canonical", "feasible", "discoverable", "reference", "negatives", "release")


class Reason(StrEnum):
    """Closed list of reasons why a task is quarantined."""

    not_a_contract = "not_a_contract"
    """Unreadable, not JSON, or not a contract of this schema version."""
    not_canonical = "not_canonical"
    """Identity, weights, templates or literals are not in normal form."""
    invalid_world = "invalid_world"
    """The initial state contradicts its own schema."""
    tool_unavailable = "tool_unavailable"
    """A tool is offered that the world lacks, or needed and not offered."""
    infeasible_goal = "infeasible_goal"
    """A goal speaks of a record, field or value that the world cannot hold."""
    contradictory_goals = "contradictory_goals"
    """Two goals want different things of one place."""
    met_at_start = "met_at_start"
    """A goal holds before anything is done."""
    misaligned = "misaligned"
    """Request, gold path and grader do not speak of the same things."""
    ambiguous = "ambiguous"
    """The request fits more than one record or field."""
    undiscoverable = "undiscoverable"
    """The gold path uses a literal that neither the request nor an earlier observation gives."""
    reference_failed = "reference_failed"
    """The gold path meets an error, misses a goal, or outgrows the budget."""
    nondeterministic = "nondeterministic"
    """Two runs of the gold path end in different states."""
    negative_passed = "negative_passed"
    """A run that should fail reached the threshold or the gold score."""
    wrong_partial_credit = "wrong_partial_credit"
    """A near miss did not get its weighted share."""
    contaminated = "contaminated"
    """Shares a literal or a clause skeleton with tasks of another split."""
    duplicate = "duplicate"
    """Asks the same, the same way, as an earlier task."""
    broken_lineage = "broken_lineage"
    """The parent is unknown, or the variant does not change what it claims to."""
    infra_failed = "infra_failed"
    """A gate itself broke; the task is kept for another look and not judged."""


class GateReceipt(Record):
    """What one gate saw."""

    gate: Gate
    passed: bool
    evidence: dict[str, Any] = Field(default_factory=dict)
    """JSON facts such as scores and fingerprints."""


class Receipt(Record):
    """The way of one task through the gates."""

    task_id: str
    """Name of the package's folder."""
    task_digest: str
    """Digest of the contract, or of the raw bytes when they hold none."""
    gates: tuple[GateReceipt, ...]
    """In order, up to the one that refused."""
    reason: Reason | None = None
    """None when admitted."""
    detail: str = ""
    """The offending value, for people."""


class Refused(Exception):
    """Raised by a gate: why a task may not pass."""

    def __init__(self, reason: Reason, detail: str, evidence: dict[str, Any] | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.evidence = evidence or {}
