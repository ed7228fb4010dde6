"""One recorded turn: what was new in its prompt, what was sampled, and how it hangs together with the turn before."""

from __future__ import annotations

from array import array
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
    """One attempt at one turn. Attempts of the same turn share everything up to `attempt`.

    With all turns before it, it holds what a recorder needs to go on.
    """

    run: str
    """"root", or the id of a branch, subagent, auxiliary or stray run."""
    role: str
    """Part of the URL it came in by: "root", "sub" or "aux…"."""
    summary: bool
    """Whether its run writes a declared summary, which trains as the root run does."""
    segment: int
    """Place of the segment in the run; a later one has a greater number."""
    ordinal: int
    """Position of the turn in the episode, in order of arrival, from 0."""
    repeats: int
    """How many turns before it asked for the same history."""
    continues: int
    """Attempt of the run's turn before that this turn's history holds; -1 if it holds none."""
    parent: tuple[int, int] | None
    """Ordinal and attempt of the turn of another run that this one goes on from: from its ids, unless a change of tools
    had the prompt rendered anew."""
    opened_by: str
    """In a segment's first turn: "start", a rewrite kind, "tool_change", "branch" or "unexplained"; else empty."""
    delta: array[int]
    """New non-policy ids: the whole prompt in a segment's first turn, else (closing token and) D."""
    prompt_tokens: int
    """Length of P_t."""
    tools: bytes
    """Digest of the tool list."""
    heard: bytes
    """Fingerprints of the request's new messages, 32 bytes each: all of them in a segment's first turn."""
    attempt: int
    """0 for the first request, n for its nth retry."""
    overlaps: bool
    """Whether another attempt at the turn was under way when this one was asked for."""
    prefix: Prefix
    """Class of the request that made this attempt."""
    cached_tokens: int
    """Leading ids of P_t that were in the previous prompt plus answer."""
    temperature: float
    """Asked for. The log-probs are of the distribution scaled by it; at 0 they are those of temperature 1."""
    top_p: float
    """Asked for. The log-probs are of the whole distribution, whatever it leaves out."""
    output: array[int]
    """Sampled ids Y_t, stop token included, or the token that completes a stop string."""
    logprobs: array[float]
    """Behaviour log-prob per id of `output`, float32; all 0 if a teacher wrote it."""
    versions: array[int]
    """Weight version per id of `output`, -1 for a teacher."""
    finish: str
    """"stop" or "length"; "stop" also when the last id that was asked for completed a stop string."""
    said: bytes
    """JSON of the assistant message that was handed out; it ends before a stop string."""

    @property
    def version(self) -> int:
        """Weight version of the last sampled id, -1 for a teacher or an empty answer."""
        return self.versions[-1] if self.versions else -1


@dataclass(frozen=True, slots=True)
class Exchange:
    """Facts about the HTTP call behind a turn, for audit."""

    request_digest: str
    """sha256 of the raw body."""
    history_digest: str
    """Last link of the hash chain over the canonical messages."""
    sampling: str
    """JSON of the other sampling parameters: how long, from which seed, and what ends it."""
    engine_cached_tokens: int
    """Prompt tokens that the engine says it took from its own cache."""
    seconds: float
    """From request parsed to answer ready."""
