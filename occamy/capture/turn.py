"""One recorded turn: what was new in its prompt, what was sampled, and how it hangs together with the turn before."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Prefix(StrEnum):
    """How a request relates to what was recorded before it."""

    start = "start"
    continued = "continue"
    retry = "retry"
    rewrite = "declared_rewrite"
    branch = "branch"
    auxiliary = "auxiliary"
    unexplained = "unexplained"


@dataclass(frozen=True, slots=True)
class Turn:
    """One attempt at one turn. Attempts of the same turn share everything up to `attempt`."""

    run: str
    """"root", or the id of a branch, subagent, auxiliary or stray run."""
    segment: int
    """Position of the segment in the run, from 0."""
    ordinal: int
    """Position of the turn in the episode, in order of arrival, from 0."""
    attempt: int
    """0 for the first request, n for its nth retry."""
    continues: int
    """Attempt of the previous turn in the segment that this turn's history holds; -1 in a segment's first turn."""
    prefix: Prefix
    """Class of the request that made this attempt."""
    opened_by: str
    """In a segment's first turn: "start", a rewrite kind, "branch" or "unexplained"; else empty."""
    delta: list[int]
    """New non-policy ids: the whole prompt in a segment's first turn, else (closing token and) D."""
    prompt_tokens: int
    """Length of P_t."""
    cached_tokens: int
    """Leading ids of P_t that were in the previous prompt plus answer."""
    output: list[int]
    """Sampled ids Y_t, stop token included."""
    logprobs: list[float]
    """Behaviour log-prob per id of `output`; all 0 if a teacher wrote it."""
    version: int
    """Weight version that sampled it, -1 for a teacher."""
    finish: str
    """"stop" or "length"."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Facts about the HTTP call behind a turn, for audit."""

    request_digest: str
    """sha256 of the raw body."""
    history_digest: str
    """Last link of the canonical hash chain, tools and role included."""
    sampling: str
    """JSON of the sampling parameters."""
    engine_cached_tokens: int
    """Prompt tokens that the engine says it took from its own cache."""
    seconds: float
    """From request parsed to answer ready."""
