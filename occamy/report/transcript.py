"""Transcripts on the page: the recorded tokens of an episode, line by line, coloured by where each came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from occamy.capture import transcript
from occamy.capture.sealed import Sealed
from occamy.capture.transcript import Reader, read_messages
from occamy.contracts.episode import EpisodeRecord, Origin, Segment

ORIGINS = {
    Origin.SAMPLED: ("sampled", "written by the policy (trained on)"),
    Origin.OBSERVED: ("observed", "tool results and messages"),
    Origin.INHERITED: ("inherited", "prompt, or history carried into a segment"),
    Origin.SUBAGENT: ("subagent", "written by a subagent"),
}
"""Origin code -> (CSS class, words for the legend)."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one origin."""

    css: str
    text: str
    title: str
    """What to say on hovering: origin, number of tokens, weight version, mean log-prob."""


@dataclass(frozen=True)
class Line:
    """One message: its role and its pieces."""

    role: str
    pieces: list[Piece]


@dataclass(frozen=True)
class SegmentView:
    """One segment, ready to show."""

    number: int
    closed_by: str
    tokens: int
    sampled: int
    lines: list[Line]


def segment_views(reader: Reader, segments: Sequence[Segment], limit: int = 4000) -> list[SegmentView]:
    """Views of an episode's root segments in order, each cut after `limit` tokens."""
    root = sorted((s for s in segments if s.run == "root"), key=lambda s: s.index)
    return [
        SegmentView(
            s.index + 1, s.closed_by.replace("_", " "), len(s.tokens), int(s.mask.sum()), _lines(reader, s, limit)
        )
        for s in root
    ]


def pick(sealed: Sealed) -> list[EpisodeRecord]:
    """Up to two episodes worth reading: a long one, with several segments if there is one, and a short one.

    Solved ones come first, then the ones with the most steps of the long pool and the fewest of the short.
    """
    kept = [r for r in sealed.records if r.quarantine is None]
    long = sorted(
        (r for r in kept if r.pool == "long"), key=lambda r: (-(r.segments > 1), -r.success, -r.steps, r.episode_id)
    )
    short = sorted((r for r in kept if r.pool == "short"), key=lambda r: (-r.success, r.steps, r.episode_id))
    return [*long[:1], *short[:1]]


def _lines(reader: Reader, segment: Segment, limit: int) -> list[Line]:
    messages = read_messages(reader, segment, limit)
    return [Line(m.role, [Piece(ORIGINS[p.origin][0], p.text, _title(p)) for p in m.pieces]) for m in messages]


def _title(piece: transcript.Piece) -> str:
    title = f"{ORIGINS[piece.origin][1]}; {piece.tokens} tokens"
    if piece.origin == Origin.SAMPLED:
        version = piece.versions[0] if piece.versions else -1
        title += f"; weight version {version}; mean log-prob {piece.mean_logprob:.2f}"
    return title
