"""`occamy nano pretrain`: trains the base on the generic streams, seeded and resumable, and writes a checkpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from occamy.contracts import lineage
from occamy.contracts.record import digest
from occamy.nano.documents import Document
from occamy.nano.model import Shape, Weights, forward, init_weights, rope_tables, save_model
from occamy.nano.muon import Muon
from occamy.nano.streams import STREAMS, documents, rehearsed_documents
from occamy.nano.tokenizer import save_tokenizer

Progress = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class PretrainConfig:
    """Size and schedule of the pretraining run (our choice, found on two cores)."""

    tokens: int = 16_000_000
    """Padded tokens to train on."""
    batch_tokens: int = 4096
    """Padded tokens per optimiser step."""
    width_step: int = 32
    """Batches are padded to a multiple of this many tokens, so that few matrix sizes occur and kernels are reused."""
    drills: int = 50_000
    """Documents of copies and alternations before the mix (about 2.5M tokens)."""
    pool_documents: int = 1600
    """Documents drawn at once and sorted by length into batches."""
    lr: float = 6e-3
    rehearsal_tokens: int = 7_000_000
    """Padded tokens of the second phase: harder episodes of uneven quality."""
    rehearsal_lr: float = 3e-3
    careless: float = 0.5
    """Share of careless episodes in the second phase."""
    warmup_steps: int = 100
    decay_from: float = 0.5
    """Share of the run after which the learning rate falls linearly to `final_factor`."""
    final_factor: float = 0.02
    balance: float = 0.01
    """Coefficient of the router's load-balancing loss."""
    matmul_dtype: str = "bfloat16"
    """Precision of the matrix products; weights, norms, attention and optimiser stay fp32."""
    seed: int = 1
    save_every: int = 200
    """Steps between resumable snapshots."""
    validation_documents: int = 60
    """Fixed documents per stream whose next-token accuracy is logged."""


def pretrain(
    out: Path, config: PretrainConfig, *, shape: Shape | None = None, on_progress: Progress | None = None
) -> Path:
    """Train from scratch, or go on from the snapshot in `out`; returns the checkpoint folder ``out/base``.

    Runs on one thread, so that the same config gives the same weights on the same kind of machine. Raises ValueError
    when `out` holds a snapshot of another config.
    """
    torch.set_num_threads(1)
    shape = shape or Shape()
    out.mkdir(parents=True, exist_ok=True)
    weights = {k: v.requires_grad_() for k, v in init_weights(shape, config.seed).items()}
    optimiser = Muon(weights, lr=config.lr)
    tables = rope_tables(shape, shape.positions)
    snapshot = out / "snapshot.pt"
    resumed = _restore(snapshot, config, weights, optimiser) if snapshot.exists() else _Place(0, 0, 0)
    validation = _validation_sets(config)
    for number, phase in enumerate(_phases(config)):
        if number < resumed.phase:
            continue
        step, done = (resumed.step, resumed.done) if number == resumed.phase else (0, 0)
        batches = _batches(phase, config)
        for _ in range(step):
            next(batches)
        optimiser.lr = phase.lr
        started, fresh, losses = time.monotonic(), 0, list[float]()
        while done < phase.tokens:
            tokens, mask = next(batches)
            loss = _loss(weights, shape, tokens, mask, tables, config)
            torch.autograd.backward(loss)
            optimiser.step(_factor(step, done / phase.tokens, phase.decay_from, config))
            step, done, fresh = step + 1, done + tokens.numel(), fresh + tokens.numel()
            losses.append(loss.item())
            if step % config.save_every == 0 or done >= phase.tokens:
                figures = {"phase": number, "step": step, "tokens": done, "loss": sum(losses) / len(losses)}
                figures["tokens_per_second"] = fresh / (time.monotonic() - started)
                figures |= {f"accuracy.{k}": _accuracy(weights, shape, v, tables) for k, v in validation.items()}
                losses.clear()
                with (out / "metrics.jsonl").open("a") as f:
                    f.write(json.dumps(figures) + "\n")
                if on_progress:
                    on_progress(figures)
                _snapshot(snapshot, config, weights, optimiser, _Place(number, step, done))
    return _export(out / "base", weights, shape, config)


@dataclass(frozen=True)
class _Phase:
    tokens: int
    lr: float
    decay_from: float
    dice: Random
    stream: Iterator[Document]
    """Draws from `dice`, as does the order of batches."""


@dataclass(frozen=True)
class _Place:
    """How far a run came."""

    phase: int
    step: int
    done: int


def _phases(config: PretrainConfig) -> list[_Phase]:
    """The mix of streams, then rehearsals with a learning rate that falls from the start."""
    first, second = Random(config.seed), Random(f"rehearsal-{config.seed}")
    return [
        _Phase(config.tokens, config.lr, config.decay_from, first, documents(first, config.drills)),
        _Phase(config.rehearsal_tokens, config.rehearsal_lr, 0.0, second, rehearsed_documents(second, config.careless)),
    ]


def _factor(step: int, share: float, decay_from: float, config: PretrainConfig) -> float:
    warm = min(1.0, (step + 1) / config.warmup_steps)
    if share < decay_from:
        return warm
    return warm * max(config.final_factor, (1 - share) / (1 - decay_from))


def _batches(phase: _Phase, config: PretrainConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens [B, T], mask [B, T]) batches; documents of like length share a batch, B*T is about constant."""
    while True:
        pool = sorted((next(phase.stream) for _ in range(config.pool_documents)), key=lambda d: len(d[0]), reverse=True)
        groups: list[tuple[int, list[Document]]] = []
        while pool:
            width = -(-len(pool[0][0]) // config.width_step) * config.width_step
            rows = max(1, config.batch_tokens // width)
            groups.append((width, pool[:rows]))
            pool = pool[rows:]
        phase.dice.shuffle(groups)
        for width, group in groups:
            yield _pad(group, width, max(1, config.batch_tokens // width))


def _pad(group: list[Document], width: int, rows: int) -> tuple[Tensor, Tensor]:
    """Right-pad documents to [rows, width]; rows beyond the group are empty."""
    filled = group + [([], [])] * (rows - len(group))
    tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in filled])
    mask = torch.tensor([m + [0] * (width - len(m)) for _, m in filled], dtype=torch.bool)
    return tokens, mask


def _logits(
    w: Weights,
    shape: Shape,
    tokens: Tensor,
    mask: Tensor,
    tables: tuple[Tensor, Tensor],
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, balance = forward(w, shape, tokens[:, :-1], tables, dtype)
    keep = mask[:, 1:]
    return F.linear(hidden[keep], w["model.embed_tokens.weight"]), tokens[:, 1:][keep], balance


def _loss(
    w: Weights, shape: Shape, tokens: Tensor, mask: Tensor, tables: tuple[Tensor, Tensor], config: PretrainConfig
) -> Tensor:
    dtype: torch.dtype = getattr(torch, config.matmul_dtype)
    logits, targets, aux = _logits(w, shape, tokens, mask, tables, dtype)
    return F.cross_entropy(logits, targets) + config.balance * aux


def _validation_sets(config: PretrainConfig) -> dict[str, tuple[Tensor, Tensor]]:
    r = Random(f"validation-{config.seed}")
    sets = {}
    for name, (maker, _) in STREAMS.items():
        drawn = [next(maker(r)) for _ in range(config.validation_documents)]
        sets[name] = _pad(drawn, max(len(ids) for ids, _ in drawn), len(drawn))
    return sets


@torch.no_grad()
def _accuracy(w: Weights, shape: Shape, batch: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor]) -> float:
    logits, targets, _ = _logits(w, shape, *batch, tables)
    return float((logits.argmax(-1) == targets).float().mean())


def _snapshot(path: Path, config: PretrainConfig, weights: Weights, optimiser: Muon, place: _Place) -> None:
    state = {
        "config": asdict(config),
        "weights": {k: v.detach() for k, v in weights.items()},
        "optimiser": optimiser.state_dict(),
        "place": asdict(place),
    }
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def _restore(path: Path, config: PretrainConfig, weights: Weights, optimiser: Muon) -> _Place:
    state = torch.load(path, weights_only=True)
    if state["config"] != asdict(config):
        raise ValueError(
            f"{path}: made with {state['config']}, asked for {asdict(config)}; use another --out or delete it"
        )
    with torch.no_grad():
        for name, tensor in state["weights"].items():
            weights[name].copy_(tensor)
    optimiser.load_state_dict(state["optimiser"])
    return _Place(**state["place"])


def _export(folder: Path, weights: Weights, shape: Shape, config: PretrainConfig) -> Path:
    """Write the checkpoint with tokenizer and lineage card."""
    save_model(folder, weights, shape)
    save_tokenizer(folder)
    weights_digest = lineage.weights_digest(folder)
    card = lineage.LineageCard(
        name="base",
        stage="pretrain",
        root=weights_digest,
        recipe_digest=digest(asdict(config)),
        seed=config.seed,
        tokenizer_digest=lineage.tokenizer_digest(folder),
        weights_digest=weights_digest,
        facts={
            "parameters": sum(p.numel() for p in weights.values()),
            "streams": {name: share for name, (_, share) in STREAMS.items()},
            "config": asdict(config),
        },
    )
    lineage.write_card(folder, card)
    return folder
