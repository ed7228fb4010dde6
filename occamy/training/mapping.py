"""Hugging Face ↔ megatron-core weights: names and layouts, both ways, as a table of links.

Layouts come from the config and from tensor names, never from guessing by sizes. H hidden size, I expert width,
E experts, g key/value groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from occamy.training.architecture import Architecture

ExpertLayout = Literal["fused", "per_expert"]
"""How a file stores experts: fused `mlp.experts.gate_up_proj` [E, 2I, H], or one tensor per expert and matrix."""
Tensors = list[Tensor]


class MappingError(ValueError):
    """A checkpoint whose tensors do not fit its config: names the tensor, what was found and what was expected."""


@dataclass(frozen=True)
class Link:
    """A bijection between some Hugging Face tensors and some megatron tensors."""

    hf: tuple[str, ...]
    megatron: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the Hugging Face tensors, in order."""
    join: Callable[[Tensors], Tensors] = lambda tensors: tensors
    """Hugging Face tensors -> megatron tensors."""
    split: Callable[[Tensors], Tensors] = lambda tensors: tensors
    """Megatron tensors -> Hugging Face tensors."""


def links(arch: Architecture, layout: ExpertLayout = "fused") -> Iterator[Link]:
    """Yield the links of every tensor of a model."""
    h, v = arch.hidden_size, arch.vocab_size
    yield _same("model.embed_tokens.weight", "embedding.word_embeddings.weight", (v, h))
    for i in range(arch.num_hidden_layers):
        yield from _attention(arch, f"model.layers.{i}.", f"decoder.layers.{i}.")
        if arch.is_moe:
            yield from _experts(arch, f"model.layers.{i}.mlp.", f"decoder.layers.{i}.mlp.", layout)
        else:
            yield from _dense(arch, f"model.layers.{i}.mlp.", f"decoder.layers.{i}.mlp.")
    yield _same("model.norm.weight", "decoder.final_layernorm.weight", (h,))
    if not arch.tie_word_embeddings:
        yield _same("lm_head.weight", "output_layer.weight", (v, h))


def expert_layout(names: Iterable[str]) -> ExpertLayout:
    """Tell the expert layout of a file from its tensor names. A dense model counts as fused."""
    return "per_expert" if any(".mlp.experts.0." in name for name in names) else "fused"


def to_megatron(tensors: Mapping[str, Tensor], arch: Architecture) -> dict[str, Tensor]:
    """Convert a Hugging Face state dict.

    Raises MappingError naming the tensor when one is missing, has no place in the model, has another shape than the
    config says, or holds a value that is not finite.
    """
    table = list(links(arch, expert_layout(tensors)))
    known = {name for link in table for name in link.hf}
    for name in sorted(tensors.keys() - known):
        tied = " (the config ties the output layer to the embedding)" if name == "lm_head.weight" else ""
        raise MappingError(
            f"{name} has no place in a {arch.model_type} model{tied}; check the checkpoint's config.json"
        )
    out: dict[str, Tensor] = {}
    for link in table:
        for name, shape in zip(link.hf, link.shapes, strict=True):
            _check(tensors, name, shape)
        out.update(zip(link.megatron, link.join([tensors[name] for name in link.hf]), strict=True))
    return out


def to_hf(state: Mapping[str, Tensor], arch: Architecture, layout: ExpertLayout) -> dict[str, Tensor]:
    """Convert a megatron state dict (entries named `*_extra_state` are ignored).

    Raises MappingError naming the tensor when one is missing, unmapped, misshapen or not finite.
    """
    table = list(links(arch, layout))
    names = {name for name in state if not name.endswith("_extra_state")}
    for name in sorted(names - {name for link in table for name in link.megatron}):
        raise MappingError(f"{name} has no Hugging Face name in a {arch.model_type} model; add a link for it")
    out: dict[str, Tensor] = {}
    for link in table:
        for name in link.megatron:
            if name not in state:
                raise MappingError(
                    f"{name} is missing from the megatron model; the model was built from another config"
                )
        out.update(zip(link.hf, link.split([state[name] for name in link.megatron]), strict=True))
        for name, shape in zip(link.hf, link.shapes, strict=True):
            _check(out, name, shape)
    return out


def _check(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> None:
    if name not in tensors:
        raise MappingError(f"{name} is missing; the checkpoint is partial or its config.json describes another model")
    found = tuple(tensors[name].shape)
    if found != shape:
        raise MappingError(
            f"{name} has shape {found}, the config says {shape}; checkpoint and config do not belong together"
        )
    if not torch.isfinite(tensors[name]).all():
        raise MappingError(
            f"{name} holds NaN or infinite values; the run that wrote it diverged, take an earlier checkpoint"
        )


def _same(hf: str, megatron: str, shape: tuple[int, ...]) -> Link:
    return Link((hf,), (megatron,), (shape,))


def _attention(arch: Architecture, hf: str, megatron: str) -> Iterator[Link]:
    h, d, g = arch.hidden_size, arch.head_dim, arch.num_key_value_heads
    per_group = arch.num_attention_heads // g
    rows = [per_group * d, d, d]  # of q, k and v inside one group

    def join(qkv: Tensors) -> Tensors:
        grouped = [x.view(g, n, h) for x, n in zip(qkv, rows, strict=True)]
        return [torch.cat(grouped, 1).reshape(-1, h)]

    def split(mixed: Tensors) -> Tensors:
        return [x.reshape(-1, h) for x in torch.split(mixed[0].view(g, sum(rows), h), rows, 1)]

    yield _same(hf + "input_layernorm.weight", megatron + "input_layernorm.weight", (h,))
    yield Link(
        tuple(f"{hf}self_attn.{x}_proj.weight" for x in "qkv"),
        (megatron + "self_attention.linear_qkv.weight",),
        tuple((g * n, h) for n in rows),
        join,
        split,
    )
    yield _same(
        hf + "self_attn.o_proj.weight",
        megatron + "self_attention.linear_proj.weight",
        (h, arch.num_attention_heads * d),
    )
    if arch.qk_norm:
        yield _same(hf + "self_attn.q_norm.weight", megatron + "self_attention.q_layernorm.weight", (d,))
        yield _same(hf + "self_attn.k_norm.weight", megatron + "self_attention.k_layernorm.weight", (d,))
    yield _same(hf + "post_attention_layernorm.weight", megatron + "pre_mlp_layernorm.weight", (h,))


def _halves(stacked: Tensors) -> Tensors:
    return list(stacked[0].chunk(2, 0))


def _stack(halves: Tensors) -> Tensors:
    return [torch.cat(halves, 0)]


def _dense(arch: Architecture, hf: str, megatron: str) -> Iterator[Link]:
    h, i = arch.hidden_size, arch.intermediate_size
    names = (hf + "gate_proj.weight", hf + "up_proj.weight")
    yield Link(names, (megatron + "linear_fc1.weight",), ((i, h), (i, h)), _stack, _halves)
    yield _same(hf + "down_proj.weight", megatron + "linear_fc2.weight", (h, i))


def _experts(arch: Architecture, hf: str, megatron: str, layout: ExpertLayout) -> Iterator[Link]:
    h, i, n = arch.hidden_size, arch.moe_intermediate_size, arch.num_experts
    yield _same(hf + "gate.weight", megatron + "router.weight", (n, h))
    if layout == "fused":
        for name, fc, shape in (("gate_up_proj", 1, (n, 2 * i, h)), ("down_proj", 2, (n, h, i))):
            yield Link(
                (f"{hf}experts.{name}",),
                tuple(f"{megatron}experts.local_experts.{e}.linear_fc{fc}.weight" for e in range(n)),
                (shape,),
                lambda fused: list(fused[0].unbind(0)),
                lambda parts: [torch.stack(parts)],
            )
        return
    for e in range(n):
        one, other = f"{hf}experts.{e}.", f"{megatron}experts.local_experts.{e}."
        names = (one + "gate_proj.weight", one + "up_proj.weight")
        yield Link(names, (other + "linear_fc1.weight",), ((i, h), (i, h)), _stack, _halves)
        yield _same(one + "down_proj.weight", other + "linear_fc2.weight", (h, i))
