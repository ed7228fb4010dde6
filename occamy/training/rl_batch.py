"""From a sealed batch of episodes to what RL may train on. What is left out is counted by reason, before statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from occamy.contracts.episode import EpisodeRecord, Outcome, Segment
from occamy.training.views import TrainingSequence, training_view


@dataclass(frozen=True)
class Experience:
    """One admitted episode."""

    record: EpisodeRecord
    sequences: tuple[TrainingSequence, ...]
    """Segments of the root run in order, each with at least one policy token."""

    @property
    def policy_tokens(self) -> int:
        """Tokens that the policy sampled in the root run."""
        return sum(s.policy_tokens for s in self.sequences)


@dataclass(frozen=True)
class Row:
    """One training sequence and what its policy tokens are worth."""

    sequence: TrainingSequence
    signals: dict[str, NDArray[np.float32]]
    """Name -> [policy tokens]."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Identity within a batch."""
        return self.sequence.key


@dataclass(frozen=True)
class AdmittedBatch:
    """What a batch holds after the guard."""

    experiences: tuple[Experience, ...]
    """In order of episode id, whatever order they finished in."""
    refused: dict[str, int]
    """Reason -> episodes left out."""

    @property
    def policy_tokens(self) -> int:
        """Policy tokens of all admitted episodes."""
        return sum(e.policy_tokens for e in self.experiences)


def admit_batch(
    records: Sequence[EpisodeRecord],
    segments: Sequence[Segment],
    *,
    version: int,
    max_staleness: int,
    max_length: int,
) -> AdmittedBatch:
    """Keep the episodes that the weights of `version` may train on.

    Left out: quarantined and infrastructure-failed episodes, those a teacher wrote, those without a policy token, with
    a token of a version that these weights do not descend from, whose oldest token is more than `max_staleness`
    versions old, or with a segment of more than `max_length` tokens.
    Raises ValueError when an episode id occurs twice, a segment has no record, or an admitted episode lacks a segment.
    """
    twice = [episode for episode, n in Counter(r.episode_id for r in records).items() if n > 1]
    if twice:
        raise ValueError(f"episode {twice[0]!r} occurs twice in one batch; its folder was not written by one driver")
    by_episode: dict[str, list[Segment]] = {r.episode_id: [] for r in records}
    for segment in segments:
        if segment.episode_id not in by_episode:
            raise ValueError(f"segment of episode {segment.episode_id!r} has no record; the batch is incomplete")
        by_episode[segment.episode_id].append(segment)
    kept: list[Experience] = []
    refused = Counter[str]()
    for record in sorted(records, key=lambda r: r.episode_id):
        reason = _refused_record(record)
        if reason is None:
            view = training_view([record], by_episode[record.episode_id])
            experience = Experience(record, tuple(s for s in view.sequences if s.policy_tokens))
            reason = _refused_tokens(experience, version, max_staleness, max_length)
            if reason is None:
                kept.append(experience)
                continue
        refused[reason] += 1
    return AdmittedBatch(tuple(kept), dict(sorted(refused.items())))


def _refused_record(record: EpisodeRecord) -> str | None:
    if record.quarantine is not None:
        return record.quarantine.value
    if record.outcome is Outcome.infra_failed:
        return Outcome.infra_failed.value
    return "teacher_sampled" if record.sampled_by != "policy" else None


def _refused_tokens(experience: Experience, version: int, max_staleness: int, max_length: int) -> str | None:
    if not experience.sequences:
        return "no_policy_tokens"
    versions = np.concatenate([s.versions[s.mask] for s in experience.sequences])
    if versions.min() < 0 or versions.max() > version:
        return "foreign_version"
    if version - versions.min() > max_staleness:
        return "stale"
    return "too_long" if max(len(s) for s in experience.sequences) > max_length else None


def batch_metrics(records: Sequence[EpisodeRecord], batch: AdmittedBatch, version: int) -> dict[str, float]:
    """Figures of one batch that no gradient is needed for.

    Means are over admitted episodes, each counted once; without any they are left out, for they are not zero.
    """
    kept = [e.record for e in batch.experiences]
    failed = sum(r.outcome is Outcome.infra_failed for r in records)
    values: dict[str, list[float]] = {
        "reward": [r.reward for r in kept],
        "success": [float(r.success) for r in kept],
        "steps": [r.steps for r in kept],
        "tool_calls": [r.tool_calls for r in kept],
        "failed_calls": [r.failed_calls for r in kept],
        "segments": [len(e.sequences) for e in batch.experiences],
        "tokens_per_episode": [e.policy_tokens for e in batch.experiences],
        "staleness": [version - r.version_min for r in kept],
    }
    counts = {
        "episodes": float(len(records)),
        "admitted": float(len(kept)),
        "tokens": float(batch.policy_tokens),
        "infra_failed_rate": failed / max(len(records), 1),
    }
    means = {name: float(np.mean(x)) for name, x in values.items() if x}
    return counts | means | {f"refused_{reason}": float(n) for reason, n in batch.refused.items()}
