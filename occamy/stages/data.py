"""Stages that make data: tasks, their release, demonstrations."""

from __future__ import annotations

import shutil
from pathlib import Path

from occamy.admission.release import admit
from occamy.contracts.manifest import Manifest, verify
from occamy.preflight import base_folder
from occamy.rollout.demonstrate import demonstrate
from occamy.stages.context import Context, Facts, Made, StageResult, run_stage
from occamy.stages.names import ADMISSION, DEMONSTRATIONS, SYNTHESIS
from occamy.storage.progress import Progress
from occamy.synthesis.generate import synthesise


def synthesis(ctx: Context) -> StageResult:
    """Author task packages."""

    def body(out: Path, progress: Progress) -> Made:
        return _made(synthesise(ctx.recipe.synthesis, out, ctx.recipe.seed, progress), "task_packages")

    return run_stage(ctx, SYNTHESIS, lambda: {"config": ctx.recipe.synthesis.digest()}, body)


def admission(ctx: Context, tasks: str) -> StageResult:
    """Admit or quarantine the task packages in folder `tasks`."""

    def body(out: Path, progress: Progress) -> Made:
        return _made(admit(Path(tasks), out, ctx.recipe.admission, progress), "task_packages")

    return run_stage(ctx, ADMISSION, lambda: {"tasks": verify(Path(tasks), "tasks").digest()}, body)


def demonstrations(ctx: Context, release: str) -> StageResult:
    """Demonstrate the training tasks of the release in folder `release`."""
    config = ctx.recipe.demonstrations.model_copy(update={"rollout": ctx.recipe.rollout})
    work = ctx.run.work(DEMONSTRATIONS)

    def body(out: Path, progress: Progress) -> Made:
        manifest = demonstrate(
            Path(release), base_folder(ctx.recipe), out, config, ctx.recipe.seed, work=work, progress=progress
        )
        shutil.rmtree(work, ignore_errors=True)
        return _made(manifest, "demonstrations")

    def inputs() -> dict[str, str]:
        return {"config": config.digest(), "release": verify(Path(release), "task_release").digest()}

    return run_stage(ctx, DEMONSTRATIONS, inputs, body)


def _made(manifest: Manifest, kind: str) -> Made:
    counts = manifest.counts[kind]
    facts: Facts = {"raw": counts.raw}
    if counts.admitted or counts.quarantined:
        facts |= {"admitted": counts.admitted, "quarantined": counts.quarantined}
    return Made(manifest.digest(), facts)
