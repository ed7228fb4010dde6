"""Readable transcripts: the recorded tokens of a segment, message by message, split by where each came from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from occamy.contracts.episode import Segment

_ROLE = re.compile(r"^<\|?[a-z_]+\|?>$")
_NO_ROLES = {
    *("<end>", "<|im_end|>", "</s>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<s>", "<pad>", "<unk>", "<|begin_of_text|>", "<|python_tag|>"),
}
_NAMED = {"<|im_start|>": "\n", "<|start_header_id|>": "<|end_header_id|>"}
"""Tokens after which the role follows as text, and what ends it."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one origin."""

    origin: int
    """Code of `Origin`."""
    text: str
    tokens: int
    trained: int
    """Training targets among them."""
    versions: tuple[int, ...]
    """Weight versions that sampled them, ascending; empty for a teacher and for what was not sampled."""
    mean_logprob: float
    """Mean over the tokens, 0 for a teacher and for what was not sampled."""
    min_logprob: float


@dataclass(frozen=True)
class Message:
    """One message: its role and its pieces."""

    role: str
    pieces: list[Piece]


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


def read_messages(reader: Reader, segment: Segment, limit: int | None = None) -> list[Message]:
    """Split the first `limit` tokens of a segment at those that open a role; the role becomes the message's label."""
    stop = len(segment.tokens) if limit is None else min(limit, len(segment.tokens))
    opened = list(_openings(reader, segment.tokens[:stop].tolist()))
    messages = []
    for (role, _, start), (_, end, _) in zip([("", 0, 0), *opened], [*opened, ("", stop, stop)], strict=True):
        pieces = _pieces(reader, segment, start, end)
        if pieces or role:
            messages.append(Message(role, pieces))
    return messages


def _openings(reader: Reader, ids: list[int]) -> Iterator[tuple[str, int, int]]:
    """(role, where its marker begins, where its content begins) of each message."""
    at = 0
    while at < len(ids):
        word, begin = reader.token(ids[at]), at
        at += 1
        if word in _NAMED:
            name = ""
            while at < len(ids) and _NAMED[word] not in name:
                name += reader.text([ids[at]])
                at += 1
            yield name.removesuffix(_NAMED[word]).strip(), begin, at
        elif _ROLE.match(word) and word not in _NO_ROLES:
            yield word.strip("<|>"), begin, at


def _pieces(reader: Reader, segment: Segment, start: int, stop: int) -> list[Piece]:
    pieces = []
    for origin, group in groupby(range(start, stop), key=lambda i: int(segment.origin[i])):
        where = np.fromiter(group, np.int64)
        versions, logprobs = segment.versions[where], segment.logprobs[where]
        pieces.append(
            Piece(
                origin=origin,
                text=reader.text(segment.tokens[where].tolist()),
                tokens=len(where),
                trained=int(segment.mask[where].sum()),
                versions=tuple(np.unique(versions[versions >= 0]).tolist()),
                mean_logprob=float(logprobs.mean()),
                min_logprob=float(logprobs.min()),
            )
        )
    return pieces
