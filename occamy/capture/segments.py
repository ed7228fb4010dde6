"""Turns to segments: every sampled token of the used attempts once, in order, and nothing else a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from occamy.capture.lines import settle
from occamy.capture.runs import ROOT
from occamy.capture.turn import Turn
from occamy.contracts.episode import Origin, QuarantineReason, Segment

Chain = list[Turn]
"""The used attempt of each turn of a segment."""


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
    """Weight version of its last sampled token, -1 for a teacher."""


@dataclass(frozen=True)
class CapturedEpisode:
    """What the proxy knows of a closed episode."""

    episode_id: str
    segments: list[Segment]
    """The root run's first, then the other runs in order of opening."""
    turns: list[TurnUsage]
    """In order of arrival and attempt."""
    quarantine: QuarantineReason | None


def capture_episode(
    episode_id: str, sampled_by: str, turns: Sequence[Turn], quarantine: QuarantineReason | None
) -> CapturedEpisode:
    """Assemble a closed episode from its recorded turns; one whose used answers cannot be told is quarantined."""
    settled = settle(turns)
    if quarantine is None and _is_contested(settled):
        quarantine = QuarantineReason.ambiguous_answer
    usage = [
        TurnUsage(
            t.run, t.ordinal, t.attempt, t.prefix, t.prompt_tokens, t.cached_tokens, len(t.output), t.finish, t.version
        )
        for t in settled
    ]
    return CapturedEpisode(episode_id, build_segments(episode_id, sampled_by, turns), usage, quarantine)


def _is_contested(settled: Sequence[Turn]) -> bool:
    """True if nobody can tell which answer of a turn trains: it was asked for while it was being answered, the answers
    differ, and no later request holds one of them."""
    runs: dict[str, dict[int, list[Turn]]] = {}
    for turn in settled:
        if turn.run == ROOT or turn.summary:
            runs.setdefault(turn.run, {}).setdefault(turn.ordinal, []).append(turn)
    for turns in runs.values():
        rows = list(turns.values())
        for attempts, continued in zip(rows, [*(after[0].continues for after in rows[1:]), -1], strict=True):
            differ = len({t.output.tobytes() for t in attempts}) > 1
            if continued < 0 and differ and any(t.overlaps for t in attempts):
                return True
    return False


def build_segments(episode_id: str, sampled_by: str, turns: Sequence[Turn]) -> list[Segment]:
    """Build the segments of all runs from recorded attempts, in any order.

    Of each turn only the attempt that the next turn continues is used, the latest if none does. The first prompt of a
    segment is inherited; ids appended later are observed. Training targets are what was sampled in the root run and
    in runs that write declared summaries. An attempt that only a fork goes on from is sampled there.
    """
    runs: dict[str, dict[int, list[Turn]]] = {}
    for turn in sorted(settle(turns), key=lambda t: t.run != ROOT):
        runs.setdefault(turn.run, {}).setdefault(turn.segment, []).append(turn)
    chains = {run: _chains(list(by_segment.values())) for run, by_segment in runs.items()}
    spare = {(t.ordinal, t.attempt): t for t in turns}
    for turn in (t for own in chains.values() for chain in own for t in chain):
        del spare[turn.ordinal, turn.attempt]
    built = []
    for run, own in chains.items():
        ends = [later[0].opened_by for later in own[1:]] + ["end"]
        for index, (chain, closed_by) in enumerate(zip(own, ends, strict=True)):
            built.append(_segment(episode_id, run, index, closed_by, sampled_by, chain, spare))
    return built


def _chains(segments: Sequence[Sequence[Turn]]) -> list[Chain]:
    """Return one attempt per turn, segment by segment; the attempts are given by ordinal and attempt."""
    rows: list[dict[int, Turn]] = []
    for turn in (t for attempts in segments for t in attempts):
        if not rows or next(iter(rows[-1].values())).ordinal != turn.ordinal:
            rows.append({})
        rows[-1][turn.attempt] = turn
    used = [_used(now, next(iter(after.values())).continues) for now, after in pairwise(rows)]
    used.append(_used(rows[-1], -1))
    chains: list[Chain] = []
    for turn in used:
        if turn.opened_by or not chains:
            chains.append([])
        chains[-1].append(turn)
    return chains


def _used(attempts: Mapping[int, Turn], continued: int) -> Turn:
    return attempts[max(attempts) if continued < 0 else continued]


def _segment(
    episode_id: str,
    run: str,
    index: int,
    closed_by: str,
    sampled_by: str,
    chain: Chain,
    spare: dict[tuple[int, int], Turn],
) -> Segment:
    trains = run == ROOT or chain[0].summary
    size = sum(len(t.delta) + len(t.output) for t in chain)
    tokens, logprobs = np.empty(size, np.int32), np.zeros(size, np.float32)
    versions, origin = np.full(size, -1, np.int32), np.empty(size, np.int8)

    def fill(at: int, turn: Turn, kind: int) -> int:
        end = at + len(turn.output)
        tokens[at:end], logprobs[at:end], versions[at:end], origin[at:end] = (
            turn.output, turn.logprobs, turn.versions, kind
        )  # fmt: skip
        return end

    at = 0
    for i, turn in enumerate(chain):
        end = at + len(turn.delta)
        tokens[at:end], origin[at:end] = turn.delta, Origin.OBSERVED if i else Origin.INHERITED
        if turn.parent in spare and turn.opened_by != "tool_change":
            before = spare.pop(turn.parent)
            fill(before.prompt_tokens, before, Origin.SUBAGENT)
        at = fill(end, turn, Origin.SAMPLED if trains else Origin.SUBAGENT)
    mask = origin == Origin.SAMPLED
    return Segment(episode_id, run, index, closed_by, sampled_by, tokens, mask, logprobs, versions, origin)
