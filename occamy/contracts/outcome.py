"""How an attempt can end. Standard library only: the agent in a sandbox pod carries this file."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How an episode ended. Infrastructure failures are never scored."""

    completed = "completed"
    agent_failed = "agent_failed"
    timed_out = "timed_out"
    policy_blocked = "policy_blocked"
    infra_failed = "infra_failed"
