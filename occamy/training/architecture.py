"""Reads a Hugging Face config.json into the few numbers a model is built from; refuses what cannot be honoured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = {"llama": False, "qwen3": True, "qwen3_moe": True}
"""Supported `model_type` -> whether queries and keys are normalised per head."""


class ArchitectureError(ValueError):
    """A config.json that the trainer cannot honour: names the file, the key, the value and the fix."""


@dataclass(frozen=True)
class Architecture:
    """What defines the shape of a decoder. Field names follow Hugging Face where it has one."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    """Width of a dense feed-forward layer (unused by mixtures of experts)."""
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qk_norm: bool
    num_experts: int = 0
    """0 for a dense model."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    """True: softmax over the chosen experts; False: over all of them, before choosing."""

    @property
    def is_moe(self) -> bool:
        """True for a mixture of experts."""
        return self.num_experts > 0


def read_architecture(checkpoint: Path) -> Architecture:
    """Read `checkpoint/config.json`.

    Raises FileNotFoundError when it is missing and ArchitectureError when it asks for something unsupported: another
    family or activation, attention bias, sliding windows, scaled rotary positions, dense layers among expert layers.
    """
    path = checkpoint / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{checkpoint}: no config.json; pass a checkpoint folder")
    raw: dict[str, Any] = json.loads(path.read_text())
    family = _need(raw, "model_type", path)
    if family not in FAMILIES:
        raise ArchitectureError(f"{path}: model_type {family!r} is not supported; use one of {', '.join(FAMILIES)}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    _refuse(raw, path, {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu"})
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ArchitectureError(f"{path}: rope type {rope!r} is not supported; only unscaled rotary positions are")
    heads, hidden = _need(raw, "num_attention_heads", path), _need(raw, "hidden_size", path)
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ArchitectureError(f"{path}: neither rope_theta nor rope_parameters.rope_theta is given; add one")
    return Architecture(
        model_type=family,
        vocab_size=_need(raw, "vocab_size", path),
        hidden_size=hidden,
        num_hidden_layers=_need(raw, "num_hidden_layers", path),
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        intermediate_size=_need(raw, "intermediate_size", path),
        max_position_embeddings=_need(raw, "max_position_embeddings", path),
        rms_norm_eps=_need(raw, "rms_norm_eps", path),
        rope_theta=float(theta),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=FAMILIES[family],
        **(_experts(raw, path) if family.endswith("_moe") else {}),
    )


def _experts(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    _refuse(raw, path, {"mlp_only_layers": [], "decoder_sparse_step": 1})
    key = "num_experts" if "num_experts" in raw else "num_local_experts"  # transformers 5 writes the second name
    return {
        "num_experts": _need(raw, key, path),
        "num_experts_per_tok": _need(raw, "num_experts_per_tok", path),
        "moe_intermediate_size": _need(raw, "moe_intermediate_size", path),
        "norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
    }


def _need(raw: dict[str, Any], key: str, path: Path) -> Any:
    if raw.get(key) is None:
        raise ArchitectureError(f"{path}: {key} is missing; the checkpoint's config is incomplete")
    return raw[key]


def _refuse(raw: dict[str, Any], path: Path, supported: dict[str, Any]) -> None:
    for key, value in supported.items():
        if raw.get(key) not in (None, value):
            raise ArchitectureError(f"{path}: {key}={raw[key]!r} is not supported; only {value!r} is")
