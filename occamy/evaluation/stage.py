"""The evaluation stage: every candidate on the same held-out tasks with the same seeds, sealed, then compared."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.context import SpawnContext
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

from occamy.capture.sealed import read_sealed
from occamy.contracts.episode import EpisodeRecord
from occamy.contracts.evaluation import EvaluationPool, EvaluationResult
from occamy.contracts.lineage import read_card, weights_digest
from occamy.contracts.manifest import NAME as MANIFEST
from occamy.contracts.manifest import SealError, seal, verify, write_atomic
from occamy.contracts.record import canonical_json, digest
from occamy.contracts.release import Release, load_release
from occamy.contracts.task import TaskContract
from occamy.evaluation.config import EvaluationConfig
from occamy.evaluation.prices import PriceSnapshot, load_prices
from occamy.evaluation.summary import difference, figures, pareto
from occamy.rollout.config import RolloutConfig
from occamy.rollout.sample import sample_episodes

KIND = "evaluation"
RESULT = "evaluation.json"
EPISODES = "episodes"

Progress = Callable[[int, int, str], None]
"""Called as (done, total, figure) in episodes."""


@dataclass(frozen=True)
class _Work:
    """What one candidate's process needs."""

    tasks: tuple[TaskContract, ...]
    out: Path
    rollout: RolloutConfig
    trials: int
    seed: int
    release: str
    log: Path | None


def evaluate(
    candidates: Mapping[str, Path],
    release: Path,
    out: Path,
    config: EvaluationConfig,
    *,
    seed: int,
    rollout: RolloutConfig,
    log: Path | None = None,
    on_progress: Progress | None = None,
) -> EvaluationResult:
    """Run `config.trials` attempts at the held-out tasks of `release` with every candidate and compare them.

    `out` receives ``episodes/<candidate>/`` (sealed) and ``evaluation.json``, and is sealed last. Task and trial fix an
    episode's seed whatever the candidate, so that differences are paired. A finished evaluation is returned as it is; a
    killed one goes on and repeats no finished episode. `log` is a folder for the engines' output.

    Raises SealError when the release or `out` is not what it says, ValueError when there is no held-out task, a
    candidate's weights are not those of its card, or a candidate has no scored episode in a pool.
    """
    prices = load_prices(config.prices)
    tasks = load_release(release)
    chosen = held_out(tasks, config)
    digests = {name: _checked(name, folder) for name, folder in candidates.items()}
    asked = digest(
        [config.digest(), prices.digest(), rollout.digest(), tasks.manifest.digest(), seed, list(digests.items())]
    )
    if (out / MANIFEST).is_file():
        if verify(out, KIND).facts.get("asked") != asked:
            raise SealError(f"{out}: holds an evaluation of other candidates or settings; choose another folder")
        return read_result(out)
    sampling = rollout.model_copy(update={"temperature": config.temperature, "concurrency": config.concurrency})
    work = _Work(tuple(chosen), out / EPISODES, sampling, config.trials, seed, tasks.manifest.digest(), log)
    _sample_all(candidates, work, config.engines, on_progress)
    sealed = {name: read_sealed(out / EPISODES / name, "episodes") for name in candidates}
    result = compare(
        {name: s.records for name, s in sealed.items()},
        config,
        prices,
        seed=seed,
        release=tasks.manifest.digest(),
        checkpoints=digests,
        episodes={name: s.manifest.digest() for name, s in sealed.items()},
    )
    write_atomic(out / RESULT, canonical_json(result))
    seal(out, KIND, parents={"release": tasks.manifest.digest()}, facts={"asked": asked})
    return result


def read_result(folder: Path) -> EvaluationResult:
    """Verify a sealed evaluation folder and read its result. Raises SealError when it is not what its manifest says."""
    verify(folder, KIND)
    return EvaluationResult.model_validate_json((folder / RESULT).read_bytes())


def held_out(release: Release, config: EvaluationConfig) -> list[TaskContract]:
    """The first `config.tasks` test tasks of each pool by id. Raises ValueError naming a pool that has none."""
    chosen: list[TaskContract] = []
    for pool in config.pools:
        tasks = release.select(pool=pool, split="test")
        if not tasks:
            raise ValueError(f"the release has no test task in pool {pool!r}; synthesise some or leave the pool out")
        chosen += tasks[: config.tasks]
    return chosen


def compare(
    records: Mapping[str, Sequence[EpisodeRecord]],
    config: EvaluationConfig,
    prices: PriceSnapshot,
    *,
    seed: int,
    release: str,
    checkpoints: dict[str, str],
    episodes: dict[str, str],
) -> EvaluationResult:
    """Figures of every candidate, differences of every later candidate over every earlier one, and the Pareto plane."""
    names = list(records)
    boot: dict[str, Any] = {"resamples": config.bootstrap, "seed": seed}
    pools: list[EvaluationPool] = [*config.pools, "mixed"]
    rows = [figures(name, pool, records[name], prices, **boot) for name in names for pool in pools]
    differences = [
        difference(name, before, pool, records[name], records[before], **boot)
        for i, name in enumerate(names)
        for before in names[:i]
        for pool in pools
    ]
    return EvaluationResult(
        release=release,
        seed=seed,
        trials=config.trials,
        prices=prices.model_dump(mode="json"),
        checkpoints=checkpoints,
        episodes=episodes,
        figures=tuple(rows),
        differences=tuple(differences),
        pareto=pareto(rows),
    )


def _checked(name: str, folder: Path) -> str:
    card, found = read_card(folder), weights_digest(folder)
    if card.weights_digest != found:
        raise ValueError(f"candidate {name}: {folder} holds weights {found}, its card says {card.weights_digest}")
    return found


def _sample_all(candidates: Mapping[str, Path], work: _Work, engines: int, on_progress: Progress | None) -> None:
    """Sample every candidate, `engines` at a time, each in a process of its own beside its engine."""
    each = len(work.tasks) * work.trials
    counts = dict.fromkeys(candidates, 0)

    def report(name: str, done: int, _: int, figure: str) -> None:
        counts[name] = done
        if on_progress is not None:
            on_progress(sum(counts.values()), each * len(counts), f"{name}: {figure}")

    if engines == 1 or len(candidates) == 1:
        for name, folder in candidates.items():
            _sample(work, name, folder, partial(report, name))
            report(name, each, each, "done")
        return
    spawn = get_context("spawn")
    with ExitStack() as stack:
        lines: Queue[tuple[str, int, str]] = spawn.Queue()
        pool = stack.enter_context(_pool(min(engines, len(candidates)), spawn, lines))
        running = {pool.submit(_sample_here, work, name, folder): name for name, folder in candidates.items()}
        for name, done, figure in _follow(lines, running):
            report(name, done, each, figure)


def _pool(size: int, spawn: SpawnContext, lines: Queue[tuple[str, int, str]]) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(size, mp_context=spawn, initializer=_remember, initargs=(lines,))


def _follow(lines: Queue[tuple[str, int, str]], running: dict[Future[None], str]) -> Iterator[tuple[str, int, str]]:
    """Progress lines until all processes are done. The first failure cancels what has not begun and is raised."""
    waiting = set(running)
    while waiting:
        with suppress(Empty):
            yield lines.get(timeout=0.2)
        for future in [f for f in waiting if f.done()]:
            waiting.discard(future)
            if future.exception() is not None:
                for other in waiting:
                    other.cancel()
            future.result()
    while not lines.empty():
        yield lines.get()


_lines: Queue[tuple[str, int, str]]


def _remember(lines: Queue[tuple[str, int, str]]) -> None:
    """Give a worker process its way to report progress (a queue cannot travel with a task), and a life no longer than
    its parent's: what it sampled is kept and taken up again.
    """
    global _lines
    _lines = lines
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _sample_here(work: _Work, name: str, folder: Path) -> None:
    _sample(work, name, folder, partial(_send, name))


def _send(name: str, done: int, total: int, figure: str) -> None:
    if done == total or done % 8 == 0:
        _lines.put((name, done, figure))


def _sample(work: _Work, name: str, folder: Path, progress: Progress) -> None:
    sample_episodes(
        work.tasks,
        folder,
        work.out / name,
        work.rollout,
        trials=work.trials,
        seed=work.seed,
        model=name,
        parents={"release": work.release},
        facts={"candidate": name},
        log=work.log / f"engine-{name}.log" if work.log else None,
        progress=progress,
    )
