"""Token histories that only ever grow: runs, their segments and steps, and the buffer of ids behind them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import orjson
from numpy.typing import NDArray

from occamy.capture.messages import PRINT

Ids = NDArray[np.int32]


class Tokens:
    """A growing array of token ids. Views of a prefix stay valid: growing never moves what they show."""

    def __init__(self, ids: Ids | Sequence[int] = ()) -> None:
        self._buffer: Ids = np.array(ids, np.int32)
        self._size = len(self._buffer)
        self._json, self._written = b"[]", 0

    def __len__(self) -> int:
        return self._size

    def view(self, size: int) -> Ids:
        """Return the first `size` ids, read-only, without a copy."""
        shown = self._buffer[:size]
        shown.flags.writeable = False
        return shown

    def json(self, size: int) -> bytes:
        """Return the first `size` ids as a JSON array. Writes only what follows those that were asked for last."""
        if size < self._written:
            self._json, self._written = b"[]", 0
        if size > self._written:
            new = orjson.dumps(self._buffer[self._written : size], option=orjson.OPT_SERIALIZE_NUMPY)
            comma = b"," if self._written else b""
            self._json = b"".join((memoryview(self._json)[:-1], comma, memoryview(new)[1:]))
            self._written = size
        return self._json

    def regrow(self, keep: int, *parts: Sequence[int]) -> None:
        """Keep the first `keep` ids and append the parts. Costs O(appended), amortised."""
        if keep < self._written:
            self._json, self._written = b"[]", 0
        size = keep + sum(map(len, parts))
        if size > len(self._buffer):
            grown = np.empty(max(size, 2 * len(self._buffer)), np.int32)
            grown[:keep] = self._buffer[:keep]
            self._buffer = grown
        for part in parts:
            self._buffer[keep : keep + len(part)] = part
            keep += len(part)
        self._size = size


@dataclass(frozen=True, slots=True)
class Attempt:
    """An answer to a step."""

    output: array[int]
    """Sampled ids."""
    fingerprint: bytes
    """Of the assistant message that was handed out."""


@dataclass(slots=True, eq=False)
class Step:
    """A turn under way or answered."""

    key: tuple[str, bytes, bytes]
    """Role, digest of the tools, last link of the hash chain over the messages: a request of this key repeats it."""
    repeats: int
    """How many steps before had the same key: rewrites may restore an early prompt."""
    segment: Segment = field(repr=False)
    ordinal: int
    prompt_tokens: int
    cached_tokens: int
    delta: array[int]
    continues: int
    parent: tuple[int, int] | None
    opened_by: str
    heard: bytes
    messages: int
    """Messages in the request."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    begun: int = 0
    in_flight: int = 0

    def prompt(self) -> Ids:
        """Return P_t."""
        return self.segment.ids.view(self.prompt_tokens)

    def prompt_json(self) -> bytes:
        """Return P_t as a JSON array."""
        return self.segment.ids.json(self.prompt_tokens)


@dataclass(slots=True, eq=False)
class Segment:
    """An append-only history. `ids` is P_t and `known` the messages' fingerprints of its last step."""

    run: Run = field(repr=False)
    index: int
    tools: bytes
    ids: Tokens = field(default_factory=Tokens)
    known: list[bytes] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Run:
    """One agent's line of segments."""

    name: str
    role: str
    summary: bool = False
    segments: list[Segment] = field(default_factory=list)

    def tip(self) -> Step:
        """Return the last step."""
        return self.segments[-1].steps[-1]

    def shared(self, ids: array[int]) -> int:
        """Return how many leading ids are those of the last prompt and answer, 0 for a new run."""
        if not self.segments:
            return 0
        tip = self.tip()
        answer = tip.attempts[max(tip.attempts)].output if tip.attempts else ()
        before, now = np.concatenate([tip.prompt(), np.array(answer, np.int32)]), np.array(ids, np.int32)
        size = min(len(before), len(now))
        different = np.flatnonzero(before[:size] != now[:size])
        return int(different[0]) if len(different) else size

    def open(self, tools: bytes) -> Segment:
        """Begin a segment."""
        index = self.segments[-1].index + 1 if self.segments else 0
        self.segments.append(Segment(self, index, tools))
        return self.segments[-1]

    def drop(self, step: Step) -> None:
        """Take back a step that nobody answered, and its segment if it held no other."""
        segment = step.segment
        segment.steps.remove(step)
        if segment.steps:
            last = segment.steps[-1]
            segment.ids.regrow(last.prompt_tokens)
            segment.known = segment.known[: last.messages]
        else:
            self.segments.remove(segment)


def split_prints(heard: bytes) -> list[bytes]:
    """Return the fingerprints joined in `heard`."""
    return [heard[i : i + PRINT] for i in range(0, len(heard), PRINT)]
