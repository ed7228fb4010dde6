"""Frozen price snapshots: what a token costs, on which date, by which source."""

from __future__ import annotations

from datetime import date
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml
from pydantic import Field

from occamy.contracts.record import Record


class PriceSnapshot(Record):
    """Prices in USD per million tokens. Checkpoints of one size share one snapshot."""

    name: str
    date: date
    """Day on which the prices held."""
    source: str
    """Where they come from; an example vector says so."""
    input: float = Field(gt=0)
    """Prompt tokens that no cache served."""
    cached: float = Field(ge=0)
    """Prompt tokens served from the prefix cache."""
    output: float = Field(gt=0)
    """Sampled tokens."""


def snapshot_names() -> list[str]:
    """Names of the shipped snapshots."""
    return sorted(p.name.removesuffix(".yaml") for p in _folder().iterdir() if p.name.endswith(".yaml"))


def load_prices(source: str) -> PriceSnapshot:
    """Read a shipped snapshot by name, or a YAML file by path (``….yaml``).

    Raises ValueError naming the known snapshots when there is none of that name, or the key that is wrong.
    """
    if source.endswith(".yaml"):
        path: Path | Traversable = Path(source)
        name = Path(source).stem
    else:
        path, name = _folder() / f"{source}.yaml", source
    if not path.is_file():
        raise ValueError(f"no price snapshot {source!r}; give a YAML file or one of {', '.join(snapshot_names())}")
    return PriceSnapshot(name=name, **yaml.safe_load(path.read_text()))


def _folder() -> Traversable:
    return resources.files("occamy.evaluation") / "prices"
