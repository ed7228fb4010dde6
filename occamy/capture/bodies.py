"""Request bodies that grow: an agent sends its history again at every call, and only what is new is read and hashed."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import orjson

from occamy.capture.messages import Message

_KEPT = 8
"""Bodies per episode that the next one may go on from: as many agents may take turns (our choice)."""

_LIST = re.compile(rb'"messages"[ \t\n\r]*:[ \t\n\r]*\[')
_SPACE = b" \t\n\r"
_STAND_IN = [secrets.token_hex(16)]
"""Stands for the messages in what is read without them. A secret, so that no body can hold it."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A body up to the end of its last message, and what stands around the messages."""

    begin: memoryview
    head: int
    """Offset behind the bracket that opens the list of messages."""
    messages: list[Message]
    sha256: hashlib._Hash = field(repr=False)
    """State after `begin`."""
    tail: bytes = b""
    """From the bracket that closes the list on."""
    rest: dict[str, Any] = field(default_factory=dict)
    """The body's other keys."""


@dataclass(frozen=True, slots=True)
class Body:
    """A request body. Messages and values that an earlier one held are its objects, not to be changed."""

    value: Any
    """The JSON value."""
    digest: str
    """sha256 of the bytes, hexadecimal."""
    before: _Known | None = field(default=None, repr=False)
    """What it goes on from."""
    known: _Known | None = field(default=None, repr=False)
    """What the next one may go on from."""

    @property
    def old(self) -> int:
        """How many of the messages an earlier body held."""
        return len(self.before.messages) if self.before else 0


class Bodies:
    """The last bodies on record of an episode.

    Where a body begins with the bytes of a known one, up to the end of its last message, it says the same: JSON is read
    from left to right. Then the new messages are read apart from the rest. A body for which this cannot be shown to
    give the right result is read as a whole.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def read(self, raw: bytes) -> Body:
        """Parse a body. Raises orjson.JSONDecodeError."""
        for known in self._known:
            if raw.startswith(known.begin) and (body := _go_on(raw, known)):
                return body
        if opened := _LIST.search(raw):
            head = memoryview(raw)[: opened.end()]
            if body := _go_on(raw, _Known(head, len(head), [], hashlib.sha256(head))):
                return body
        return Body(orjson.loads(raw), hashlib.sha256(raw).hexdigest())

    def keep(self, body: Body) -> None:
        """Remember a body, of which all is valid and on record, in place of the one that it goes on from."""
        if body.known is not None:
            others = (known for known in self._known if known is not body.before)
            self._known = [body.known, *others][:_KEPT]


def _go_on(raw: bytes, before: _Known) -> Body | None:
    """Read what follows `before`. None where it cannot be shown that the whole would be read like that."""
    view, at = memoryview(raw), len(before.begin)
    read = _read_messages(view[at:], b"0" if before.messages else b"")
    if read is None:
        return None
    new, size = read
    tail = raw[at + size :]
    rest = before.rest if tail == before.tail else _read_rest(view[: before.head], tail)
    if rest is None:
        return None
    messages = before.messages + new
    end = at + len(raw[at : at + size].rstrip(_SPACE))
    sha256 = before.sha256.copy()
    sha256.update(view[at:end])
    whole = sha256.copy()
    whole.update(view[end:])
    known = _Known(view[:end], before.head, messages, sha256, tail, rest)
    return Body({**rest, "messages": messages}, whole.hexdigest(), before, known)


def _read_messages(text: memoryview, last: bytes) -> tuple[list[Any], int] | None:
    """Parse the items of a list that follow its item `last`, if any, at the beginning of `text`.

    Returns them and how much of `text` stands before the list's closing bracket; None where that cannot be told. The
    parser finds the bracket: in an outer list, it stumbles right behind it over what a body goes on with. That this
    bracket closes the list is proved by parsing the list alone. It lies as deep as in a body, whose depth is limited.
    """
    begin = b"[[" + last
    try:
        orjson.loads(b"".join((begin, text)))
        return None
    except orjson.JSONDecodeError as e:
        size = e.doc[: e.pos].encode().rfind(b"]") - len(begin)
    if size < 0:
        return None
    try:
        lists = orjson.loads(b"".join((begin, text[:size], b"]]")))
    except orjson.JSONDecodeError:
        return None
    return (lists[0][len(last) :], size) if len(lists) == 1 else None


def _read_rest(head: memoryview, tail: bytes) -> dict[str, Any] | None:
    """Parse a body without its messages; None unless they stand where JSON takes them from: of equal keys, the last."""
    try:
        value = orjson.loads(b"".join((head, orjson.dumps(_STAND_IN)[1:-1], tail)))
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) and value.pop("messages", None) == _STAND_IN else None
