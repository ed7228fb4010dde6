"""Hugging Face <-> megatron weights: names, layouts, and errors by name. Needs no megatron."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from occamy.training.architecture import Architecture, ArchitectureError, read_architecture
from occamy.training.mapping import MappingError, expert_layout, to_hf, to_megatron

FAMILIES = [
    ("qwen3_moe", {"tie_word_embeddings": True}),
    ("qwen3_moe", {"tie_word_embeddings": False, "fused": False}),
    ("qwen3", {}),
    ("llama", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "settings"), FAMILIES)
def test_round_trip_is_exact(family: str, settings: dict[str, Any], make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint(family, **settings)
    tensors, arch = load_file(folder / "model.safetensors"), read_architecture(folder)
    back = to_hf(to_megatron(tensors, arch), arch, expert_layout(tensors))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_both_expert_layouts_of_a_model_give_the_same_weights(make_checkpoint: Callable[..., Path]) -> None:
    states = []
    for fused in (True, False):
        folder = make_checkpoint("qwen3_moe", fused=fused)
        tensors = load_file(folder / "model.safetensors")
        assert expert_layout(tensors) == ("fused" if fused else "per_expert")
        states.append(to_megatron(tensors, read_architecture(folder)))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_query_groups_are_interleaved() -> None:
    # One layer, hidden 1, head size 1, 4 heads in 2 groups: [q0 q1 k0 v0 | q2 q3 k1 v1].
    arch = Architecture("llama", 2, 1, 1, 4, 2, 1, 1, 8, 1e-6, 1e4, True, False)
    tensors = {
        "model.embed_tokens.weight": torch.zeros(2, 1),
        "model.norm.weight": torch.ones(1),
        "model.layers.0.input_layernorm.weight": torch.ones(1),
        "model.layers.0.post_attention_layernorm.weight": torch.ones(1),
        "model.layers.0.self_attn.q_proj.weight": torch.tensor([[0.0], [1.0], [2.0], [3.0]]),
        "model.layers.0.self_attn.k_proj.weight": torch.tensor([[10.0], [11.0]]),
        "model.layers.0.self_attn.v_proj.weight": torch.tensor([[20.0], [21.0]]),
        "model.layers.0.self_attn.o_proj.weight": torch.zeros(1, 4),
        "model.layers.0.mlp.gate_proj.weight": torch.tensor([[5.0]]),
        "model.layers.0.mlp.up_proj.weight": torch.tensor([[6.0]]),
        "model.layers.0.mlp.down_proj.weight": torch.zeros(1, 1),
    }
    state = to_megatron(tensors, arch)
    qkv = state["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert qkv.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert state["decoder.layers.0.mlp.linear_fc1.weight"].flatten().tolist() == [5, 6]


GATE = "model.layers.1.mlp.gate.weight"


def _without(t: dict[str, Tensor]) -> None:
    del t[GATE]


def _misshapen(t: dict[str, Tensor]) -> None:
    t[GATE] = t[GATE][:2]


def _diverged(t: dict[str, Tensor]) -> None:
    t[GATE][0, 0] = torch.nan


def _stranger(t: dict[str, Tensor]) -> None:
    t["model.vision.weight"] = torch.zeros(1)


def _untied(t: dict[str, Tensor]) -> None:
    t["lm_head.weight"] = t["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without, f"{GATE} is missing"),
        (_misshapen, rf"{GATE} has shape \(2, 32\), the config says \(4, 32\)"),
        (_diverged, f"{GATE} holds NaN"),
        (_stranger, "model.vision.weight has no place in a qwen3_moe model"),
        (_untied, "lm_head.weight has no place .*ties the output layer"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_tensor_name(
    damage: Callable[[dict[str, Tensor]], None], message: str, make_checkpoint: Callable[..., Path]
) -> None:
    folder = make_checkpoint("qwen3_moe", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    with pytest.raises(MappingError, match=message):
        to_megatron(tensors, read_architecture(folder))


def test_unmapped_and_diverged_megatron_tensors_are_refused_by_name(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint("qwen3")
    arch = read_architecture(folder)
    state = to_megatron(load_file(folder / "model.safetensors"), arch)
    with pytest.raises(MappingError, match=r"decoder\.extra has no Hugging Face name"):
        to_hf(state | {"decoder.extra": torch.zeros(1)}, arch, "fused")
    with pytest.raises(MappingError, match=r"model\.norm\.weight holds NaN"):
        to_hf(state | {"decoder.final_layernorm.weight": torch.full((32,), torch.inf)}, arch, "fused")
    del state["decoder.layers.0.mlp.linear_fc2.weight"]
    with pytest.raises(MappingError, match=r"decoder\.layers\.0\.mlp\.linear_fc2\.weight is missing"):
        to_hf(state, arch, "fused")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "gpt2", "model_type 'gpt2' is not supported; use one of llama, qwen3, qwen3_moe"),
        ("attention_bias", True, "attention_bias=True is not supported"),
        ("mlp_only_layers", [0], r"mlp_only_layers=\[0\] is not supported"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "rope type .*yarn"),
        ("hidden_act", "gelu", "hidden_act='gelu' is not supported"),
        ("vocab_size", None, "vocab_size is missing"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(
    key: str, value: object, message: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    raw = json.loads((make_checkpoint("qwen3_moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
    with pytest.raises(ArchitectureError, match=message):
        read_architecture(tmp_path)
