"""The forward pass over a flat ragged batch, from Hugging Face tensors. Weights are rearranged once, on loading.

Shape legend: N tokens of the flat batch, M decode tokens, R rows of the cache, Q query heads, K key/value heads,
G = Q/K, D head width, L key positions, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from occamy.engines.local.checkpoint import ModelSpec, read_spec, read_tensors


@dataclass(frozen=True)
class Chunk:
    """Consecutive prompt tokens of one sequence inside a flat batch."""

    start: int
    """Index of its first token in the flat batch."""
    count: int
    row: int
    """Row of the cache that holds the sequence."""
    position: int
    """Position of its first token in the sequence: so many tokens are in the cache before it."""


@dataclass(frozen=True)
class FlatBatch:
    """One step: first M sequences that add one token each, in rising order of row, then prompt chunks."""

    tokens: np.ndarray
    """Token ids, int64 [N]."""
    positions: np.ndarray
    """Position of each token in its sequence, int64 [N]."""
    rows: np.ndarray
    """Cache row of each token, int64 [N]."""
    decode: int
    """M: how many of the leading tokens attend as single queries."""
    chunks: Sequence[Chunk]


@dataclass(frozen=True)
class Layer:
    qkv: Tensor
    """[(Q+2K)·D, hidden]: input norm folded in; rotary pairs adjacent; query scale folded in without a head norm."""
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    """[Q+K, D]: weights of q_norm (times the query scale) and k_norm, rotary pairs adjacent."""
    out: Tensor
    out_bias: Tensor | None
    router: Tensor | None
    """[E, hidden], or None for a dense MLP."""
    up: Tensor
    """Dense [2·width, hidden]; experts [E, hidden, 2·width]. Post-attention norm folded in."""
    down: Tensor
    """Dense [hidden, width]; experts [E, width, hidden]."""


class Model:
    """A loaded checkpoint. `forward` is the only thing it does; it never changes."""

    def __init__(self, spec: ModelSpec, tensors: dict[str, Tensor]) -> None:
        self.spec = spec
        self._embedding = tensors["model.embed_tokens.weight"]
        head = self._embedding if spec.tied else tensors["lm_head.weight"]
        self._head = (head * tensors["model.norm.weight"]).contiguous()
        self._layers = [_prepare(spec, tensors, i) for i in range(spec.layers)]
        half = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        angles = torch.outer(torch.arange(spec.max_positions).float(), 1.0 / spec.rope_theta**half)
        self._rotary = torch.polar(torch.ones_like(angles), angles)  # [max_positions, D/2] complex

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a checkpoint folder. Raises CheckpointError (see `read_spec`, `read_tensors`)."""
        spec = read_spec(folder)
        return cls(spec, read_tensors(folder, spec))

    def new_cache(self, rows: int, length: int) -> Tensor:
        """Zeroed keys and values [layers, 2, rows, K, length, D]; memory is taken only where it is written.

        Raises MemoryError saying the size in GiB and which settings lower it.
        """
        shape = (self.spec.layers, 2, rows, self.spec.kv_heads, length, self.spec.head_dim)
        try:
            # 16 floats more, to start at a multiple of 64 bytes like every tensor of torch.
            raw = torch.from_numpy(np.zeros(int(np.prod(shape)) + 16, dtype=np.float32))
        except MemoryError as e:
            gib = 4 * np.prod(shape, dtype=np.float64) / 2**30
            raise MemoryError(
                f"{gib:.1f} GiB for keys and values; lower max_running, cached_rows or context_length"
            ) from e
        return raw[-raw.data_ptr() % 64 // 4 :][: int(np.prod(shape))].view(shape)

    def forward(self, batch: FlatBatch, cache: Tensor, wanted: np.ndarray) -> Tensor:
        """Compute `batch`, write its keys and values into `cache`, and return logits [len(wanted), vocab].

        `wanted` are indices into the flat batch. Rows of the cache between two decode rows are read and ignored.
        """
        spec = self.spec
        q_heads, kv_heads, width = spec.heads, spec.kv_heads, spec.head_dim
        real, both = len(batch.tokens), q_heads + kv_heads
        n = self._rows(real)
        x = self._embedding[_index(batch.tokens, n)]
        rotary = self._rotary[_index(batch.positions, n)][:, None]
        heads = np.arange(kv_heads)
        slots = torch.from_numpy(
            ((batch.rows[:, None] * kv_heads + heads) * cache.shape[4] + batch.positions[:, None]).ravel()
        )
        attend = self._attention(batch)
        for keys_values, layer in zip(cache, self._layers, strict=True):
            qkv = self._linear(_normalise(x, spec.eps), layer.qkv, layer.qkv_bias)
            qk = qkv[:, : both * width].view(n, both, width)
            if layer.head_norm is not None:
                qk = _normalise(qk, spec.eps) * layer.head_norm
            qk = torch.view_as_real(torch.view_as_complex(qk.view(n, both, width // 2, 2)) * rotary).view(
                n, both, width
            )
            keys, values = keys_values[0], keys_values[1]
            keys.view(-1, width).index_copy_(0, slots, qk[:real, q_heads:].reshape(-1, width))
            values.view(-1, width).index_copy_(0, slots, qkv[:real, both * width :].reshape(-1, width))
            mixed = attend(qk[:, :q_heads], keys, values)
            x = x + self._linear(mixed, layer.out, layer.out_bias)
            x = x + self._mlp(_normalise(x, spec.eps), layer, real)
        last = x[_index(wanted, self._rows(len(wanted)))]
        return self._linear(_normalise(last, spec.eps), self._head)[: len(wanted)]

    def _rows(self, n: int) -> int:
        """How many rows a step over n tokens computes."""
        return n

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def _attention(self, batch: FlatBatch) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return _Attention(batch, self.spec.kv_heads, self.spec.heads // self.spec.kv_heads)

    def _mlp(self, x: Tensor, layer: Layer, real: int) -> Tensor:
        if layer.router is None:
            gate, up = self._linear(x, layer.up).chunk(2, dim=-1)
            return self._linear(F.silu(gate) * up, layer.down)
        weight, expert = self._linear(x, layer.router).softmax(dim=-1).topk(self.spec.experts_per_token, dim=-1)
        if self.spec.normalise_topk:
            weight = weight / weight.sum(dim=-1, keepdim=True)
        return self._experts(x, weight, expert, layer, real)

    def _experts(self, x: Tensor, weight: Tensor, expert: Tensor, layer: Layer, real: int) -> Tensor:
        """x [N, hidden], weight and expert [N, experts per token] -> [N, hidden]; rows past `real` do not matter."""
        # Sorting token-expert pairs by expert and one grouped product beat a dense product over all experts and a
        # Python loop over them from 4 tokens on, and lose 10 us at one (hidden 128, 8 experts of width 160).
        flat = expert.flatten()
        order = flat.argsort()
        token = order // self.spec.experts_per_token
        ends = torch.bincount(flat, minlength=self.spec.experts).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x.index_select(0, token), layer.up, offs=ends).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, layer.down, offs=ends)
        y = y * weight.flatten().index_select(0, order)[:, None]
        return torch.zeros_like(x).index_add_(0, token, y)


class _Attention:
    """What all layers of one step share: the span of decode rows with its mask, and the masks of the chunks."""

    def __init__(self, batch: FlatBatch, kv_heads: int, group: int) -> None:
        self._batch, self._kv_heads = batch, kv_heads
        if batch.decode:
            rows, lengths = batch.rows[: batch.decode], batch.positions[: batch.decode] + 1
            self._low, self._high, self._longest = int(rows[0]), int(rows[-1]) + 1, int(lengths.max())
            span = self._high - self._low
            self._place = None if span == batch.decode else torch.from_numpy(rows - self._low)
            per_row = np.ones(span, dtype=np.int64)
            per_row[rows - self._low] = lengths
            hidden = np.arange(self._longest) >= per_row[:, None]
            self._mask = torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), -torch.inf)[:, None, None]
        self._chunk_masks = [
            torch.full((c.count, c.position + c.count), -torch.inf)
            .triu_(c.position + 1)
            .repeat_interleave(group, dim=0)[None]
            for c in batch.chunks
        ]

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [N, Q, D] (scaled), keys and values [R, K, T, D] -> mixed values [N, Q·D]."""
        n, heads, width = q.shape
        grouped = q.reshape(n, self._kv_heads, heads // self._kv_heads, width)
        parts = []
        if self._batch.decode:
            parts.append(self._decode(grouped[: self._batch.decode], keys, values).reshape(-1, heads * width))
        for chunk, mask in zip(self._batch.chunks, self._chunk_masks, strict=True):
            own = grouped[chunk.start : chunk.start + chunk.count].transpose(0, 1)  # [K, count, G, D]
            end = chunk.position + chunk.count
            flat = own.reshape(self._kv_heads, -1, width)
            scores = torch.baddbmm(mask, flat, keys[chunk.row, :, :end].transpose(1, 2))
            mixed = torch.bmm(scores.softmax(dim=-1), values[chunk.row, :, :end])
            parts.append(mixed.view(*own.shape).transpose(0, 1).reshape(chunk.count, heads * width))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [M, K, G, D] -> [M, K, G, D], over the whole span of rows at once so that the cache is read in place."""
        if self._place is not None:
            q = q.new_zeros(self._high - self._low, *q.shape[1:]).index_copy_(0, self._place, q)
        keys, values = (t[self._low : self._high, :, : self._longest] for t in (keys, values))
        mixed = torch.matmul((torch.matmul(q, keys.transpose(2, 3)) + self._mask).softmax(dim=-1), values)
        return mixed if self._place is None else mixed.index_select(0, self._place)


def _index(values: np.ndarray, n: int) -> Tensor:
    """`values` as a tensor of n entries, zeros behind."""
    return torch.from_numpy(values if len(values) == n else np.pad(values, (0, n - len(values))))


def _normalise(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), None, eps)


def _pairs(weight: Tensor, width: int) -> Tensor:
    """Reorder rows [heads·D, ...] so that the rotary partners i and i + D/2 of each head are neighbours."""
    return weight.reshape(-1, 2, width // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _prepare(spec: ModelSpec, tensors: dict[str, Tensor], index: int) -> Layer:
    p = f"model.layers.{index}."
    width, scale = spec.head_dim, spec.head_dim**-0.5
    attention = {k: tensors[f"{p}self_attn.{k}_proj.weight"] for k in "qkvo"}
    bias = {k: tensors[f"{p}self_attn.{k}_proj.bias"] for k in "qkvo"} if spec.attention_bias else {}
    head_norm = None
    if spec.qk_norm:
        q_norm, k_norm = (_pairs(tensors[f"{p}self_attn.{k}_norm.weight"], width) for k in "qk")
        head_norm = torch.cat([(q_norm * scale).expand(spec.heads, -1), k_norm.expand(spec.kv_heads, -1)])
        scale = 1.0
    qkv = torch.cat([_pairs(attention["q"], width) * scale, _pairs(attention["k"], width), attention["v"]])
    qkv_bias = torch.cat([_pairs(bias["q"], width) * scale, _pairs(bias["k"], width), bias["v"]]) if bias else None
    norm = tensors[p + "post_attention_layernorm.weight"]
    if spec.moe_layers[index]:
        router = tensors[p + "mlp.gate.weight"] * norm
        up = (tensors[p + "mlp.experts.gate_up_proj"] * norm).transpose(1, 2)
        down = tensors[p + "mlp.experts.down_proj"].transpose(1, 2)
    else:
        router = None
        up = torch.cat([tensors[p + "mlp.gate_proj.weight"], tensors[p + "mlp.up_proj.weight"]]) * norm
        down = tensors[p + "mlp.down_proj.weight"]
    return Layer(
        qkv=qkv * tensors[p + "input_layernorm.weight"],
        qkv_bias=qkv_bias,
        head_norm=head_norm,
        out=attention["o"],
        out_bias=bias.get("o"),
        router=router,
        up=up,
        down=down,
    )
