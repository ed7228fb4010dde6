"""Soup: the parameter average of checkpoints that share a root, accumulated wide and rounded once."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from occamy.contracts.lineage import LineageCard, read_card, tokenizer_digest, weights_digest, write_card
from occamy.merging.checkpoint import DTYPES, INDEX, SINGLE, Checkpoint, chat_template, write_tensors

_NOT_ARCHITECTURE = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"})
_ACCUMULATOR = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""16-bit tensors are summed in fp32, wider ones in fp64 (our choice), so that the result is rounded once."""


class MergeError(ValueError):
    """The parents may not be merged: names the tensor or setting, both values and the fix."""


def merge(
    parents: Sequence[Path],
    out: Path,
    *,
    name: str,
    weights: Sequence[float] | None = None,
    normalise: bool = False,
    recipe_digest: str,
    seed: int,
) -> LineageCard:
    """Average the checkpoints `parents` into folder `out` and return its card.

    The order of (parent, weight) pairs is irrelevant: they are accumulated in the order of their weights digests.
    Experts are written one tensor each (see `occamy.merging.layout`). Memory: a few tensors. The folder appears whole
    or not at all; when `out` already holds this very merge it is returned untouched.

    Raises MergeError when a precondition fails, CheckpointError when a parent is damaged, FileExistsError when `out`
    holds something else.
    """
    shares = _shares(len(parents), weights, normalise)
    with ExitStack() as stack:
        opened = [stack.enter_context(Checkpoint(p)) for p in parents]
        pairs = sorted(zip(opened, shares, strict=True), key=lambda pair: (pair[0].card.weights_digest, pair[1]))
        members, shares = [c for c, _ in pairs], [w for _, w in pairs]
        check_mergeable(members)
        facts = {
            "method": "uniform" if weights is None else "weighted",
            "weights": shares,
            "layout": "one tensor per expert",
            "tensors": len(members[0].sources),
        }
        wanted = _card(members, name, recipe_digest, seed, facts)
        if done := _already(out, wanted):
            return done
        return _write(members, shares, uniform=weights is None, out=out, wanted=wanted)


def check_mergeable(members: Sequence[Checkpoint]) -> None:
    """Check the preconditions of a merge on open checkpoints.

    Raises MergeError on different roots, tokenizers, chat templates, architecture settings, tensor names, shapes or
    dtypes, naming the first that differs and both values.
    """
    first = members[0]
    for other in members[1:]:
        _same("common root", first, other, first.card.root, other.card.root)
        _same("tokenizer", first, other, first.card.tokenizer_digest, other.card.tokenizer_digest)
        _same("chat template", first, other, chat_template(first.folder), chat_template(other.folder))
        ours, theirs = _architecture(first), _architecture(other)
        for key in sorted(ours.keys() | theirs.keys()):
            _same(f"config.json: {key}", first, other, ours.get(key), theirs.get(key))
        for tensor in sorted(first.sources.keys() | other.sources.keys()):
            a, b = first.sources.get(tensor), other.sources.get(tensor)
            _same(f"tensor {tensor}: shape", first, other, a and list(a.shape), b and list(b.shape))
            _same(f"tensor {tensor}: dtype", first, other, first.dtype(tensor), other.dtype(tensor))


def average(tensors: Sequence[torch.Tensor], shares: Sequence[float], *, uniform: bool) -> torch.Tensor:
    """Weighted average of equally shaped tensors, in their dtype, rounded once.

    A uniform average divides the sum by the count, which is exact where the weights 1/n are not.
    Integer tensors (counters) are not averaged: they must be equal, otherwise MergeError.
    """
    dtype = tensors[0].dtype
    if not dtype.is_floating_point:
        if any(not torch.equal(tensors[0], t) for t in tensors[1:]):
            raise MergeError(f"an integer tensor of dtype {dtype} differs between parents and cannot be averaged")
        return tensors[0]
    wide = _ACCUMULATOR.get(dtype, torch.float64)
    total = torch.zeros_like(tensors[0], dtype=wide)
    for tensor, share in zip(tensors, shares, strict=True):
        total.add_(tensor.to(wide), alpha=1.0 if uniform else share)
    return (total.div_(len(tensors)) if uniform else total).to(dtype)


def _shares(count: int, weights: Sequence[float] | None, normalise: bool) -> list[float]:
    if count < 2:
        raise MergeError(f"a merge needs at least two parents, got {count}")
    if weights is None:
        return [1.0 / count] * count
    if len(weights) != count:
        raise MergeError(f"{len(weights)} weights for {count} parents; give one weight per parent")
    if bad := [w for w in weights if not math.isfinite(w) or w < 0]:
        raise MergeError(f"weights {bad} are negative or not finite; give weights of at least 0")
    total = math.fsum(weights)
    if normalise and total > 0:
        return [w / total for w in weights]
    if abs(total - 1.0) > 1e-6:
        raise MergeError(f"weights {list(weights)} sum to {total:g}, not 1; correct them or set normalise")
    return list(weights)


def _same(what: str, a: Checkpoint, b: Checkpoint, left: Any, right: Any) -> None:
    if left != right:
        raise MergeError(
            f"{what} differs: {left!r} in {a.card.name} ({a.folder}), {right!r} in {b.card.name} ({b.folder}); "
            "merge only checkpoints trained from one root with one tokenizer and architecture"
        )


def _architecture(checkpoint: Checkpoint) -> dict[str, Any]:
    """Settings of config.json that shape the network; writers name the number of experts in two ways."""
    kept = {k: v for k, v in checkpoint.config.items() if k not in _NOT_ARCHITECTURE}
    if "num_local_experts" in kept:
        kept.setdefault("num_experts", kept.pop("num_local_experts"))
    return kept


def _card(members: Sequence[Checkpoint], name: str, recipe: str, seed: int, facts: dict[str, Any]) -> LineageCard:
    return LineageCard(
        name=name,
        stage="merge",
        root=members[0].card.root,
        parents=tuple(m.card.weights_digest for m in members),
        parent_names=tuple(m.card.name for m in members),
        recipe_digest=recipe,
        seed=seed,
        tokenizer_digest=members[0].card.tokenizer_digest,
        weights_digest="",
        facts=facts,
    )


def _already(out: Path, wanted: LineageCard) -> LineageCard | None:
    """The card in `out` when it is this very merge, whole; None when `out` is free."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    card = read_card(out)
    if card.model_copy(update={"weights_digest": ""}) != wanted:
        raise FileExistsError(f"{out}: holds {card.name!r} made from {card.parent_names}; merge into another folder")
    if weights_digest(out) != card.weights_digest or tokenizer_digest(out) != card.tokenizer_digest:
        raise FileExistsError(f"{out}: altered after it was merged; remove it and merge again")
    return card


def _write(
    members: Sequence[Checkpoint], shares: Sequence[float], *, uniform: bool, out: Path, wanted: LineageCard
) -> LineageCard:
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for file in sorted(members[0].folder.iterdir()):
            if file.is_file() and file.suffix in {".json", ".jinja", ".txt", ".model"} and _carried(file.name):
                shutil.copyfile(file, partial / file.name)
        shapes = {n: (members[0].dtype(n), s.shape) for n, s in members[0].sources.items()}
        if unknown := sorted({word for word, _ in shapes.values()} - set(DTYPES.values())):
            raise MergeError(f"{members[0].folder}: dtypes {unknown} cannot be averaged; convert the checkpoint first")
        write_tensors(partial / SINGLE, shapes, _averages(members, shares, uniform))
        card = wanted.model_copy(update={"weights_digest": weights_digest(partial)})
        write_card(partial, card)
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return card


def _averages(members: Sequence[Checkpoint], shares: Sequence[float], uniform: bool) -> Iterator[torch.Tensor]:
    for name in members[0].sources:
        try:
            yield average([m.read(name) for m in members], shares, uniform=uniform)
        except MergeError as e:
            raise MergeError(f"tensor {name}: {e}") from e


def _carried(name: str) -> bool:
    """Whether a file beside the weights belongs to the merged checkpoint too: config and tokenizer, not records."""
    return name not in {INDEX, "lineage.json", "manifest.json", "metrics.jsonl"}
