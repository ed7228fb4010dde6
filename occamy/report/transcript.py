"""Readable transcripts: the recorded tokens of an episode, line by line, coloured by where each came from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from occamy.capture.sealed import Sealed
from occamy.contracts.episode import EpisodeRecord, Origin, Segment

ORIGINS = {
    Origin.SAMPLED: ("sampled", "written by the policy (trained on)"),
    Origin.OBSERVED: ("observed", "tool results and messages"),
    Origin.INHERITED: ("inherited", "prompt, or history carried into a segment"),
    Origin.SUBAGENT: ("subagent", "written by a subagent"),
}
"""Origin code -> (CSS class, words for the legend)."""
_ROLE = re.compile(r"^<\|?[a-z_]+\|?>$")
_CLOSERS = {"<end>", "<|im_end|>", "</s>", "<|endoftext|>"}


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


class Reader:
    """Turns token ids into text with a tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        self._words = isinstance(self._tokenizer.model, WordLevel)

    def token(self, id_: int) -> str:
        """Text of one token as it stands in the vocabulary; unknown ids show as <id>."""
        return self._tokenizer.id_to_token(id_) or f"<{id_}>"

    def text(self, ids: Sequence[int]) -> str:
        """Text of consecutive tokens. A word-level vocabulary drops spaces; they come back between words."""
        if not self._words:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        joined = ""
        for token in map(self.token, ids):
            gap = " " if joined and joined[-1].isalnum() and token[:1].isalnum() else ""
            joined += gap + token
        return joined


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
    """Split at tokens that open a role; the role token itself becomes the line's label."""
    lines: list[Line] = []
    role, start = "", 0
    tokens = segment.tokens[:limit]
    for position, id_ in enumerate([*tokens.tolist(), None]):
        word = reader.token(id_) if id_ is not None else None
        if word is None or (_ROLE.match(word) and word not in _CLOSERS):
            pieces = _pieces(reader, segment, start, position)
            if pieces or role:
                lines.append(Line(role, pieces))
            role, start = (word or "").strip("<|>"), position + 1
    return lines


def _pieces(reader: Reader, segment: Segment, start: int, stop: int) -> list[Piece]:
    pieces = []
    for origin, group in groupby(range(start, stop), key=lambda i: int(segment.origin[i])):
        where = list(group)
        css, words = ORIGINS[origin]
        title = f"{words}; {len(where)} tokens"
        if origin == Origin.SAMPLED:
            version = int(segment.versions[where[0]])
            sure = float(np.mean(segment.logprobs[where]))
            title += f"; weight version {version}; mean log-prob {sure:.2f}"
        text = reader.text([int(segment.tokens[i]) for i in where])
        pieces.append(Piece(css, text, title))
    return pieces
