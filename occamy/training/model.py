"""The policy: a megatron-core GPTModel built from a Hugging Face config, scoring packed sequences.

Import it only after `occamy.training.device.prepare()`: megatron-core looks at the device when it is imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from occamy.contracts.lineage import NAME as LINEAGE
from occamy.contracts.manifest import NAME as MANIFEST
from occamy.contracts.manifest import write_atomic
from occamy.training.architecture import Architecture, read_architecture
from occamy.training.mapping import MappingError, expert_layout, to_hf, to_megatron
from occamy.training.packing import Pack
from occamy.training.spec import layer_specs

NOT_COPIED = {"config.json", "model.safetensors", LINEAGE, MANIFEST}


@dataclass(frozen=True)
class Scores:
    """What the policy says about the m training targets of a pack, in pack order."""

    logprobs: Tensor
    """float32 [m], with gradient: log-probability of each target token."""
    entropy: Tensor | None
    """float32 [m], without gradient: entropy of each predicted distribution in nats, when asked for."""


class PolicyModel(GPTModel):
    """A decoder that computes its output layer only at the positions a pack asks for."""

    def forward(self, pack: Pack, *, entropy: bool = False) -> Scores:
        """Score the m targets of `pack`."""
        logits = self.logits(pack).float()
        logprobs = F.log_softmax(logits, dim=-1)
        spread = None
        if entropy:
            with torch.no_grad():
                spread = -(logprobs.exp() * logprobs).sum(-1)
        return Scores(logprobs.gather(-1, pack.target[:, None]).squeeze(-1), spread)

    def logits(self, pack: Pack) -> Tensor:
        """Return [m, vocab]: the distribution over the token after each source position."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: Tensor = self.output_layer(self.hidden(pack).unsqueeze(1), weight=weight)[0]
        return logits.squeeze(1)

    def hidden(self, pack: Pack) -> Tensor:
        """Return [m, hidden]: the last layer's normalised states at the source positions."""
        lengths = pack.boundaries.diff()
        longest = int(lengths.max())
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=pack.boundaries,
            cu_seqlens_kv=pack.boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        packed.lengths = lengths.tolist()
        states: Tensor = super().forward(pack.tokens[None], pack.positions[None], None, packed_seq_params=packed)
        return states.squeeze(1).index_select(0, pack.source)

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def build_model(arch: Architecture, *, aux_loss_coefficient: float = 0.0) -> PolicyModel:
    """Build a policy with random weights, in float32 on this process's device.

    `aux_loss_coefficient` weighs the load-balancing loss of expert routing (0: off; dense models ignore it).
    Call `device.prepare()` and `start_parallel()` first.
    """
    config = transformer_config(arch, aux_loss_coefficient)
    model = PolicyModel(
        config=config,
        transformer_layer_spec=layer_specs(config),
        vocab_size=arch.vocab_size,
        max_sequence_length=arch.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
    )
    model.to(torch.cuda.current_device())
    return model


def transformer_config(arch: Architecture, aux_loss_coefficient: float = 0.0) -> TransformerConfig:
    """Translate an architecture into megatron-core's configuration."""
    balanced = arch.is_moe and aux_loss_coefficient > 0
    experts: dict[str, Any] = {}
    if arch.is_moe:
        experts = {
            "num_moe_experts": arch.num_experts,
            "moe_router_topk": arch.num_experts_per_tok,
            "moe_ffn_hidden_size": arch.moe_intermediate_size,
            "moe_router_pre_softmax": not arch.norm_topk_prob,
            "moe_router_load_balancing_type": "aux_loss" if balanced else "none",
            "moe_aux_loss_coeff": aux_loss_coefficient if balanced else 0.0,
            "moe_router_dtype": "fp32",
            # Without expert parallelism there is nothing to gather, and it is faster than all-to-all on a CPU.
            "moe_token_dispatcher_type": "allgather",
        }
    return TransformerConfig(
        num_layers=arch.num_hidden_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_key_value_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.intermediate_size,
        layernorm_epsilon=arch.rms_norm_eps,
        qk_layernorm=arch.qk_norm,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        calculate_per_token_loss=True,  # gradients are summed over ranks; our losses are normalised beforehand
        **experts,
    )


def start_parallel(seed: int) -> None:
    """Create megatron's process groups (data parallel only) and seed every generator of this process."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def load_hf(checkpoint: Path, *, aux_loss_coefficient: float = 0.0) -> PolicyModel:
    """Build the policy that a checkpoint folder describes and load its weights, in float32.

    Raises ArchitectureError or MappingError naming what does not fit.
    """
    arch = read_architecture(checkpoint)
    model = build_model(arch, aux_loss_coefficient=aux_loss_coefficient)
    load_weights(model, arch, checkpoint)
    return model


def load_weights(model: PolicyModel, arch: Architecture, checkpoint: Path) -> None:
    """Copy a checkpoint's weights into an existing policy. Raises MappingError naming what does not fit."""
    state = to_megatron(load_file(checkpoint / "model.safetensors"), arch)
    own = {name: p for name, p in model.state_dict().items() if not name.endswith("_extra_state")}
    if missing := own.keys() ^ state.keys():
        raise MappingError(f"{min(missing)} is in only one of model and checkpoint; add a link for it in mapping.py")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])


def export_hf(model: PolicyModel, source: Path, out: Path) -> None:
    """Write the policy's weights as a Hugging Face folder `out` (created if needed), without a lineage card.

    The expert layout follows `source`, the checkpoint that the policy came from; its config, tokenizer and template
    files are copied. Tensors keep the dtype in which they train and config.json says it, whatever `source` is stored
    in: an engine that serves `out` samples from exactly the weights that go on training. Every file appears whole or
    not at all. Raises MappingError for a value that is not finite.
    """
    arch = read_architecture(source)
    with safe_open(source / "model.safetensors", "pt") as f:
        layout = expert_layout(f.keys())
    state = {name: p for name, p in model.state_dict().items() if isinstance(p, Tensor)}
    tensors = {name: t.cpu().contiguous().clone() for name, t in to_hf(state, arch, layout).items()}
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in NOT_COPIED:
            write_atomic(out / path.name, path.read_bytes())
    write_atomic(out / "config.json", _config(source, next(model.parameters()).dtype))
    write_atomic(out / "model.safetensors", save(tensors, {"format": "pt"}))


def _config(source: Path, dtype: torch.dtype) -> bytes:
    """The config.json of `source`, saying `dtype`."""
    raw = json.loads((source / "config.json").read_bytes())
    key = "torch_dtype" if "torch_dtype" in raw else "dtype"  # transformers before 5 has the first name
    return (json.dumps(raw | {key: str(dtype).removeprefix("torch.")}, indent=2) + "\n").encode()
