"""Picks the next tokens. A draw depends on logits, seed and position alone, never on the rest of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from occamy.engines.local.stops import StopStrings


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling parameters of one sequence."""

    temperature: float
    """0 takes the likeliest token."""
    top_p: float
    top_k: int
    """-1: no limit."""
    max_new_tokens: int
    stop: frozenset[int]
    """Token ids that end the sequence; the ending token is kept in the output."""
    seed: int
    strings: StopStrings | None = None
    """Texts that end the sequence; the token that completes one is kept in the output."""
    top: int = 0
    """How many of the likeliest tokens to report for each position."""


Tops = list[tuple[float, int]]
"""Log-probs and ids of the likeliest tokens at one position, best first."""


class SamplingTable:
    """Sampling parameters by cache row, so that a step picks them with one index."""

    def __init__(self, rows: int) -> None:
        self._temperature = np.ones(rows, dtype=np.float32)
        self._greedy = np.zeros(rows, dtype=np.bool_)
        self._top_p = np.ones(rows, dtype=np.float32)
        self._top_k = np.full(rows, -1, dtype=np.int64)
        self._seed = np.zeros(rows, dtype=np.uint64)
        self._top = np.zeros(rows, dtype=np.int64)

    def set(self, row: int, params: SamplingParams) -> None:
        """Store the parameters of the sequence that now holds `row`."""
        self._greedy[row] = params.temperature == 0
        self._temperature[row] = params.temperature or 1.0
        self._top_p[row], self._top_k[row] = params.top_p, params.top_k
        self._seed[row], self._top[row] = params.seed % 2**64, params.top

    def sample(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[list[int], list[float], list[Tops]]:
        """Draw one token per row of `logits` [n, vocab] for the sequences in `rows` [n].

        `positions` [n] are the positions that the new tokens take. Returns ids and their log-probs under the
        temperature-scaled distribution before top-p and top-k, as SGLang reports them (a greedy token is reported at
        temperature 1). A log-prob is NaN when the logits were not finite. The third list has the likeliest tokens of
        each row that asked for them.
        """
        greedy = self._greedy[rows]
        scaled = logits / torch.from_numpy(self._temperature[rows])[:, None]
        logprobs = scaled.log_softmax(dim=-1)
        if greedy.all():
            chosen = logits.argmax(dim=-1)
        else:
            # Not logprobs.exp(): the scalar rest of an array would round otherwise than its vectors.
            probs = scaled.softmax(dim=-1)
            limited = np.flatnonzero(((self._top_p[rows] < 1) | (self._top_k[rows] > 0)) & ~greedy)
            if len(limited):
                index = torch.from_numpy(limited)
                top_p, top_k = self._top_p[rows[limited]], self._top_k[rows[limited]]
                probs[index] = truncate(probs[index], torch.from_numpy(top_p), torch.from_numpy(top_k))
            chosen = draw(probs, torch.from_numpy(uniform(self._seed[rows], positions)))
            if greedy.any():
                chosen = torch.where(torch.from_numpy(greedy), logits.argmax(dim=-1), chosen)
        tops = [likeliest(logprobs[i], top) if top else [] for i, top in enumerate(self._top[rows].tolist())]
        return chosen.tolist(), logprobs.gather(1, chosen[:, None])[:, 0].tolist(), tops


def likeliest(logprobs: Tensor, count: int) -> Tops:
    """The `count` best of logprobs [vocab] (fewer if there are fewer)."""
    best = logprobs.topk(min(count, len(logprobs)))
    return list(zip(best.values.tolist(), best.indices.tolist(), strict=True))


def truncate(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero what top-p and top-k exclude, without rescaling. probs [n, vocab], top_p [n], top_k [n] (-1: no limit).

    top-k is applied first; top-p then keeps the smallest set of the likeliest tokens whose mass reaches `top_p` of the
    whole distribution. The likeliest token always stays.
    """
    ordered, index = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1])
    before = ordered.cumsum(dim=-1) - ordered
    limit = torch.where(top_k > 0, top_k, probs.shape[-1])
    keep = (before < top_p[:, None]) & (rank < limit[:, None])
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter_(1, index, ordered * keep)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF draw: the first token whose cumulated mass in probs [n, vocab] passes `uniforms` [n] of the total."""
    mass = probs.cumsum(dim=-1, dtype=torch.float64)
    chosen = torch.searchsorted(mass, (uniforms * mass[:, -1])[:, None], right=True)[:, 0]
    return chosen.clamp_(max=probs.shape[-1] - 1)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per (seed, position): two rounds of the SplitMix64 finaliser over a counter. float64 [n]."""
    with np.errstate(over="ignore"):
        z = _mix(seeds.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        z = _mix(z ^ (positions.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03) + np.uint64(0x8CB92BA72F3D8DD7)))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed
