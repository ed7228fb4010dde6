"""What a report is made from, and how to gather it from a run directory, finished or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from occamy.capture.sealed import Sealed, read_sealed
from occamy.contracts.evaluation import EvaluationResult
from occamy.contracts.lineage import NAME as CARD
from occamy.contracts.lineage import LineageCard, read_card
from occamy.contracts.manifest import NAME as MANIFEST
from occamy.contracts.manifest import Manifest, SealError
from occamy.evaluation.stage import EPISODES, RESULT, read_result
from occamy.storage.rundir import RunDirectory, StageRecord
from occamy.tracking.promotion import PromotionDecision

PROMOTION = "promotion.json"
"""Name of the file, in any stage's folder, that holds a PromotionDecision."""

METRICS = "metrics.jsonl"
"""Name of a stage's learning curve: beside its files, its trainer's, or its exchange's (reinforcement learning)."""

Curves = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ReportInputs:
    """Everything a report may show. Only `title` and `run` are needed; what is missing is left out of the page."""

    title: str
    run: str
    """Name or id of the pipeline run."""
    state: str = ""
    """How the run ended: SUCCEEDED, FAILED …"""
    recipe: str = ""
    recipe_digest: str = ""
    seed: int | None = None
    cards: Sequence[LineageCard] = ()
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    """Stage -> manifest of what it made."""
    curves: Mapping[str, Curves] = field(default_factory=dict)
    """Stage -> lines of its metrics.jsonl."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Stage -> wall-clock seconds."""
    evaluation: EvaluationResult | None = None
    decision: PromotionDecision | None = None
    episodes: Mapping[str, Sealed] = field(default_factory=dict)
    """Candidate -> its evaluation episodes with token segments."""
    tokenizer: Path | None = None
    """A tokenizer.json, to read the segments."""
    mlflow: str = ""
    """Command or address that opens the runs in MLflow."""
    notes: Sequence[str] = ()
    """What could not be read, for the reader to know."""


def collect(path: Path, *, state: str = "", base: Path | None = None, mlflow: str = "") -> ReportInputs:
    """Gather what a run directory holds, whatever stages it finished; `base` is the checkpoint it began from.

    A folder that is damaged or of another version becomes a note of the report instead of an error.
    """
    run = RunDirectory(path)
    info = run.info()
    notes: list[str] = []
    cards = [read_card(base)] if base is not None else []
    manifests: dict[str, Manifest] = {}
    curves: dict[str, Curves] = {}
    seconds: dict[str, float] = {}
    evaluation, decision, episodes = None, None, {}
    for name, folder in _stages(path, notes, seconds):
        try:
            if (folder / CARD).is_file():
                cards.append(read_card(folder))
            if (folder / MANIFEST).is_file():
                manifests[name] = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
            if (folder / RESULT).is_file():
                evaluation = read_result(folder)
                episodes = {c: read_sealed(folder / EPISODES / c, "episodes") for c in evaluation.candidates}
            if (folder / PROMOTION).is_file():
                decision = PromotionDecision.model_validate_json((folder / PROMOTION).read_bytes())
            if rows := _curves(folder):
                curves[name] = rows
        except (OSError, ValidationError, SealError, json.JSONDecodeError) as e:
            notes.append(f"stage {name}: {' '.join(str(e).split())[:300]}")
    return ReportInputs(
        title=path.absolute().name,
        run=path.absolute().name,
        state=state,
        recipe=info.recipe if info else "",
        recipe_digest=info.recipe_digest if info else "",
        seed=info.seed if info else None,
        cards=cards,
        manifests=manifests,
        curves=curves,
        seconds=seconds,
        evaluation=evaluation,
        decision=decision,
        episodes=episodes,
        tokenizer=_tokenizer(path, base),
        mlflow=mlflow,
        notes=notes,
    )


def _stages(path: Path, notes: list[str], seconds: dict[str, float]) -> Iterator[tuple[str, Path]]:
    """Finished stages in the order in which they finished, with their folders."""
    records = sorted((path / "stages").glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
    for file in records:
        try:
            record = StageRecord.model_validate_json(file.read_bytes())
        except ValidationError as e:
            notes.append(f"{file.name}: {e.errors()[0]['msg']}")
            continue
        if isinstance(record.facts.get("seconds"), int | float):
            seconds[record.stage] = float(record.facts["seconds"])
        yield record.stage, path / "stages" / record.stage


def _curves(folder: Path) -> Curves:
    """Metrics lines of a stage's folder or its trainer's; a line torn by a killed writer is left out."""
    trainer = folder / "trainer"
    for file in (folder / METRICS, trainer / METRICS, trainer / "exchange" / METRICS):
        if file.is_file():
            return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return []


def _tokenizer(path: Path, base: Path | None) -> Path | None:
    places = [base, *sorted((path / "stages").glob("*"))]
    return next((p / "tokenizer.json" for p in places if p is not None and (p / "tokenizer.json").is_file()), None)
