"""The tracking and promotion sections of a recipe."""

from __future__ import annotations

from pydantic import Field

from occamy.contracts.record import Record


class PromotionConfig(Record):
    """When the final checkpoint becomes the champion."""

    candidate: str = "sao"
    """Candidate that may be promoted."""
    against: str = "base"
    """Candidate that it has to beat."""
    margin: float = Field(default=0.0, ge=0, lt=1)
    """Least gain in mixed success, as a share: the lower end of the paired interval must lie above it (our choice)."""
