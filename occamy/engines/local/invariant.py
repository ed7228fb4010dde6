"""Deterministic mode: a token's numbers do not depend, in a single bit, on what is computed beside it.

A plain forward picks kernels by the shape of the batch: a product of one row sums in another order than one of eight,
and the last elements of an array take scalar code where the others take vector code. Here every product has one fixed
shape, arrays are padded to whole vectors, and sums over positions run in fixed blocks from the first position on, so
that neither neighbours, nor how a prompt is cut, nor which part of it the cache held can be seen in the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from occamy.engines.local.model import Chunk, FlatBatch, Layer, Model

TILE = 32
"""Rows of every product over tokens. 32 float32 are two AVX-512 vectors, the stride of torch's vector loops, so that
arrays of a multiple of 32 rows have no scalar rest."""
SLOTS = 8
"""Rows of one expert's product."""
QUERIES = 4
"""Queries of one attention product."""
KEYS = 256
"""Key positions of one attention product."""

_FIX = "; start without --deterministic"


class InvarianceError(RuntimeError):
    """This machine's kernels break the mode's promise."""


class InvariantModel(Model):
    """A Model whose logits, keys and values are bitwise functions of a sequence's own tokens. For one thread."""

    def new_cache(self, rows: int, length: int) -> Tensor:
        """As `Model.new_cache`, with `length` rounded up to whole blocks of keys."""
        return super().new_cache(rows, -(-length // KEYS) * KEYS)

    def _rows(self, n: int) -> int:
        return -(-n // TILE) * TILE

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(x) == TILE:
            return F.linear(x, weight, bias)
        return torch.cat([F.linear(tile, weight, bias) for tile in torch.split(x, TILE)])

    def _attention(self, batch: FlatBatch) -> _Attention:
        return _Attention(batch, self.spec.kv_heads, self.spec.heads // self.spec.kv_heads)

    def _experts(self, x: Tensor, weight: Tensor, expert: Tensor, layer: Layer, n: int) -> Tensor:
        k = self.spec.experts_per_token
        flat = expert[:n].flatten().numpy()
        counts = np.bincount(flat, minlength=self.spec.experts)
        tiles = -(-counts // SLOTS)
        order = np.argsort(flat, kind="stable")
        into = (np.cumsum(tiles) - tiles) * SLOTS - (np.cumsum(counts) - counts)
        slots = np.empty(len(flat), dtype=np.int64)
        slots[order] = np.arange(len(flat)) + into[flat[order]]
        token = np.zeros(int(tiles.sum()) * SLOTS, dtype=np.int64)
        token[slots] = np.arange(len(flat)) // k
        owners = np.repeat(np.arange(self.spec.experts), tiles).tolist()
        given = torch.split(x[torch.from_numpy(token)], SLOTS)
        gate, up = torch.cat([t @ layer.up[e] for t, e in zip(given, owners, strict=True)]).chunk(2, dim=-1)
        mixed = torch.split(F.silu(gate) * up, SLOTS)
        y = torch.cat([t @ layer.down[e] for t, e in zip(mixed, owners, strict=True)])[torch.from_numpy(slots)]
        y = y.view(n, k, -1) * weight[:n, :, None]
        total = torch.zeros_like(x)
        for one in y.unbind(1):
            total[:n] += one
        return total


@dataclass(frozen=True)
class _Piece:
    """At most QUERIES neighbouring queries of one sequence."""

    row: int
    count: int
    position: int
    """Of its first query."""

    @property
    def blocks(self) -> int:
        """Blocks of keys that its last query sees."""
        return -(-(self.position + self.count) // KEYS)


class _Attention:
    """What all layers of one step share: the pieces, their masks, and where each token sits among them."""

    def __init__(self, batch: FlatBatch, kv_heads: int, group: int) -> None:
        self._kv_heads, self._group = kv_heads, group
        m = batch.decode
        self._pieces = [
            _Piece(row, 1, at) for row, at in zip(batch.rows[:m].tolist(), batch.positions[:m].tolist(), strict=True)
        ]
        for c in batch.chunks:
            for start in range(0, c.count, QUERIES):
                self._pieces.append(_Piece(c.row, min(QUERIES, c.count - start), c.position + start))
        slots = [i * QUERIES + j for i, p in enumerate(self._pieces) for j in range(p.count)]
        self._slots = torch.tensor(slots)
        self._masks = []
        for p in self._pieces:
            sees = p.position + np.minimum(np.arange(QUERIES), p.count - 1)
            mask = np.where(np.arange(p.blocks * KEYS) > sees[:, None], np.float32(-np.inf), np.float32(0))
            self._masks.append(torch.from_numpy(mask)[None, :, None])  # [1, QUERIES, 1, L]

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [N, Q, D] (scaled), keys and values [R, K, T, D] -> mixed values [N, Q·D]."""
        n, heads, width = q.shape
        kv, group, real = self._kv_heads, self._group, len(self._slots)
        placed = q.new_zeros(len(self._pieces) * QUERIES, heads, width).index_copy_(0, self._slots, q[:real])
        queries = placed.view(-1, QUERIES, kv, group, width).transpose(1, 2).reshape(-1, kv, QUERIES * group, width)
        mixed = torch.stack([self._piece(i, queries[i], keys, values) for i in range(len(self._pieces))])
        back = mixed.view(-1, kv, QUERIES, group, width).transpose(1, 2).reshape(-1, heads * width)
        return q.new_zeros(n, heads * width).index_copy_(0, torch.arange(real), back.index_select(0, self._slots))

    def _piece(self, index: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [K, QUERIES·G, D] -> [K, QUERIES·G, D]."""
        row, blocks = self._pieces[index].row, self._pieces[index].blocks
        starts = range(0, blocks * KEYS, KEYS)
        scores = torch.cat([torch.bmm(q, keys[row, :, s : s + KEYS].transpose(1, 2)) for s in starts], dim=-1)
        scores.view(len(q), QUERIES, self._group, -1).add_(self._masks[index])
        probs = scores.softmax(dim=-1)
        parts = [torch.bmm(probs[:, :, s : s + KEYS], values[row, :, s : s + KEYS]) for s in starts]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


def check_invariance(model: InvariantModel) -> None:
    """Compute one sequence alone and cut otherwise beside others, and compare every bit of logits, keys and values.

    Raises InvarianceError naming what differs, when the kernels of this machine do not keep the mode's promise.
    """
    length = min(model.spec.max_positions, KEYS + 40)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.spec.vocab, (3, length))
    alone, crowd = model.new_cache(1, length), model.new_cache(3, length)
    at = np.arange(length)
    whole = FlatBatch(tokens[0], at, np.zeros(length, dtype=np.int64), 0, [Chunk(0, length, 0, 0)])
    logits = model.forward(whole, alone, at)
    steps = [0, length // 3, length - 2, length - 1, length]  # two chunks, then single tokens
    for a, b in pairwise(steps):
        width = b - a
        ids, positions = tokens[::-1, a:b].flatten(), np.tile(at[a:b], 3)
        single = width == 1
        chunks = [] if single else [Chunk(i * width, width, i, a) for i in range(3)]
        flat = FlatBatch(ids, positions, np.repeat(np.arange(3), width), 3 if single else 0, chunks)
        got = model.forward(flat, crowd, np.arange(2 * width, 3 * width))
        if not torch.equal(got, logits[a:b]):
            raise InvarianceError(f"logits of positions {a} to {b - 1} change with the batch on this machine{_FIX}")
    if not torch.equal(crowd[:, :, 2, :, :length], alone[:, :, 0, :, :length]):
        raise InvarianceError(f"keys and values change with the batch on this machine{_FIX}")
