"""Rows of a batch as packs with their signals in pack order, and figures summed over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from occamy.training.device import Place
from occamy.training.packing import Pack, Packed, pack_batch
from occamy.training.rl_batch import Row

K = TypeVar("K")
V = TypeVar("V")


def pack_rows(rows: Sequence[Row], max_length: int, place: Place) -> Packed:
    """Pack the rows' sequences; this rank's share, with the counts of the global batch."""
    sequences = [row.sequence for row in rows]
    return pack_batch(sequences, max_length, rank=place.rank, world=place.world, device=place.device)


def signals_of(rows: Sequence[Row], pack: Pack) -> dict[str, Tensor]:
    """The signals of a pack's documents, each float32 [m] in the order of its targets."""
    by_key = {row.key: row.signals for row in rows}
    chosen = [by_key[s.key] for s in pack.sequences]
    return {name: pack.gather([signals[name] for signals in chosen]) for name in chosen[0]}


def sums_over_ranks(figures: dict[str, float]) -> dict[str, float]:
    """Add up figures over ranks; a rank without a pack may lack keys."""
    out: dict[str, float] = {}
    for one in _everyone(figures):
        for name, value in one.items():
            out[name] = out.get(name, 0.0) + value
    return out


def union_over_ranks(own: dict[K, V]) -> dict[K, V]:
    """Join dictionaries with distinct keys over ranks."""
    out: dict[K, V] = {}
    for one in _everyone(own):
        out |= one
    return out


def _everyone(own: dict[K, V]) -> list[dict[K, V]]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    everyone: list[dict[K, V]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    return everyone
