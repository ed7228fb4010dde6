"""Episode records and token segments -> training sequences: what the losses see of an episode."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from occamy.contracts.episode import EpisodeRecord, Segment

ROOT = "root"
_AUXILIARY = "aux"


@dataclass(frozen=True)
class TrainingSequence:
    """One segment with targets, with the facts of its episode. Arrays have shape [n]."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    """True where the token is a training target: sampled by the policy or demonstrator in the root run, or in a summary
    that it wrote for itself in a run of its own."""
    logprobs: NDArray[np.float32]
    """Behaviour log-probs, 0 where mask is False or a teacher wrote."""
    versions: NDArray[np.int32]
    """Weight version that sampled each token, -1 where none did."""
    episode_id: str
    task_id: str
    segment: int
    """Position among the run's segments, from 0."""
    n_segments: int
    policy_tokens_run: int
    """Targets in all segments of the run."""
    policy_tokens_later: int
    """Targets in later segments of the run (N_{>s} of the cross-segment correction)."""
    reward: float
    """R(e), of the episode; the same for all its segments."""
    success: bool
    steps: int
    """Policy turns of the episode's root run."""
    run: str = ROOT
    """"root", or the run of a summary that the policy wrote for itself; it stands alone and is worth R(e) too."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def key(self) -> tuple[str, str, int]:
        """Episode, run and segment: tells sequences apart."""
        return self.episode_id, self.run, self.segment

    @property
    def policy_tokens(self) -> int:
        """Number of training targets."""
        return int(self.mask.sum())


@dataclass(frozen=True)
class View:
    """Training sequences and an account of what was left out."""

    sequences: tuple[TrainingSequence, ...]
    """Ordered by episode id, the root run first, then segment."""
    rejected: dict[str, int]
    """Reason -> count, of episodes ("quarantined", "unsuccessful", "other_pool") and segments ("subagent")."""


def training_view(
    records: Sequence[EpisodeRecord],
    segments: Sequence[Segment],
    *,
    pool: str | None = None,
    successful_only: bool = False,
) -> View:
    """Select the segments that may train.

    Quarantined episodes and runs without targets (subagents, housekeeping) never train; `pool` keeps one task pool;
    `successful_only` keeps successes.
    Raises ValueError when a segment belongs to no record, a run lacks one of its segments, arrays differ in length, or
    the first token of a segment is a target (nothing predicts it).
    """
    by_episode: dict[str, list[Segment]] = defaultdict(list)
    rejected: Counter[str] = Counter()
    for s in segments:
        by_episode[s.episode_id].append(s)
    if strangers := by_episode.keys() - {r.episode_id for r in records}:
        raise ValueError(
            f"segments of episode {min(strangers)!r} have no episode record; the sealed folder is incomplete"
        )
    out: list[TrainingSequence] = []
    for record in sorted(records, key=lambda r: r.episode_id):
        if reason := _refusal(record, pool, successful_only):
            rejected[reason] += 1
            continue
        runs: dict[str, list[Segment]] = {ROOT: []}
        for s in sorted(by_episode[record.episode_id], key=lambda s: s.index):
            runs.setdefault(s.run, []).append(s)
        for name, run in runs.items():
            if name == ROOT or (name.startswith(_AUXILIARY) and any(s.mask.any() for s in run)):
                out.extend(_of_run(record, name, run))
            else:
                rejected["subagent"] += len(run)
    return View(tuple(out), {reason: n for reason, n in sorted(rejected.items()) if n})


def _refusal(record: EpisodeRecord, pool: str | None, successful_only: bool) -> str | None:
    if record.quarantine is not None:
        return "quarantined"
    if pool is not None and record.pool != pool:
        return "other_pool"
    if successful_only and not record.success:
        return "unsuccessful"
    return None


def _of_run(record: EpisodeRecord, name: str, run: list[Segment]) -> list[TrainingSequence]:
    where = f"episode {record.episode_id!r}"
    if [s.index for s in run] != list(range(len(run))) or not run:
        raise ValueError(
            f"{where}: {name} segments are {[s.index for s in run]}, expected 0, 1, ...; capture is incomplete"
        )
    counts = [int(s.mask.sum()) for s in run]
    out = []
    for s in run:
        if len({len(s.tokens), len(s.mask), len(s.logprobs), len(s.versions)}) != 1:
            raise ValueError(f"{where} segment {s.index}: tokens, mask, logprobs and versions differ in length")
        if len(s.mask) and s.mask[0]:
            raise ValueError(f"{where} segment {s.index}: its first token is a target, but nothing comes before it")
        out.append(
            TrainingSequence(
                tokens=np.asarray(s.tokens, np.int32),
                mask=np.asarray(s.mask, np.bool_),
                logprobs=np.asarray(s.logprobs, np.float32),
                versions=np.asarray(s.versions, np.int32),
                episode_id=record.episode_id,
                task_id=record.task_id,
                segment=s.index,
                n_segments=len(run),
                policy_tokens_run=sum(counts),
                policy_tokens_later=sum(counts[s.index + 1 :]),
                reward=record.reward,
                success=record.success,
                steps=record.steps,
                run=name,
            )
        )
    return out
