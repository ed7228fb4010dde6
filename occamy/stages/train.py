"""Stages that make checkpoints: two experts, their soup, the final reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from occamy.contracts.lineage import LineageCard, read_card
from occamy.contracts.manifest import verify
from occamy.preflight import base_folder
from occamy.stages.context import Context, Facts, Made, StageResult, run_stage
from occamy.stages.names import MARATHON, MARATHON_SFT, SAO, SOUP, SPRINT
from occamy.storage.progress import Progress
from occamy.training.drive import train_hdpo, train_sao
from occamy.training.launch import read_metrics
from occamy.training.rl_config import RlConfig
from occamy.training.sft import train_sft

_EXPERTS = {MARATHON_SFT: ("marathon_sft", "long"), SPRINT: ("sprint", "short")}
"""Candidate -> section of the recipe, pool of the demonstrations."""


def sft(ctx: Context, candidate: str, demonstrations: str) -> StageResult:
    """Train the base checkpoint on demonstrations: candidate ``marathon-sft`` or ``sprint``.

    Raises ValueError for another candidate.
    """
    if candidate not in _EXPERTS:
        raise ValueError(f"candidate {candidate!r} is not trained by SFT; use {' or '.join(_EXPERTS)}")
    section, pool = _EXPERTS[candidate]
    config = getattr(ctx.recipe, section)
    base, data = base_folder(ctx.recipe), Path(demonstrations)

    def body(out: Path, progress: Progress) -> Made:
        card = train_sft(
            base,
            data,
            out,
            config,
            pool=pool,
            name=candidate,
            seed=ctx.recipe.seed,
            recipe_digest=ctx.recipe.digest(),
            on_progress=_shown(progress, "steps", "loss"),
        )
        return _made(card, read_metrics(out / "trainer" / "metrics.jsonl"), ("loss",))

    def inputs() -> dict[str, Any]:
        return {
            "config": config.digest(),
            "base": read_card(base).weights_digest,
            "demonstrations": verify(data, "demonstrations").digest(),
        }

    return run_stage(ctx, candidate, inputs, body)


def soup(ctx: Context, marathon: str, sprint: str) -> StageResult:
    """Merge the Marathon and the Sprint expert."""
    from occamy.merging.soup import merge

    parents = [Path(marathon), Path(sprint)]
    config = ctx.recipe.merging

    def body(out: Path, progress: Progress) -> Made:
        card = merge(
            parents,
            out,
            name=SOUP,
            weights=config.weights,
            normalise=config.normalise,
            recipe_digest=ctx.recipe.digest(),
            seed=ctx.recipe.seed,
        )
        return _made(card, [], ())

    def inputs() -> dict[str, Any]:
        return {"config": config.digest(), "parents": [read_card(p).weights_digest for p in parents]}

    return run_stage(ctx, SOUP, inputs, body)


def hdpo(ctx: Context, start: str, release: str) -> StageResult:
    """Train the Marathon expert by HDPO, from the checkpoint in folder `start`."""
    return _rl(ctx, MARATHON, train_hdpo, ctx.recipe.hdpo, Path(start), Path(release))


def sao(ctx: Context, start: str, release: str) -> StageResult:
    """Train the soup in folder `start` by SAO."""
    return _rl(ctx, SAO, train_sao, ctx.recipe.sao, Path(start), Path(release))


def _rl(
    ctx: Context, name: str, train: Callable[..., LineageCard], config: RlConfig, start: Path, release: Path
) -> StageResult:
    rollout, harness = ctx.recipe.rollout, ctx.recipe.harness()

    def body(out: Path, progress: Progress) -> Made:
        card = train(
            start,
            release,
            out,
            config,
            name=name,
            seed=ctx.recipe.seed,
            recipe_digest=ctx.recipe.digest(),
            rollout=rollout,
            harness=harness,
            on_progress=_shown(progress, "steps_total", "reward", "success"),
        )
        return _made(card, read_metrics(out / "trainer" / "exchange" / "metrics.jsonl"), ("reward", "success"))

    def inputs() -> dict[str, Any]:
        return {
            "config": config.digest(),
            "start": read_card(start).weights_digest,
            "release": verify(release, "task_release").digest(),
            "rollout": rollout.digest(),
            "harness": harness.digest,
        }

    return run_stage(ctx, name, inputs, body)


def _shown(progress: Progress, total: str, *names: str) -> Callable[[Mapping[str, Any]], None]:
    """Turn a trainer's metrics line into progress: `total` is where it says how many steps, `names` are shown."""

    def show(row: Mapping[str, Any]) -> None:
        figure = ", ".join(f"{name} {row[name]:.3f}" for name in names if name in row)
        progress(int(row["step"]), int(row[total]), figure)

    return show


def _made(card: LineageCard, rows: list[dict[str, Any]], names: tuple[str, ...]) -> Made:
    facts: Facts = {"steps": len(rows)} if rows else {}
    for name in names:
        if rows and name in rows[-1]:
            facts[name] = float(rows[-1][name])
    return Made(card.weights_digest, facts, rows)
