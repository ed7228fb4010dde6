"""Token replay: teacher-forced log-probs of a sealed segment against those recorded when it was sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from occamy.contracts.episode import Segment

Score = Callable[[list[int]], list[float]]
"""tokens [n] -> log p(token_i | tokens before it) [n], at the sampling temperature; the first entry is ignored."""


@dataclass(frozen=True)
class Replay:
    """Outcome of one comparison."""

    compared: int
    """Positions sampled under the replayed weight version."""
    worst: float
    """Largest absolute difference of log-probs, in nats."""
    position: int
    """Where in the segment the largest difference lies."""
    ok: bool


def replay_segment(segment: Segment, score: Score, *, version: int, tolerance: float) -> Replay:
    """Compare the recorded log-probs of one weight version with an engine's.

    `score` must come from an engine that holds `version`; `tolerance` is in nats. Raises ValueError when the segment
    has no target sampled under `version` (a teacher's never has), or when `score` returns another length.
    """
    positions = np.flatnonzero(segment.mask & (segment.versions == version))
    name = f"segment {segment.index} of run {segment.run}, episode {segment.episode_id}"
    if version < 0 or not len(positions):
        held = sorted(set(segment.versions[segment.mask].tolist()))
        raise ValueError(f"{name}: nothing was sampled under weight version {version}; it holds {held}")
    scored = score(segment.tokens.tolist())
    if len(scored) != len(segment.tokens):
        raise ValueError(f"{name}: {len(scored)} log-probs for {len(segment.tokens)} tokens; score every token")
    difference = np.abs(np.asarray(scored, np.float64)[positions] - segment.logprobs[positions])
    difference = np.where(np.isfinite(difference), difference, np.inf)
    worst = int(difference.argmax())
    return Replay(len(positions), float(difference[worst]), int(positions[worst]), bool(difference[worst] <= tolerance))
