"""The modules a policy is assembled from: megatron-core's local layers with our norm, core attention and experts.

Shapes: n tokens of a pack, h heads, g key/value groups, d head size, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from occamy.training.norm import RMSNorm


class PackedAttention(MegatronModule):
    """Causal attention over a pack, one document at a time: no mask, and the cost is the sum of squared lengths."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> Tensor:
        """Map query [n, h, d] and key, value [n, g, d] to [n, h * d].

        Document boundaries come from `packed_seq_params.lengths`, a list of document lengths that sums to n.
        """
        lengths: list[int] = packed_seq_params.lengths
        grouped = query.size(1) != key.size(1)
        out = []
        for q, k, v in zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
            out.append(o.squeeze(0).transpose(0, 1))
        return torch.cat(out).flatten(1)


def layer_specs(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return the spec of all layers for `GPTModel(transformer_layer_spec=...)`."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=RMSNorm)
