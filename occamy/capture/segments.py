"""Turns to segments: every sampled token of the used attempts once, in order, and nothing else a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from occamy.capture.recorder import ROOT
from occamy.capture.request import REWRITES
from occamy.capture.turn import Turn
from occamy.contracts.episode import Origin, QuarantineReason, Segment


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """Tokens of one answered call, retries included."""

    run: str
    ordinal: int
    attempt: int
    prefix: str
    input_tokens: int
    """Length of P_t, cached ones included."""
    cached_tokens: int
    """Leading ids of P_t that were in the previous prompt plus answer."""
    output_tokens: int
    finish: str
    version: int
    """Weight version that sampled it, -1 for a teacher."""


@dataclass(frozen=True)
class CapturedEpisode:
    """What the proxy knows of a closed episode."""

    episode_id: str
    segments: list[Segment]
    """The root run's first, then the other runs in order of opening."""
    turns: list[TurnUsage]
    """In order of completion."""
    quarantine: QuarantineReason | None


def capture_episode(
    episode_id: str, sampled_by: str, turns: Sequence[Turn], quarantine: QuarantineReason | None
) -> CapturedEpisode:
    """Assemble a closed episode from its recorded turns."""
    usage = [
        TurnUsage(
            t.run, t.ordinal, t.attempt, t.prefix, t.prompt_tokens, t.cached_tokens, len(t.output), t.finish, t.version
        )
        for t in turns
    ]
    return CapturedEpisode(episode_id, build_segments(episode_id, sampled_by, turns), usage, quarantine)


def build_segments(episode_id: str, sampled_by: str, turns: Sequence[Turn]) -> list[Segment]:
    """Build the segments of all runs from recorded attempts, in any order.

    Of each turn only the attempt that the next turn continues is used, the latest if none does. The first prompt of a
    segment is inherited; ids appended later are observed. Only the root run has training targets.
    """
    runs: dict[str, dict[int, list[Turn]]] = {}
    for turn in sorted(turns, key=lambda t: (t.run != ROOT, t.ordinal, t.attempt)):
        runs.setdefault(turn.run, {}).setdefault(turn.segment, []).append(turn)
    built = []
    for run, by_segment in runs.items():
        chains = [_used(by_segment[s]) for s in sorted(by_segment)]
        ends = [later[0].opened_by for later in chains[1:]] + ["end"]
        for index, (chain, opened_next) in enumerate(zip(chains, ends, strict=True)):
            closed_by = opened_next if opened_next in REWRITES else "end"
            built.append(_segment(episode_id, run, index, closed_by, sampled_by, chain))
    return built


def _used(attempts: list[Turn]) -> list[Turn]:
    """Return one attempt per turn of a segment; `attempts` is sorted by ordinal and attempt."""
    by_ordinal: dict[int, dict[int, Turn]] = {}
    for turn in attempts:
        by_ordinal.setdefault(turn.ordinal, {})[turn.attempt] = turn
    rows = list(by_ordinal.values())
    chosen = [now[next(iter(after.values())).continues] for now, after in pairwise(rows)]
    return [*chosen, rows[-1][max(rows[-1])]]


def _segment(episode_id: str, run: str, index: int, closed_by: str, sampled_by: str, chain: list[Turn]) -> Segment:
    sampled = Origin.SAMPLED if run == ROOT else Origin.SUBAGENT
    size = sum(len(t.delta) + len(t.output) for t in chain)
    tokens, logprobs = np.empty(size, np.int32), np.zeros(size, np.float32)
    versions, origin = np.full(size, -1, np.int32), np.empty(size, np.int8)
    at = 0
    for i, turn in enumerate(chain):
        middle = at + len(turn.delta)
        end = middle + len(turn.output)
        tokens[at:middle], tokens[middle:end] = turn.delta, turn.output
        origin[at:middle] = Origin.OBSERVED if i else Origin.INHERITED
        origin[middle:end] = sampled
        versions[middle:end] = turn.version
        if run == ROOT:
            logprobs[middle:end] = turn.logprobs
        at = end
    mask = origin == Origin.SAMPLED
    return Segment(episode_id, run, index, closed_by, sampled_by, tokens, mask, logprobs, versions, origin)
