"""What one attempt leaves behind: the episode record and its token segments."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np

from occamy.contracts.outcome import Outcome as Outcome
from occamy.contracts.record import Record


class QuarantineReason(StrEnum):
    """Closed list of reasons why an episode may not train or score."""

    unexplained_prefix = "unexplained_prefix"
    token_mismatch = "token_mismatch"
    state_drift = "state_drift"
    infra_failed = "infra_failed"
    mixed_weight_versions = "mixed_weight_versions"
    incomplete_capture = "incomplete_capture"
    ambiguous_answer = "ambiguous_answer"


class EpisodeRecord(Record):
    """One attempt at one task, after grading."""

    episode_id: str
    task_id: str
    task_digest: str
    pool: str
    split: str
    trial: int
    """Which of the k attempts at the task this is, from 0."""
    seed: int
    sampled_by: Literal["policy", "teacher"]
    outcome: Outcome
    score: float
    """Weighted share of goals met, 0 after a forbidden effect, in [0, 1]."""
    reward: float
    """R(e): the score if the episode completed, else 0."""
    success: bool
    steps: int
    """Policy turns of the root run, summary turns included."""
    tool_calls: int
    failed_calls: int
    """Tool calls that came back as a typed error."""
    segments: int
    input_tokens: int
    """Prompt tokens summed over turns, cached ones included."""
    cached_tokens: int
    """Prompt tokens that a prefix cache would have served: those already in the previous prompt plus answer."""
    output_tokens: int
    wall_seconds: float
    harness_digest: str
    final_fingerprint: str
    """World fingerprint after freeze."""
    model: str
    """Name of the candidate or checkpoint that sampled it."""
    version_min: int
    version_max: int
    """Oldest and newest weight version among sampled tokens (-1 for a teacher)."""
    quarantine: QuarantineReason | None = None
    error: str = ""


class Origin:
    """Where a token of a segment came from (int8 codes)."""

    INHERITED = 0  # prefix of the segment: prompt, or history that a rewrite carried over
    SAMPLED = 1  # sampled by the policy (or written by the teacher) in the root run, or as a declared summary
    SUBAGENT = 2  # sampled in any other run: a subagent's, a fork's, housekeeping
    OBSERVED = 3  # tool results, user messages and template tokens appended inside the segment


@dataclass(frozen=True)
class Segment:
    """A maximal append-only token history inside a run. All arrays have shape [n]."""

    episode_id: str
    run: str
    """"root", or the run id of a subagent, a fork or housekeeping."""
    index: int
    """Position among the run's segments, from 0."""
    closed_by: str
    """"end", "summary_replacement", "history_pruning" or "tool_change"."""
    sampled_by: str
    tokens: np.ndarray
    """int32 token ids."""
    mask: np.ndarray
    """bool, True where the token is a training target: sampled by the policy in the root run, or in a run that writes
    a declared summary."""
    logprobs: np.ndarray
    """float32 behaviour log-probs of the sampler, 0 where nothing was sampled or the teacher wrote."""
    versions: np.ndarray
    """int32 weight version per token, -1 where not sampled."""
    origin: np.ndarray
    """int8 codes of Origin."""
