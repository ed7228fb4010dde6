"""Packing: many sequences of different lengths become few packs, without padding and without leaking into each other.

A pack is one row of tokens in which positions restart and attention stops at every document boundary. Boundaries are
the packer's own; no token id is ever read as one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from occamy.training.views import TrainingSequence


@dataclass(frozen=True)
class Pack:
    """One row of n tokens from several documents, with m training targets in document order."""

    sequences: tuple[TrainingSequence, ...]
    tokens: Tensor
    """int64 [n]."""
    positions: Tensor
    """int64 [n], from 0 in every document."""
    boundaries: Tensor
    """int32 [documents + 1], cumulative lengths from 0."""
    source: Tensor
    """int64 [m]: index in the row of the token whose state predicts the target."""
    target: Tensor
    """int64 [m]: token ids to predict."""
    document: Tensor
    """int64 [m]: which document each target belongs to."""

    def gather(self, values: Sequence[np.ndarray]) -> Tensor:
        """Join per-document arrays over policy tokens ([policy_tokens of the document] each) into one tensor [m].

        Raises ValueError naming the document whose array does not match its targets.
        """
        for i, (sequence, value) in enumerate(zip(self.sequences, values, strict=True)):
            if len(value) != sequence.policy_tokens:
                raise ValueError(
                    f"document {i} has {sequence.policy_tokens} targets, but {len(value)} values were given"
                )
        return torch.from_numpy(np.concatenate(values)).to(self.tokens.device)

    def behaviour(self) -> Tensor:
        """Return float32 [m]: log-probabilities that the sampler recorded for the targets."""
        return self.gather([s.logprobs[s.mask] for s in self.sequences])


@dataclass(frozen=True)
class Packed:
    """The packs of one global batch and an account of what did not fit."""

    packs: tuple[Pack, ...]
    targets: int
    """Training targets over all packs: the one normaliser of the loss."""
    tokens: int


def admit(sequences: Sequence[TrainingSequence], max_length: int) -> tuple[list[TrainingSequence], dict[str, int]]:
    """Split off what cannot train: reason -> count. Nothing is ever cut.

    Reasons: "too_long" (more than `max_length` tokens), "no_target" (no trainable token).
    """
    kept: list[TrainingSequence] = []
    rejected: Counter[str] = Counter()
    for s in sequences:
        if len(s) > max_length:
            rejected["too_long"] += 1
        elif not s.policy_tokens:
            rejected["no_target"] += 1
        else:
            kept.append(s)
    return kept, dict(sorted(rejected.items()))


def best_fit_decreasing(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Assign items to bins of `max_length`: longest first, each into the fullest bin that still takes it.

    Returns the item indices of every bin; equal lengths keep their order. Raises ValueError for an item longer than a
    bin.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > max_length:
            raise ValueError(f"sequence {i} has {lengths[i]} tokens, a pack takes {max_length}; call admit() first")
        at = bisect_left(room, (lengths[i], -1))
        if at == len(room):
            bins.append([])
            free, chosen = max_length, len(bins) - 1
        else:
            free, chosen = room.pop(at)
        bins[chosen].append(i)
        insort(room, (free - lengths[i], chosen))
    return bins


def pack(sequences: Sequence[TrainingSequence], device: torch.device | str = "cpu") -> Pack:
    """Lay sequences side by side in one pack."""
    lengths = [len(s) for s in sequences]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    where = [np.flatnonzero(s.mask) for s in sequences]
    targets = np.concatenate([w + start for w, start in zip(where, starts[:-1], strict=True)])
    tokens = np.concatenate([s.tokens for s in sequences]).astype(np.int64)
    documents = np.repeat(np.arange(len(sequences)), [len(w) for w in where])

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Pack(
        sequences=tuple(sequences),
        tokens=tensor(tokens),
        positions=tensor(np.concatenate([np.arange(n) for n in lengths])),
        boundaries=tensor(starts.astype(np.int32)),
        source=tensor(targets - 1),
        target=tensor(tokens[targets]),
        document=tensor(documents),
    )


def pack_batch(
    sequences: Sequence[TrainingSequence],
    max_length: int,
    *,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str = "cpu",
) -> Packed:
    """Pack one global batch and return this rank's share; counts are those of the global batch.

    Packs go to the ranks in turn, longest first, so which packs exist does not depend on the number of ranks.
    """
    bins = best_fit_decreasing([len(s) for s in sequences], max_length)
    bins.sort(key=lambda b: -sum(len(sequences[i]) for i in b))
    return Packed(
        packs=tuple(pack([sequences[i] for i in b], device) for b in bins[rank::world]),
        targets=sum(s.policy_tokens for s in sequences),
        tokens=sum(len(s) for s in sequences),
    )
