"""Reads a Hugging Face checkpoint folder: config.json to a `ModelSpec`, safetensors to checked float32 tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_FAMILIES = ("qwen3_moe", "qwen3", "llama")


class CheckpointError(ValueError):
    """A checkpoint folder cannot be served: names the file, key or tensor at fault."""


@dataclass(frozen=True)
class ModelSpec:
    """The architecture, as far as the forward pass needs it."""

    family: str
    """qwen3_moe, qwen3 or llama."""
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    """Epsilon of every RMS norm."""
    rope_theta: float
    tied: bool
    """The output head is the embedding matrix."""
    attention_bias: bool
    intermediate: int
    """Width of a dense MLP."""
    experts: int
    """Experts per mixture layer, 0 for a dense model."""
    experts_per_token: int
    expert_width: int
    normalise_topk: bool
    """Routing weights of the chosen experts are rescaled to sum to one."""
    moe_layers: tuple[bool, ...]
    """Per layer: is its MLP a mixture of experts?"""
    max_positions: int
    eos: tuple[int, ...]
    """Token ids that end a sequence by default."""

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are normalised per head (Qwen3)."""
        return self.family != "llama"


def read_spec(folder: Path) -> ModelSpec:
    """Read ``config.json`` of `folder`. Raises CheckpointError naming the key that is missing or not supported."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json; pass a Hugging Face checkpoint folder")
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as e:
        raise CheckpointError(f"{path}: not JSON ({e})") from e
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise CheckpointError(f"{path}: model_type {family!r} is not served here; one of {', '.join(_FAMILIES)} is")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    _only(path, "rope_type", rope.get("rope_type", rope.get("type", "default")), "default")
    _only(path, "hidden_act", config.get("hidden_act", "silu"), "silu")
    _only(path, "use_sliding_window", config.get("use_sliding_window", False), False)
    _only(path, "mlp_bias", config.get("mlp_bias", False), False)
    try:
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        experts = int(config.get("num_experts", config.get("num_local_experts", 0))) if family == "qwen3_moe" else 0
        sparse_step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or []
        spec = ModelSpec(
            family=family,
            vocab=int(config["vocab_size"]),
            hidden=int(config["hidden_size"]),
            layers=layers,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            intermediate=int(config["intermediate_size"]),
            experts=experts,
            experts_per_token=int(config["num_experts_per_tok"]) if experts else 0,
            expert_width=int(config["moe_intermediate_size"]) if experts else 0,
            normalise_topk=bool(config.get("norm_topk_prob", False)),
            moe_layers=tuple(experts > 0 and i not in dense and (i + 1) % sparse_step == 0 for i in range(layers)),
            max_positions=int(config["max_position_embeddings"]),
            eos=_eos(folder, config),
        )
    except KeyError as e:
        raise CheckpointError(f"{path}: key {e.args[0]!r} is missing") from e
    if spec.experts and (spec.hidden % 4 or spec.expert_width % 4):
        raise CheckpointError(
            f"{path}: hidden_size {spec.hidden} and moe_intermediate_size {spec.expert_width} must be multiples of 4"
        )
    return spec


def read_tensors(folder: Path, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Read every tensor that `spec` needs, as float32.

    Mixture layers come back fused, ``mlp.experts.gate_up_proj`` [experts, 2·width, hidden] and
    ``mlp.experts.down_proj`` [experts, hidden, width], from a fused or a per-expert file alike.
    Raises CheckpointError naming the tensor that is missing, unknown, of another shape, or not finite, or the
    file that cannot be read.
    """
    tensors = _fuse_experts(_read_files(folder), spec, folder)
    want = expected_shapes(spec)
    for name, shape in want.items():
        _check_shape(tensors, name, shape, folder)
    for name in sorted(tensors.keys() - want.keys()):
        if not (name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tied)):
            raise CheckpointError(
                f"{folder}: tensor {name} has no place in a {spec.family} of {spec.layers} layers; wrong config.json?"
            )
        del tensors[name]
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(
                f"{folder}: tensor {name} holds {bad} NaN or infinite values; training diverged or the file is damaged"
            )
    return tensors


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the model, with fused experts."""
    h, q, kv = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab, h), "model.norm.weight": (h,)}
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab, h)
    for i in range(spec.layers):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,)}
        for name, out, width in (("q_proj", q, h), ("k_proj", kv, h), ("v_proj", kv, h), ("o_proj", h, q)):
            shapes[f"{p}self_attn.{name}.weight"] = (out, width)
            if spec.attention_bias:
                shapes[f"{p}self_attn.{name}.bias"] = (out,)
        if spec.qk_norm:
            shapes |= {p + "self_attn.q_norm.weight": (spec.head_dim,), p + "self_attn.k_norm.weight": (spec.head_dim,)}
        if spec.moe_layers[i]:
            e, w = spec.experts, spec.expert_width
            shapes |= {
                p + "mlp.gate.weight": (e, h),
                p + "mlp.experts.gate_up_proj": (e, 2 * w, h),
                p + "mlp.experts.down_proj": (e, h, w),
            }
        else:
            w = spec.intermediate
            shapes |= {
                p + "mlp.gate_proj.weight": (w, h),
                p + "mlp.up_proj.weight": (w, h),
                p + "mlp.down_proj.weight": (h, w),
            }
    return shapes


def _check_shape(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...], folder: Path) -> None:
    if name not in tensors:
        raise CheckpointError(f"{folder}: tensor {name} is missing; write the checkpoint again")
    if tuple(tensors[name].shape) != shape:
        raise CheckpointError(
            f"{folder}: tensor {name} has shape {list(tensors[name].shape)}, config.json asks for {list(shape)}"
        )


def _only(path: Path, key: str, value: object, allowed: object) -> None:
    if value != allowed:
        raise CheckpointError(f"{path}: {key} {value!r} is not served here, only {allowed!r} is")


def _eos(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Union of the end tokens of config.json and generation_config.json, as SGLang takes them."""
    found: list[int] = []
    path = folder / "generation_config.json"
    generation = json.loads(path.read_bytes()) if path.is_file() else {}
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(sorted(set(found)))


def _read_files(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is missing; write the checkpoint again")
        try:
            with safe_open(path, framework="pt") as f:
                for key in f.keys():  # noqa: SIM118 (not a dict, and not iterable)
                    tensor = f.get_tensor(key)
                    if not tensor.is_floating_point():
                        raise CheckpointError(
                            f"{path}: tensor {key} is {tensor.dtype}; only floating point weights are served"
                        )
                    # A copy: the file is mapped, so its tensors are unaligned and change when somebody overwrites it.
                    tensors[key] = tensor.to(torch.float32, copy=True)
        except (SafetensorError, OSError) as e:
            raise CheckpointError(
                f"{path}: cannot be read ({e}); the file is damaged or was cut, write it again"
            ) from e
    return tensors


def _fuse_experts(tensors: dict[str, torch.Tensor], spec: ModelSpec, folder: Path) -> dict[str, torch.Tensor]:
    for i, sparse in enumerate(spec.moe_layers):
        p = f"model.layers.{i}.mlp.experts."
        if not sparse or p + "0.gate_proj.weight" not in tensors:
            continue
        parts: dict[str, list[torch.Tensor]] = {}
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = [f"{p}{e}.{part}.weight" for e in range(spec.experts)]
            shape = (spec.hidden, spec.expert_width) if part == "down_proj" else (spec.expert_width, spec.hidden)
            for name in names:
                _check_shape(tensors, name, shape, folder)
            parts[part] = [tensors.pop(name) for name in names]
        tensors[p + "gate_up_proj"] = torch.cat([torch.stack(parts["gate_proj"]), torch.stack(parts["up_proj"])], dim=1)
        tensors[p + "down_proj"] = torch.stack(parts["down_proj"])
    return tensors
