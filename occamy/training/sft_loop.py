"""Supervised fine-tuning inside a trainer process. The loss is cross-entropy on demonstration tokens."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from occamy.capture.sealed import read_sealed
from occamy.contracts.manifest import write_atomic
from occamy.contracts.record import canonical_json
from occamy.training.checkpoint import StateStore, derive_card
from occamy.training.device import Place
from occamy.training.launch import read_metrics
from occamy.training.learner import Learner
from occamy.training.model import PolicyModel, export_hf, load_hf, start_parallel
from occamy.training.packing import Packed, admit, pack_batch
from occamy.training.schedule import batch_indices, steps_per_epoch
from occamy.training.sft import STAGE, SFTJob
from occamy.training.views import TrainingSequence, training_view


def train(spec: dict[str, Any], place: Place) -> None:
    """Train as the job says, resuming from its newest trainer state, and write the checkpoint.

    Raises ValueError when nothing is left to train on.
    """
    job = SFTJob.model_validate(spec)
    config = job.config
    start_parallel(job.seed)
    sequences, rejected = demonstrations(job)
    total = steps_per_epoch(len(sequences), config.batch_sequences) * config.epochs
    model = load_hf(job.init, aux_loss_coefficient=config.aux_loss_coefficient)
    learner = Learner(model, config.optimiser, total, config.freeze)
    states = StateStore(job.workplace / "states", job.identity)
    _resume(learner, states, job.metrics, place)
    while learner.step < total:
        started, step = time.perf_counter(), learner.step
        epoch, chosen = batch_indices(step, len(sequences), config.batch_sequences, job.seed)
        batch = pack_batch(
            [sequences[i] for i in chosen], config.max_length, rank=place.rank, world=place.world, device=place.device
        )
        loss = accumulate(learner, batch)
        facts = learner.finish()
        if not math.isfinite(loss + facts.grad_norm):
            raise ValueError(f"step {step}: loss {loss}, gradient norm {facts.grad_norm}; lower lr or check the data")
        if place.leader:
            seconds = time.perf_counter() - started
            row = {
                "step": step,
                "steps": total,
                "epoch": epoch,
                "loss": loss,
                "lr": facts.lr,
                "grad_norm": facts.grad_norm,
            }
            _append(job.metrics, row | _rates(batch, seconds))
            if learner.step % config.checkpoint_every == 0 and learner.step < total:
                states.save(learner.step, learner.state_dict())
    if place.leader:
        _finish(job, model, total, sequences, rejected)
        states.clear()


def demonstrations(job: SFTJob) -> tuple[list[TrainingSequence], dict[str, int]]:
    """Read the job's training sequences and the counts of what was left out, by reason.

    Raises ValueError when nothing is left.
    """
    sealed = read_sealed(job.data, "demonstrations")
    view = training_view(sealed.records, sealed.segments, pool=job.pool, successful_only=job.config.successful_only)
    sequences, unfit = admit(view.sequences, job.config.max_length)
    rejected = view.rejected | unfit
    if not sequences:
        raise ValueError(
            f"{job.data}: no demonstration is left to train on (rejected: {rejected}); check pool and max_length"
        )
    return sequences, rejected


def accumulate(learner: Learner[PolicyModel], batch: Packed) -> float:
    """Add the gradients of this rank's packs and return the mean loss per target of the global batch.

    The sum of target losses is divided once, by all targets of the global batch (all ranks, all packs).
    """
    learner.begin()
    total = torch.zeros((), dtype=torch.float64)
    for pack in batch.packs:
        loss = -learner.model(pack).logprobs.sum() / batch.targets
        learner.backward(loss, aux_share=1.0 / batch.tokens)
        total += loss.detach().double().cpu()
    total = total.to(torch.cuda.current_device())
    torch.distributed.all_reduce(total)
    return float(total)


def _resume(learner: Learner[PolicyModel], states: StateStore, metrics: Path, place: Place) -> None:
    if place.leader:
        states.discard_foreign()
    torch.distributed.barrier()
    if state := states.restore(place.device):
        learner.load_state_dict(state)
    if place.leader:
        done = [row for row in read_metrics(metrics) if row["step"] < learner.step]
        write_atomic(metrics, b"".join(canonical_json(row) + b"\n" for row in done))


def _append(metrics: Path, row: dict[str, Any]) -> None:
    with metrics.open("a") as f:
        f.write(json.dumps(row) + "\n")


def _rates(batch: Packed, seconds: float) -> dict[str, float]:
    return {"tokens": batch.tokens, "targets": batch.targets, "tokens_per_second": batch.tokens / seconds}


def _finish(
    job: SFTJob, model: PolicyModel, steps: int, sequences: list[TrainingSequence], rejected: dict[str, int]
) -> None:
    export_hf(model, job.init, job.out)
    derive_card(
        job.init,
        job.out,
        name=job.name,
        stage=STAGE,
        data={"demonstrations": job.data_digest},
        recipe_digest=job.recipe_digest,
        seed=job.seed,
        facts={
            "job": job.identity,
            "config": job.config.model_dump(mode="json"),
            "pool": job.pool,
            "steps": steps,
            "sequences": len(sequences),
            "tokens": sum(len(s) for s in sequences),
            "targets": sum(s.policy_tokens for s in sequences),
            "rejected": rejected,
        },
    )
