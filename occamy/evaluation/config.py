"""The evaluation section of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from occamy.contracts.record import Record


class EvaluationConfig(Record):
    """How candidates are compared on held-out tasks."""

    pools: tuple[Literal["long", "short"], ...] = Field(default=("long", "short"), min_length=1)
    """Pools to sample from; the mixed pool is all tasks of these."""
    tasks: int = Field(default=48, ge=1)
    """Held-out tasks per pool, taken from the release in order of their ids (our choice)."""
    trials: int = Field(default=3, ge=1)
    """Attempts per task, k (paper: 3, for pass^3)."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature (paper: 1.0)."""
    bootstrap: int = Field(default=2000, ge=100)
    """Resamples behind each interval (our choice)."""
    prices: str = "2026-09"
    """Price snapshot by name, or path of a YAML file."""
    concurrency: int = Field(default=64, ge=1)
    """Episodes in flight per engine (our choice)."""
    engines: int = Field(default=2, ge=1)
    """Candidates evaluated at a time, each with its own engine (our choice: the laptop's two cores)."""
