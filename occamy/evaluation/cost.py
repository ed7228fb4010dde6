"""What an episode costs at a price snapshot, and how sensitive that is to each price."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from occamy.contracts.episode import EpisodeRecord
from occamy.evaluation.prices import PriceSnapshot

PRICES: tuple[Literal["input", "cached", "output"], ...] = ("input", "cached", "output")


def episode_cost(record: EpisodeRecord, prices: PriceSnapshot) -> float:
    """USD of one episode. Cached prompt tokens are part of `input_tokens` and are paid at the cached price only.

    Raises ValueError when more tokens are cached than were read.
    """
    return token_cost(record.input_tokens, record.cached_tokens, record.output_tokens, prices)


def token_cost(read: float, cached: float, output: float, prices: PriceSnapshot) -> float:
    """USD of `read` prompt tokens, `cached` of them served by the prefix cache, and `output` sampled tokens."""
    if not 0 <= cached <= read:
        raise ValueError(f"{cached} cached of {read} prompt tokens; cached tokens are part of the prompt")
    return ((read - cached) * prices.input + cached * prices.cached + output * prices.output) / 1e6


def price_sensitivity(
    records: Sequence[EpisodeRecord], prices: PriceSnapshot, change: float = 0.5
) -> dict[str, tuple[float, float]]:
    """Mean USD per episode with one price cut and raised by the share `change`: price -> (low, high)."""
    if not records:
        raise ValueError("no episode to price; pass at least one record")

    def mean(snapshot: PriceSnapshot) -> float:
        return sum(episode_cost(r, snapshot) for r in records) / len(records)

    def scaled(price: str, factor: float) -> PriceSnapshot:
        return prices.model_copy(update={price: getattr(prices, price) * factor})

    return {p: (mean(scaled(p, 1 - change)), mean(scaled(p, 1 + change))) for p in PRICES}
