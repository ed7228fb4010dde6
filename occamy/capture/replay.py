"""Token replay: segments against the turns they were made of, and their log-probs against an engine's, teacher-forced.

Every finding is typed and says where it lies; no finding means that every sampled token is accounted for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby

import numpy as np

from occamy.capture.ledger import LedgerTurn
from occamy.capture.runs import ROOT
from occamy.contracts.episode import EpisodeRecord, Origin, QuarantineReason, Segment
from occamy.engines.client import EngineClient, EngineError

TOLERANCE = 1e-3
"""Nats. Our choice for float32: a log-prob moves by about 1e-5 with what an engine computes beside it, and 1e-3 changes
an importance ratio by 0.1 %. Engines in bfloat16 need about 0.05."""
_IN_FLIGHT = 16
Chain = list[list[LedgerTurn]]
"""The turns of a segment, each with its attempts."""
_SAMPLED = (Origin.SAMPLED, Origin.SUBAGENT)


class Change(StrEnum):
    """What a finding says is not as it was recorded."""

    token = "token"
    logprob = "logprob"
    mask = "mask"
    origin = "origin"
    weight_version = "weight_version"
    missing_turn = "missing_turn"
    total = "total"


_REASONS = {
    Change.token: QuarantineReason.token_mismatch,
    Change.logprob: QuarantineReason.token_mismatch,
    Change.mask: QuarantineReason.token_mismatch,
    Change.origin: QuarantineReason.token_mismatch,
    Change.weight_version: QuarantineReason.mixed_weight_versions,
    Change.missing_turn: QuarantineReason.incomplete_capture,
    Change.total: QuarantineReason.incomplete_capture,
}


@dataclass(frozen=True)
class TokenFinding:
    """One thing that is not as it was recorded."""

    kind: Change
    episode_id: str
    run: str
    segment: int
    turn: int
    """Turn of the segment, from 0; -1 when it concerns the whole episode."""
    position: int
    """First token of the segment that it concerns; -1 when it concerns the whole episode."""
    recorded: float | str
    replayed: float | str
    count: int = 1
    """Positions of the turn that differ."""
    note: str = ""

    @property
    def reason(self) -> QuarantineReason:
        """Why an episode with this finding may not train."""
        return _REASONS[self.kind]

    def __str__(self) -> str:
        where = f", run {self.run}, segment {self.segment}" if self.run else ""
        where += f", turn {self.turn}, position {self.position}" if self.turn >= 0 else ""
        more = f" (and {self.count - 1} more in this turn)" if self.count > 1 else ""
        text = f"{self.kind.value.replace('_', ' ')}: recorded {_shown(self.recorded)}, found {_shown(self.replayed)}"
        return f"episode {self.episode_id}{where}: {text}{more}" + (f"; {self.note}" if self.note else "")


def check_capture(
    record: EpisodeRecord, segments: Sequence[Segment], turns: Sequence[LedgerTurn]
) -> list[TokenFinding]:
    """Compare segments with the turns they were made of, and both with the totals of the record.

    Each segment must be, turn by turn, new prompt tokens and then what one recorded attempt sampled, with that
    attempt's log-probs and versions, with the origin of each, and no target beside it.
    """
    findings = [*_totals(record, segments, turns)]
    answered = {(t.ordinal, t.attempt): t for t in turns}
    chains = _chains(turns)
    for segment in segments:
        findings += _compare(segment, chains.pop((segment.run, segment.index), []), answered)
    for (run, index), chain in chains.items():
        place = (record.episode_id, run, index, 0, 0)
        findings.append(TokenFinding(Change.missing_turn, *place, f"turn {chain[0][0].ordinal}", "nothing"))
    return findings


def _chains(turns: Sequence[LedgerTurn]) -> dict[tuple[str, int], Chain]:
    """(run, index of segment) -> the turns of that segment."""
    chains: dict[tuple[str, int], Chain] = {}
    ordered = sorted(turns, key=lambda t: (t.run, t.ordinal, t.attempt))
    for run, own in groupby(ordered, key=lambda t: t.run):
        index = -1
        for _, group in groupby(own, key=lambda t: t.ordinal):
            attempts = list(group)
            index += bool(attempts[0].opened_by) or index < 0
            chains.setdefault((run, index), []).append(attempts)
    return chains


def _totals(record: EpisodeRecord, segments: Sequence[Segment], turns: Sequence[LedgerTurn]) -> Iterator[TokenFinding]:
    known = np.concatenate([s.versions[s.versions >= 0] for s in segments] or [np.empty(0, np.int32)])
    pairs: list[tuple[Change, str, int, int]] = [
        (Change.total, "segments", record.segments, len(segments)),
        (Change.total, "prompt tokens", record.input_tokens, sum(t.prompt_tokens for t in turns)),
        (Change.total, "sampled tokens", record.output_tokens, sum(len(t.output) for t in turns)),
        (Change.weight_version, "oldest version", record.version_min, int(known.min()) if known.size else -1),
        (Change.weight_version, "newest version", record.version_max, int(known.max()) if known.size else -1),
    ]
    for kind, name, recorded, found in pairs:
        if recorded != found:
            yield TokenFinding(kind, record.episode_id, "", -1, -1, -1, recorded, found, note=name)
    if others := {s.sampled_by for s in segments} - {record.sampled_by}:
        place = (record.episode_id, "", -1, -1, -1)
        yield TokenFinding(Change.total, *place, record.sampled_by, min(others), note="sampled by")
    heard = {t.ordinal for t in turns if t.run == ROOT or t.run.startswith("branch")}
    if (answered := len(heard)) < record.steps:
        place = (record.episode_id, ROOT, -1, -1, -1)
        yield TokenFinding(Change.missing_turn, *place, record.steps, answered, note="turns of the root run")


def _compare(segment: Segment, chain: Chain, answered: Mapping[tuple[int, int], LedgerTurn]) -> Iterator[TokenFinding]:
    """Walk a segment along its turns."""
    at, whole = 0, _lengths(chain)
    for turn, attempts in enumerate(chain):
        first, used = attempts[0], _used(segment, attempts)
        begin, end = first.prompt_tokens - len(first.delta), first.prompt_tokens + len(used.output)
        if begin != at:
            yield _finding(Change.missing_turn, segment, turn, at, f"{begin} tokens before", f"{at} tokens before")
            return
        tokens = np.concatenate([first.delta, used.output])
        if len(segment.tokens) not in whole and not np.array_equal(segment.tokens[at:end], tokens):
            note = f"{len(segment.tokens)} tokens in all, {min(whole)} recorded"
            yield _finding(Change.missing_turn, segment, turn, at, f"turn {first.ordinal}", "other tokens", note=note)
            return
        yield from _differing(Change.token, segment, turn, at, tokens, segment.tokens[at:end])
        parent = answered.get((first.parent_ordinal, first.parent_attempt))
        origin, logprobs, versions = _expected(segment, turn, used, parent)
        yield from _differing(Change.origin, segment, turn, at, origin, segment.origin[at:end])
        yield from _differing(Change.mask, segment, turn, at, origin == Origin.SAMPLED, segment.mask[at:end])
        yield from _differing(Change.logprob, segment, turn, at, logprobs, segment.logprobs[at:end])
        yield from _differing(Change.weight_version, segment, turn, at, versions, segment.versions[at:end])
        at = end
    if at != len(segment.tokens):
        left = f"{len(segment.tokens) - at} tokens more"
        yield _finding(Change.missing_turn, segment, len(chain), at, "nothing", left, note="no turn of the record")


def _expected(
    segment: Segment, turn: int, used: LedgerTurn, parent: LedgerTurn | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Origin, log-probs and versions that a turn leaves in its segment, prompt first.

    A fork holds those of the answer that it goes on from when no other segment does.
    """
    new, size = len(used.delta), len(used.delta) + len(used.output)
    origin = np.full(size, Origin.OBSERVED if turn else Origin.INHERITED, np.int8)
    logprobs, versions = np.zeros(size, np.float32), np.full(size, -1, np.int32)
    origin[new:] = Origin.SAMPLED if used.trains else Origin.SUBAGENT
    logprobs[new:], versions[new:] = used.logprobs, used.versions
    if parent is not None:
        own = slice(parent.prompt_tokens, parent.prompt_tokens + len(parent.output))
        if used.opened_by != "tool_change" and (segment.origin[own] == Origin.SUBAGENT).all():
            origin[own], logprobs[own], versions[own] = Origin.SUBAGENT, parent.logprobs, parent.versions
    return origin, logprobs, versions


def _lengths(chain: Chain) -> set[int]:
    """Lengths that a complete segment can have: it ends with any attempt at its last turn."""
    return {t.prompt_tokens + len(t.output) for t in chain[-1]} if chain else {0}


def _used(segment: Segment, attempts: list[LedgerTurn]) -> LedgerTurn:
    """The attempt that the segment holds, of several with the same tokens the one whose log-probs and versions it has;
    the last one when it holds none."""
    held, same = [], []
    for attempt in attempts:
        own = slice(attempt.prompt_tokens, attempt.prompt_tokens + len(attempt.output))
        if np.array_equal(segment.tokens[own], attempt.output):
            held.append(attempt)
            scored = np.array_equal(segment.logprobs[own], attempt.logprobs)
            same += [attempt] if scored and np.array_equal(segment.versions[own], attempt.versions) else []
    return (same or held or attempts)[-1]


def _differing(
    kind: Change, segment: Segment, turn: int, at: int, recorded: np.ndarray, found: np.ndarray
) -> Iterator[TokenFinding]:
    if np.array_equal(recorded, found):
        return
    shared = min(len(recorded), len(found))
    where = np.flatnonzero(recorded[:shared] != found[:shared])
    if len(where):
        i = int(where[0])
        yield _finding(kind, segment, turn, at + i, recorded[i].item(), found[i].item(), count=len(where))


def _finding(
    kind: Change,
    segment: Segment,
    turn: int,
    position: int,
    recorded: float | str,
    found: float | str,
    *,
    count: int = 1,
    note: str = "",
) -> TokenFinding:
    place = (segment.episode_id, segment.run, segment.index, turn, position)
    return TokenFinding(kind, *place, recorded, found, count, note)


def comparable(segments: Sequence[Segment], turns: Sequence[LedgerTurn]) -> list[Segment]:
    """Return segments with those targets alone whose log-probs a teacher-forced pass gives again.

    Engines score given tokens at temperature 1; what they report of a sampled one is of the distribution scaled by its
    temperature, whose constant such a pass does not tell. So targets sampled at another temperature than 1 are left
    out; at 0 an engine reports temperature 1. Top-p plays no part: log-probs are of the whole distribution.
    """
    chains, left = _chains(turns), []
    for segment in segments:
        mask = segment.mask.copy()
        for attempts in chains.get((segment.run, segment.index), []):
            used = _used(segment, attempts)
            if used.temperature not in (0.0, 1.0):
                mask[used.prompt_tokens : used.prompt_tokens + len(used.output)] = False
        left.append(replace(segment, mask=mask))
    return left


def compare_logprobs(segment: Segment, scored: np.ndarray, *, version: int, tolerance: float) -> list[TokenFinding]:
    """Compare the recorded log-probs of one weight version with an engine's, one finding for each turn that differs.

    `scored` [n] holds log p(token_i | tokens before it); what is not finite counts as different. Differing in more
    than half of its targets means other weights: then the one finding is of kind weight_version.
    """
    targets = np.flatnonzero(segment.mask & (segment.versions == version))
    difference = np.abs(scored[targets].astype(np.float64) - segment.logprobs[targets])
    wrong = targets[~(difference <= tolerance)]
    if not len(wrong):
        return []
    turn = turns_of(segment.origin)
    first = int(wrong[0])
    if len(targets) > 1 and len(wrong) > len(targets) / 2:
        worst = float(np.nanmax(np.nan_to_num(difference, nan=np.inf)))
        note = f"{len(wrong)} of {len(targets)} log-probs differ, by up to {worst:.3g} nats"
        kind = Change.weight_version
        return [_finding(kind, segment, int(turn[first]), first, version, "other weights", note=note)]
    found = []
    for own, group in groupby(wrong.tolist(), key=lambda i: int(turn[i])):
        where = list(group)
        values = float(segment.logprobs[where[0]]), float(scored[where[0]])
        found.append(_finding(Change.logprob, segment, own, where[0], *values, count=len(where)))
    return found


def turns_of(origin: np.ndarray) -> np.ndarray:
    """Turn of the segment [n] that each token belongs to, prompt tokens to the turn that they are new in."""
    sampled = np.isin(origin, _SAMPLED)
    ends = np.flatnonzero(sampled[:-1] & ~sampled[1:])
    marks = np.zeros(len(origin), np.int64)
    marks[ends + 1] = 1
    turns: np.ndarray = np.cumsum(marks)
    return turns


async def replay_tokens(
    client: EngineClient, segments: Sequence[Segment], *, version: int, tolerance: float = TOLERANCE
) -> list[TokenFinding]:
    """Feed every segment with targets of `version` to an engine and compare log-probs, which must be of temperature 1
    (see `comparable`).

    Findings of kind weight_version come also when the engine says that it holds another version. Raises EngineError.
    """
    slots = asyncio.Semaphore(_IN_FLIGHT)

    async def one(segment: Segment) -> list[TokenFinding]:
        targets = np.flatnonzero(segment.mask & (segment.versions == version))
        if not len(targets):
            return []
        async with slots:
            scored, served = await _score(client, segment, int(targets[0]) - 1)
        if served != version:
            turn = int(turns_of(segment.origin)[targets[0]])
            return [_finding(Change.weight_version, segment, turn, int(targets[0]), version, served)]
        return compare_logprobs(segment, scored, version=version, tolerance=tolerance)

    results = await asyncio.gather(*(one(s) for s in segments))
    return [finding for found in results for finding in found]


async def _score(client: EngineClient, segment: Segment, start: int) -> tuple[np.ndarray, int]:
    """Log-probs [n] of a segment's tokens after `start`, and the version that the engine holds.

    An engine refuses an input that fills its context; the last token of such a segment is taken as recorded.
    """
    scored = segment.logprobs.astype(np.float64)
    try:
        answer = await client.score(segment.tokens, start)
    except EngineError as e:
        if e.kind != "rejected":
            raise
        answer = await client.score(segment.tokens[:-1], start)
    values = [np.nan if value is None else value for value in answer.logprobs]
    scored[start : start + len(values)] = values
    return scored, answer.weight_version


def _shown(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
