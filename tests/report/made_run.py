"""Makes a small but complete run directory, as the stages would leave it: six candidates, data, curves, episodes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from occamy.capture.sealed import write_sealed
from occamy.contracts.episode import EpisodeRecord, Origin, Outcome, QuarantineReason, Segment
from occamy.contracts.lineage import LineageCard, tokenizer_digest, weights_digest, write_card
from occamy.contracts.manifest import Counts, Manifest, seal, write_atomic
from occamy.contracts.record import Record, canonical_json
from occamy.evaluation.config import EvaluationConfig
from occamy.evaluation.prices import load_prices
from occamy.evaluation.stage import KIND, RESULT, compare
from occamy.nano.tokenizer import build_tokenizer, save_tokenizer
from occamy.storage.rundir import RunDirectory, StageRecord
from occamy.tracking.promotion import decide

CANDIDATES = {
    "base": ((), "pretrain", 0.20, 0.66, 9.8),
    "marathon-sft": (("base",), "sft", 0.38, 0.70, 9.1),
    "marathon": (("marathon-sft",), "hdpo", 0.55, 0.73, 7.4),
    "sprint": (("base",), "sft", 0.14, 0.88, 9.5),
    "soup": (("marathon", "sprint"), "merge", 0.47, 0.86, 8.2),
    "sao": (("soup",), "sao", 0.58, 0.94, 6.9),
}
"""Candidate -> parents, stage, chance of success on long and short tasks, turns of a long episode."""
TOOLS = "<tools>crm:tier status visits;orders:customer>crm state qty;file;"
REQUEST = "<user>set tier of A01 to gold then copy qty of B02 to notes"
TURNS = [
    ('crm_get{"id":"A01"}<end>', '{"tier":"basic","status":"lead","visits":12}'),
    ('crm_update{"id":"A01","tier":"gold"}<end>', "ok"),
    ('orders_get{"id":"B02"}<end>', '{"customer":"A01","state":"paid","qty":7}'),
    ('file_write{"path":"notes","text":"7"}<end>', "ok"),
]


class Anything(Record):
    """A stand-in for a recipe: only its digest matters here."""

    seed: int = 3


def make_run(path: Path, *, tasks: int = 16, upto: str = "promotion", seed: int = 0) -> RunDirectory:
    """Fill `path` with a run whose stages finished in order until `upto`."""
    run = RunDirectory(path)
    run.open(Anything(), "laptop", Anything().digest(), 3)
    random = Random(seed)
    made: dict[str, Manifest] = {}
    _data(run, made)
    for name in CANDIDATES:
        _checkpoint(run, name, made, random)
        if name == upto:
            return run
    evaluation = _evaluation(run, made, tasks, random)
    if upto == "promotion":
        decision = decide(evaluation, 0.05)
        write_atomic(run.stage("promotion") / "promotion.json", canonical_json(decision))
        _finish(run, "promotion", decision.digest(), 0.4)
    return run


def base_folder(run: RunDirectory) -> Path:
    """Where the base checkpoint lies: outside the stages, like the shipped one."""
    return run.path / "base"


def _finish(run: RunDirectory, stage: str, output: str, seconds: float) -> None:
    run.finish(StageRecord(stage=stage, inputs="sha256:in", output=output, facts={"seconds": seconds}))


def _data(run: RunDirectory, made: dict[str, Manifest]) -> None:
    reasons = {"infeasible": 11, "leaks_answer": 4, "near_duplicate": 9}
    steps: list[tuple[str, str, str, Counts, dict[str, Any], str]] = [
        ("synthesis", "tasks", "task_packages", Counts(raw=424), {}, ""),
        ("admission", "task_release", "task_packages", Counts(raw=424, validated=409, admitted=400, quarantined=24),
         {"reasons": reasons}, "synthesis"),
        ("demonstrations", "demonstrations", "demonstrations", Counts(raw=600, validated=597, quarantined=3),
         {"reasons": {"state_drift": 3}}, "admission"),
    ]  # fmt: skip
    for stage, kind, artifact, counts, facts, parent in steps:
        folder = run.stage(stage)
        folder.mkdir(parents=True)
        (folder / "content.json").write_text(json.dumps(stage))
        parents = {"from": made[parent].digest()} if parent else {}
        made[stage] = seal(folder, kind, counts={artifact: counts}, parents=parents, facts=facts)
        _finish(run, stage, made[stage].digest(), 12.5)


def _checkpoint(run: RunDirectory, name: str, made: dict[str, Manifest], random: Random) -> None:
    parents, stage, long, _, turns = CANDIDATES[name]
    folder = base_folder(run) if name == "base" else run.stage(name)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(name.encode())
    save_tokenizer(folder)
    data = {"sft": {"demonstrations": made["demonstrations"].digest()}, "hdpo": {"tasks": made["admission"].digest()}}
    data["sao"] = data["hdpo"]
    own = weights_digest(folder)
    card = LineageCard(
        name=name,
        stage=stage,
        root=weights_digest(base_folder(run)),
        parents=tuple(weights_digest(base_folder(run) if p == "base" else run.stage(p)) for p in parents),
        parent_names=parents,
        data=data.get(stage, {}),
        seed=3,
        tokenizer_digest=tokenizer_digest(folder),
        weights_digest=own,
    )
    write_card(folder, card)
    if stage in ("sft", "hdpo", "sao"):
        rows = [_metrics(step, stage, long, turns, random) for step in range(1, 41)]
        place = folder / "trainer" if stage == "sft" else folder / "trainer" / "exchange"
        place.mkdir(parents=True)
        (place / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if name != "base":
        _finish(run, name, own, 95.0 if stage != "merge" else 0.7)


def _metrics(step: int, stage: str, long: float, turns: float, random: Random) -> dict[str, Any]:
    gone = 1 - math.exp(-step / 14)
    noise = random.gauss(0, 0.03)
    if stage == "sft":
        return {
            "step": step,
            "steps": 40,
            "loss": 2.1 - 1.6 * gone + noise,
            "lr": 1e-3 * (1 - step / 41),
            "grad_norm": 1.0,
        }
    return {
        "step": step,
        "steps_total": 40,
        "reward": 0.25 + (long - 0.2) * gone + noise,
        "success": 0.2 + (long - 0.2) * gone + noise,
        "steps": turns + 3 * (1 - gone) + 8 * noise,
        "segments": 1.3 + noise,
        "explained_variance": 0.35 * gone + noise,
        "entropy": 0.9 - 0.4 * gone + noise,
        "train_seconds": 1.4 + noise,
    }


def _evaluation(run: RunDirectory, made: dict[str, Manifest], tasks: int, random: Random) -> Any:
    out = run.stage("evaluation")
    records: dict[str, list[EpisodeRecord]] = {}
    digests: dict[str, str] = {}
    for name in CANDIDATES:
        rows, segments = _episodes(name, tasks, random)
        folder = out / "episodes" / name
        digests[name] = write_sealed(
            folder, rows, segments, kind="episodes", parents={"release": made["admission"].digest()}, facts={}
        ).digest()
        records[name] = rows
    config = EvaluationConfig(bootstrap=300)
    weights = {n: weights_digest(base_folder(run) if n == "base" else run.stage(n)) for n in CANDIDATES}
    result = compare(
        records,
        config,
        load_prices("2026-09"),
        seed=3,
        release=made["admission"].digest(),
        checkpoints=weights,
        episodes=digests,
    )
    write_atomic(out / RESULT, canonical_json(result))
    manifest = seal(out, KIND, parents={"release": made["admission"].digest()})
    _finish(run, "evaluation", manifest.digest(), 80.0)
    return result


def _episodes(name: str, tasks: int, random: Random) -> tuple[list[EpisodeRecord], list[Segment]]:
    _, _, long, short, turns = CANDIDATES[name]
    rows: list[EpisodeRecord] = []
    segments: list[Segment] = []
    hardness = Random(9)  # the same tasks for every candidate
    for pool, chance, length in (("long", long, turns), ("short", short, 2.6)):
        for t in range(tasks):
            easy = hardness.uniform(-0.3, 0.3)
            for trial in range(3):
                success = random.random() < chance + easy
                parts = 2 if pool == "long" and random.random() < 0.4 else 1
                record = _record(
                    name, pool, f"{pool}-{t:03d}", trial, success, max(2, round(random.gauss(length, 1.2))), parts
                )
                if name == "base" and t == 0 and trial == 2:
                    failed = {
                        "outcome": Outcome.infra_failed,
                        "quarantine": QuarantineReason.infra_failed,
                        "success": False,
                    }
                    record = record.model_copy(update=failed)
                rows.append(record)
                segments += _segments(record.episode_id, parts)
    return rows, segments


def _record(name: str, pool: str, task: str, trial: int, success: bool, steps: int, parts: int) -> EpisodeRecord:
    read = 70 * steps + 14 * steps * steps
    return EpisodeRecord(
        episode_id=f"{task}.{trial}",
        task_id=task,
        task_digest="sha256:task",
        pool=pool,
        split="test",
        trial=trial,
        seed=trial,
        sampled_by="policy",
        outcome=Outcome.completed if success or steps < 11 else Outcome.timed_out,
        score=1.0 if success else 0.5,
        reward=1.0 if success else 0.5,
        success=success,
        steps=steps,
        tool_calls=steps - 1,
        failed_calls=0 if success else 1,
        segments=parts,
        input_tokens=read,
        cached_tokens=int(read * 0.7),
        output_tokens=11 * steps,
        wall_seconds=0.21 * steps,
        harness_digest="sha256:harness",
        final_fingerprint="sha256:final",
        model=name,
        version_min=0,
        version_max=0,
    )


_TOKENIZER = build_tokenizer()


def _segments(episode: str, parts: int) -> list[Segment]:
    """A whole transcript, or one whose history a summary replaced halfway."""
    if parts == 1:
        return [_segment(episode, 0, "end", TOOLS + REQUEST + "<assistant>", [*TURNS, ("done<end>", "")])]
    first = _segment(
        episode,
        0,
        "summary_replacement",
        TOOLS + REQUEST + "<assistant>",
        [*TURNS[:2], ("file_list{}<end>", '{"files":["notes"]}'), ("A01.tier=gold;<end>", "")],
    )
    carried = TOOLS + REQUEST + "<user>summary:A01.tier=gold;<assistant>"
    return [first, _segment(episode, 1, "end", carried, [*TURNS[2:], ("done<end>", "")])]


def _segment(episode: str, index: int, closed_by: str, prefix: str, turns: list[tuple[str, str]]) -> Segment:
    parts = [(prefix, Origin.INHERITED)]
    for said, seen in turns:
        parts.append((said, Origin.SAMPLED))
        if seen:
            parts.append((f"<tool>{seen}<assistant>", Origin.OBSERVED))
    tokens: list[int] = []
    origin: list[int] = []
    for text, code in parts:
        ids = _TOKENIZER.encode(text, add_special_tokens=False)
        tokens += ids
        origin += [code] * len(ids)
    mask = np.array([o == Origin.SAMPLED for o in origin])
    return Segment(
        episode_id=episode,
        run="root",
        index=index,
        closed_by=closed_by,
        sampled_by="policy",
        tokens=np.array(tokens, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, -0.2, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        origin=np.array(origin, dtype=np.int8),
    )
