"""The merging section of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from occamy.contracts.record import Record


class MergingConfig(Record):
    """How the experts become one checkpoint."""

    method: Literal["soup"] = "soup"
    """Average of the parameters (paper: uniform over the two experts)."""
    weights: tuple[float, ...] | None = None
    """One weight per parent in the order they are given, without unit; None is the uniform average (paper)."""
    normalise: bool = False
    """Divide the weights by their sum. Without it, weights that do not sum to 1 are refused."""

    @model_validator(mode="after")
    def _used(self) -> MergingConfig:
        if self.normalise and self.weights is None:
            raise ValueError("merging.normalise is set without merging.weights; a uniform average sums to 1 already")
        return self
