"""The nano architecture: a small Qwen3-MoE as plain tensors under Hugging Face names, with a fast train-time forward.

Shapes: B batch, T tokens, H hidden, D head size, N = B*T flat tokens, E experts, I expert width, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from occamy.nano.vocabulary import TOKENS

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; defaults are the shipped base (2.3M parameters; our choice)."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 160
    positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def hf_config(self) -> dict[str, object]:
        """Return the config.json content of a transformers Qwen3MoeForCausalLM with this shape."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": len(TOKENS),
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.expert_width,
            "moe_intermediate_size": self.expert_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "max_position_embeddings": self.positions,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "router_aux_loss_coef": 0.001,
            "initializer_range": 0.04,
            "bos_token_id": None,
            "eos_token_id": TOKENS.index("<end>"),
            "pad_token_id": TOKENS.index("<pad>"),
            "dtype": "float32",
        }


def init_weights(shape: Shape, seed: int) -> Weights:
    """Draw fresh fp32 weights: normal(0, 0.04) matrices, norms at one (our choice).

    All embeddings share one random offset: it shifts every logit alike, and gives attention a constant direction in
    which to learn relative positions before it knows any token.
    """
    g = torch.Generator().manual_seed(seed)
    h, d = shape.hidden, shape.head_dim

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g) * 0.04

    weights = {"model.embed_tokens.weight": normal(len(TOKENS), h) + normal(h), "model.norm.weight": torch.ones(h)}
    for i in range(shape.layers):
        p = f"model.layers.{i}."
        weights |= {
            p + "input_layernorm.weight": torch.ones(h),
            p + "post_attention_layernorm.weight": torch.ones(h),
            p + "self_attn.q_proj.weight": normal(shape.heads * d, h),
            p + "self_attn.k_proj.weight": normal(shape.kv_heads * d, h),
            p + "self_attn.v_proj.weight": normal(shape.kv_heads * d, h),
            p + "self_attn.o_proj.weight": normal(h, shape.heads * d),
            p + "self_attn.q_norm.weight": torch.ones(d),
            p + "self_attn.k_norm.weight": torch.ones(d),
            p + "mlp.gate.weight": normal(shape.experts, h),
            p + "mlp.experts.gate_up_proj": normal(shape.experts, 2 * shape.expert_width, h),
            p + "mlp.experts.down_proj": normal(shape.experts, h, shape.expert_width),
        }
    return weights


def save_model(folder: Path, weights: Weights, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json, generation_config.json and model.safetensors into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = shape.hf_config() | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ends = {"eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2, sort_keys=True) + "\n")
    stored = {k: v.detach().to(dtype).contiguous() for k, v in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def load_weights(folder: Path) -> Weights:
    """Read model.safetensors of a nano checkpoint as fp32 tensors."""
    return {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}


def rope_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin tables [length, D] for rotary positions 0..length-1."""
    inverse = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(length).float(), inverse)
    both = torch.cat([angles, angles], -1)
    return both.cos(), both.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def _linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ weight.T with the product taken in `dtype`, returned in fp32 (bf16 is 4x faster where AVX512-BF16 is)."""
    if dtype == torch.float32:
        return F.linear(x, weight)
    return F.linear(x.to(dtype), weight.to(dtype)).float()


def _experts(w: Weights, p: str, x: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Route x [N, H] to the k best experts per token. Returns (y [N, H], load-balancing loss of Switch, eq. 4)."""
    probs = F.softmax(F.linear(x, w[p + "gate.weight"]).float(), -1)
    top, chosen = probs.topk(k, -1)
    top = top / top.sum(-1, keepdim=True)
    flat = chosen.flatten()
    counts = torch.bincount(flat, minlength=probs.shape[-1])
    slots, sizes = _aligned_slots(flat, counts)
    source = (slots // k).clamp_(max=len(x) - 1)
    share = torch.cat([top.flatten(), top.new_zeros(1)]).index_select(0, slots)
    up, down = w[p + "experts.gate_up_proj"], w[p + "experts.down_proj"]
    outs = []
    for e, xe in enumerate(torch.split(x.index_select(0, source), sizes)):
        if len(xe):
            gate, value = _linear(xe, up[e], dtype).chunk(2, -1)
            outs.append(_linear(F.silu(gate) * value, down[e], dtype))
    y = torch.cat(outs) * share[:, None]
    balance = probs.shape[-1] * ((counts.float() / len(flat)) * probs.mean(0)).sum()
    return torch.zeros_like(x).index_add(0, source, y), balance


def _aligned_slots(flat: Tensor, counts: Tensor) -> tuple[Tensor, list[int]]:
    """Sort routed slots by expert, each expert's run padded to a multiple of 128 with the dummy slot len(flat).

    Aligned sizes recur, so the matrix library's compiled kernels are found again instead of being made for every size.
    """
    sizes = (counts + 127) // 128 * 128
    start = sizes.cumsum(0) - sizes
    first = counts.cumsum(0) - counts
    order = flat.argsort(stable=True)
    expert = flat.index_select(0, order)
    place = start.index_select(0, expert) + torch.arange(len(flat)) - first.index_select(0, expert)
    slots = torch.full((int(sizes.sum()),), len(flat))
    slots[place] = order
    return slots, sizes.tolist()


def forward(
    w: Weights, shape: Shape, tokens: Tensor, tables: tuple[Tensor, Tensor], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Run the trunk on right-padded tokens [B, T] with causal attention.

    `dtype` is that of the matrix products; all else is fp32. Returns (final normed hidden states [B, T, H], mean
    load-balancing loss over layers). Logits are ``hidden @ embed.T`` (tied).
    """
    b, t = tokens.shape
    d, eps = shape.head_dim, shape.norm_eps
    cos, sin = tables[0][:t], tables[1][:t]
    x = F.embedding(tokens, w["model.embed_tokens.weight"])
    balance = x.new_zeros(())
    groups = shape.heads // shape.kv_heads
    for i in range(shape.layers):
        p = f"model.layers.{i}."
        a = p + "self_attn."
        y = F.rms_norm(x, (shape.hidden,), w[p + "input_layernorm.weight"], eps)
        q = _linear(y, w[a + "q_proj.weight"], dtype).view(b, t, shape.heads, d)
        k = _linear(y, w[a + "k_proj.weight"], dtype).view(b, t, shape.kv_heads, d)
        v = _linear(y, w[a + "v_proj.weight"], dtype).view(b, t, shape.kv_heads, d).transpose(1, 2)
        q = _rotate(F.rms_norm(q, (d,), w[a + "q_norm.weight"], eps).transpose(1, 2), cos, sin)
        k = _rotate(F.rms_norm(k, (d,), w[a + "k_norm.weight"], eps).transpose(1, 2), cos, sin)
        o = F.scaled_dot_product_attention(
            q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), is_causal=True
        )
        x = x + _linear(o.transpose(1, 2).reshape(b, t, -1), w[a + "o_proj.weight"], dtype)
        y = F.rms_norm(x, (shape.hidden,), w[p + "post_attention_layernorm.weight"], eps)
        out, aux = _experts(w, p + "mlp.", y.reshape(b * t, -1), shape.experts_per_token, dtype)
        x, balance = x + out.view_as(x), balance + aux / shape.layers
    return F.rms_norm(x, (shape.hidden,), w["model.norm.weight"], eps), balance
