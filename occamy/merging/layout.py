"""Names and slices of mixture-of-experts tensors in one canonical layout: one tensor per expert and projection.

Two layouts are stored in practice. *Per expert*: ``mlp.experts.{e}.{gate,up,down}_proj.weight``, what transformers
writes and engines load. *Fused*: ``mlp.experts.gate_up_proj`` [E, 2I, H] (gate rows first) and
``mlp.experts.down_proj`` [E, H, I]. The layout is told by name and its shapes are checked against the config; nothing
is guessed from sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FUSED = re.compile(r"^(?P<prefix>.*\.mlp\.experts)\.(?P<part>gate_up_proj|down_proj)$")
_SUPPORTED = ("qwen3_moe", "qwen2_moe")


class LayoutError(ValueError):
    """A stored tensor does not fit the layout that config.json declares: names the tensor, both shapes and the fix."""


@dataclass(frozen=True)
class Source:
    """Where a canonical tensor lies: in stored tensor `name`, whole or as rows `start:stop` of expert `expert`."""

    name: str
    shape: tuple[int, ...]
    """Shape of the canonical tensor."""
    expert: int | None = None
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class MoeShape:
    """Sizes of the expert tensors: experts E, expert width I, hidden width H."""

    experts: int
    width: int
    hidden: int


def moe_shape(config: Mapping[str, Any]) -> MoeShape | None:
    """Read E, I, H from a transformers config; None when the model is dense.

    Raises LayoutError for a mixture-of-experts architecture whose fused layout is not known here.
    """
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts is None:
        return None
    kind = config.get("model_type")
    if kind not in _SUPPORTED:
        raise LayoutError(
            f"config.json: model_type {kind!r} has {experts} experts, but only {', '.join(_SUPPORTED)} have a known "
            "expert layout; add its layout to occamy.merging.layout before merging"
        )
    return MoeShape(experts=int(experts), width=int(config["moe_intermediate_size"]), hidden=int(config["hidden_size"]))


def canonical(stored: Mapping[str, tuple[int, ...]], shape: MoeShape | None) -> dict[str, Source]:
    """Map canonical tensor names, sorted, to where they lie among the `stored` names and shapes.

    Raises LayoutError when a fused tensor's shape is not what the config declares or an expert is stored twice.
    """
    sources: dict[str, Source] = {}
    for name in stored:
        for target, source in _split(name, stored[name], shape):
            if target in sources:
                raise LayoutError(
                    f"{target} is stored twice, as {sources[target].name} and as {source.name}; keep one of the two"
                )
            sources[target] = source
    return dict(sorted(sources.items()))


def _split(name: str, stored: tuple[int, ...], shape: MoeShape | None) -> list[tuple[str, Source]]:
    match = _FUSED.match(name)
    if match is None:
        return [(name, Source(name, stored))]
    if shape is None:
        raise LayoutError(
            f"{name}: a fused expert tensor, but config.json declares no experts; use the model's own config"
        )
    e, i, h = shape.experts, shape.width, shape.hidden
    fused = (e, 2 * i, h) if match["part"] == "gate_up_proj" else (e, h, i)
    if stored != fused:
        raise LayoutError(
            f"{name}: stored shape {list(stored)}, config.json declares {list(fused)}; use the model's own config"
        )
    prefix = match["prefix"]
    if match["part"] == "down_proj":
        return [(f"{prefix}.{k}.down_proj.weight", Source(name, (h, i), k, 0, h)) for k in range(e)]
    gates = [(f"{prefix}.{k}.gate_proj.weight", Source(name, (i, h), k, 0, i)) for k in range(e)]
    return gates + [(f"{prefix}.{k}.up_proj.weight", Source(name, (i, h), k, i, 2 * i)) for k in range(e)]
