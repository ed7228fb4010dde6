"""How admission runs."""

from __future__ import annotations

from pydantic import Field

from occamy.contracts.record import Record


class AdmissionConfig(Record):
    """Configuration of an admission run."""

    processes: int = Field(1, ge=1, le=64)
    """Worker processes for gates 1 to 5 (our choice: 1, since a task takes some milliseconds)."""
