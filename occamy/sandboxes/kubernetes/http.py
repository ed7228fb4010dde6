"""The little of HTTP/1.1 that the in-pod agent and its client speak. Standard library only; runs in the pod as well.

Bodies have a length, or come in chunks whose trailer says how they ended. Connections are kept.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

HEAD_BYTES = 16 << 10
"""Largest head of a message. Our choice."""
_PIECE = 1 << 16
_DIGITS = 18
"""Longest number of bytes that is read: Python refuses to read numbers of some thousand digits."""


class Malformed(Exception):
    """The other side does not speak this protocol, or sent more than it may."""


@dataclass
class Head:
    """First line and headers of a message."""

    first: list[str]
    """The three words of the request line or the status line."""
    headers: dict[str, str] = field(default_factory=dict)
    """By lower-case name."""

    def length(self, limit: int) -> int:
        """Bytes of the body. Raises Malformed when it says none, or more than `limit`."""
        said = self.headers.get("content-length", "0")
        if not said.isascii() or not said.isdecimal() or len(said) > _DIGITS or int(said) > limit:
            raise Malformed(f"a body of {said[:20]!r} bytes; at most {limit} are taken")
        return int(said)


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next message's head, None at the end of the connection. Raises Malformed."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as e:
        if not e.partial:
            return None
        raise Malformed("the connection ended within a head") from e
    except asyncio.LimitOverrunError as e:
        raise Malformed("a head that does not end") from e
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    head = Head(first.split(" ", 2), _fields(lines))
    if len(head.first) < 2 or len(raw) > HEAD_BYTES:
        raise Malformed(f"{first[:80]!r}: no head of a message")
    return head


async def read_body(reader: asyncio.StreamReader, length: int) -> bytes:
    """So many bytes, however many. Raises asyncio.IncompleteReadError."""
    body = bytearray()
    while len(body) < length:
        piece = await reader.read(min(_PIECE, length - len(body)))
        if not piece:
            raise asyncio.IncompleteReadError(bytes(body[:100]), length)
        body += piece
    return bytes(body)


async def read_chunks(reader: asyncio.StreamReader, limit: int) -> tuple[bytes, dict[str, str]]:
    """A body in chunks and its trailer. Raises Malformed, also beyond `limit` bytes, asyncio.IncompleteReadError."""
    body = bytearray()
    while size := _size(await reader.readuntil(b"\r\n")):
        if len(body) + size > limit:
            raise Malformed(f"more than {limit} bytes")
        body += await read_body(reader, size)
        await reader.readexactly(2)
    trailer: list[str] = []
    left = HEAD_BYTES
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        if (left := left - len(line)) < 0:
            raise Malformed("a trailer that does not end")
        trailer.append(line[:-2].decode("latin-1"))
    return bytes(body), _fields(trailer)


def make_head(first: str, headers: dict[str, str]) -> bytes:
    """The bytes of a head. Values must be free of line ends, which is up to the caller."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{first}\r\n{lines}\r\n".encode("latin-1")


def _size(line: bytes) -> int:
    try:
        size = int(line[:-2], 16)
    except ValueError as e:
        raise Malformed(f"{line[:20]!r}: no size of a chunk") from e
    if size < 0:
        raise Malformed(f"a chunk of {size} bytes")
    return size


def _fields(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
