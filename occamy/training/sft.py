"""Supervised fine-tuning as other rooms see it: one call that starts the trainer, resumes it, or finds it done."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from occamy.contracts.lineage import NAME as LINEAGE
from occamy.contracts.lineage import LineageCard, read_card, weights_digest
from occamy.contracts.manifest import verify, write_atomic
from occamy.contracts.record import Record, canonical_json, digest
from occamy.training.config import SFTConfig
from occamy.training.launch import Progress, run_trainer

STAGE = "sft"


class SFTJob(Record):
    """What the trainer processes are told."""

    algorithm: Literal["sft"] = "sft"
    init: Path
    """Checkpoint folder to start from."""
    data: Path
    """Sealed demonstrations."""
    out: Path
    """Checkpoint folder to write."""
    config: SFTConfig
    pool: str | None
    """Task pool to train on; None: all."""
    name: str
    """Name of the candidate, for its lineage card."""
    seed: int
    recipe_digest: str
    init_digest: str
    """Weights digest of `init`."""
    data_digest: str
    """Manifest digest of `data`."""

    @property
    def identity(self) -> str:
        """Digest of everything that shapes the result; folders are left out, their contents count."""
        return digest(self.model_dump(mode="json", exclude={"init", "data", "out"}))

    @property
    def workplace(self) -> Path:
        """Folder of the trainer's spec, log, metrics and states."""
        return self.out / "trainer"

    @property
    def metrics(self) -> Path:
        """JSON lines, one per optimiser step: loss, lr, grad_norm, tokens, targets, tokens_per_second, epoch."""
        return self.workplace / "metrics.jsonl"


def train_sft(
    init: Path,
    data: Path,
    out: Path,
    config: SFTConfig,
    *,
    pool: str | None,
    name: str,
    seed: int,
    recipe_digest: str,
    on_progress: Progress | None = None,
) -> LineageCard:
    """Fine-tune checkpoint `init` on sealed demonstrations `data` and write checkpoint `out`.

    Equal inputs give equal weights (on a CPU, bit for bit). A finished `out` is returned at once; a killed run resumes
    from its newest trainer state. `on_progress` gets one dict per optimiser step (see `SFTJob.metrics`).
    Raises SealError for damaged demonstrations, FileExistsError when `out` holds a checkpoint of other inputs, and
    TrainingFailed with the end of the log when the trainer fails.
    """
    job = SFTJob(
        init=init.resolve(),
        data=data.resolve(),
        out=out.resolve(),
        config=config,
        pool=pool,
        name=name,
        seed=seed,
        recipe_digest=recipe_digest,
        init_digest=weights_digest(init),
        data_digest=verify(data, "demonstrations").digest(),
    )
    if (out / LINEAGE).is_file():
        return _finished(job)
    spec = job.workplace / "spec.json"
    write_atomic(spec, canonical_json(job))
    run_trainer(
        spec,
        log=job.workplace / "log.txt",
        processes=config.processes,
        threads=config.threads,
        metrics=job.metrics,
        on_progress=on_progress,
    )
    return read_card(out)


def _finished(job: SFTJob) -> LineageCard:
    card = read_card(job.out)
    if card.facts.get("job") != job.identity:
        raise FileExistsError(
            f"{job.out} holds checkpoint {card.name!r} (stage {card.stage}, seed {card.seed}) made from other inputs; "
            "choose another folder or remove it"
        )
    if weights_digest(job.out) != card.weights_digest:
        raise FileExistsError(f"{job.out}: model.safetensors is not what its lineage card says; remove the folder")
    shutil.rmtree(job.workplace / "states", ignore_errors=True)  # a kill right after the card was written leaves them
    return card
