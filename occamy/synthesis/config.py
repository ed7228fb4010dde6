"""How many tasks to write, and of what kinds."""

from __future__ import annotations

from pydantic import Field

from occamy.contracts.record import Record


class PoolCounts(Record):
    """Raw tasks per pool of one split."""

    long: int = Field(ge=0)
    """Tasks with 2 or 3 goals and 4 to 8 calls."""
    short: int = Field(ge=0)
    """Tasks with 1 goal and 1 or 2 calls."""


class SynthesisConfig(Record):
    """Configuration of a synthesis run. All defaults are our choice (laptop profile)."""

    train: PoolCounts = PoolCounts(long=1200, short=1200)
    """Tasks to train on."""
    validation: PoolCounts = PoolCounts(long=256, short=256)
    """Tasks to choose settings and candidates with."""
    test: PoolCounts = PoolCounts(long=256, short=256)
    """Tasks for final numbers only."""
    variant_share: float = Field(0.2, ge=0, le=0.9)
    """Share of tasks written as variants of earlier seeds."""
    presentation_share: float = Field(0.4, ge=0, le=1)
    """Share of variants that only reword their parent; the others realise its capability graph anew."""
    capability_first_share: float = Field(0.25, ge=0, le=1)
    """Share of seeds that start from a frozen capability graph instead of from the environment."""
    fault_share: float = Field(0.1, ge=0, le=1)
    """Share of tasks in which one call of the gold path answers `unavailable` the first time."""
    records_per_service: int = Field(6, ge=4, le=12)
    """Initial rows of each service."""
