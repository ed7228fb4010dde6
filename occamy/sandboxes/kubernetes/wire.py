"""The client of the in-pod agent: requests over connections that are kept, whatever carries them."""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar
from urllib.parse import quote

from pydantic import Field, ValidationError

from occamy.contracts.record import Record
from occamy.sandboxes import protocol
from occamy.sandboxes.kubernetes.http import HEAD_BYTES, Head, Malformed, make_head, read_body, read_chunks, read_head
from occamy.sandboxes.protocol import PathRefused, SandboxDied, SandboxError, ShortWrite

Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[], Awaitable[Line]]
"""Opens a connection to the agent. Raises SandboxError."""

_REST_BYTES = 16 << 20  # what a body may have beyond the payload that the caller has bounded
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        protocol.DiskFull,
        protocol.SandboxDied,
        protocol.SandboxFrozen,
        protocol.ShortWrite,
        protocol.WorkspaceRefused,
    )
}
_MISTAKES: dict[str, tuple[type[Exception], ...]] = {
    "/exec": (PathRefused,),
    "/file": (PathRefused, FileNotFoundError),
    "/restore": (PathRefused, ValueError),
}
"""What a caller may have done wrong, by request. No other request raises what callers do not wait for."""
_WORDS = 2000
"""Longest message that an agent has, characters."""


class Done(Record):
    """What an agent says of a command, ahead of its output."""

    exit: int | None
    truncated: bool
    limit: Annotated[str, Field(max_length=100)]
    stdout: Annotated[int, Field(ge=0)]


class Arrived(Record):
    """What an agent says of the bytes that it has got."""

    size: int
    fingerprint: Annotated[str, Field(max_length=100)]


class _Fault(Record):
    error: str
    message: str


R = TypeVar("R", bound=Record)


class AgentClient:
    """Calls one agent. `who` names the lease in errors."""

    def __init__(self, dial: Dial, token: str, who: str) -> None:
        self._dial, self._who = dial, who
        self._headers = {"Host": "agent", "Authorization": f"Bearer {token}"}
        self._idle: list[Line] = []
        self._closed = False

    async def call(self, method: str, target: str, body: bytes = b"", *, limit: int = 0, timeout_s: float) -> bytes:
        """The body of the answer, of `limit` bytes at most (and some for what is around them).

        Raises what the agent says, as the kinds of `occamy.sandboxes.protocol`; SandboxDied when it does not answer in
        time, or no more. Nothing is asked twice.
        """
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self._line()
                try:
                    head, answer, trailer = await self._exchange(reader, writer, method, target, body, limit)
                except BaseException:
                    writer.transport.abort()  # nothing more is sent: an agent that reads nothing would keep it here
                    raise
        except TimeoutError as e:
            raise SandboxDied(f"{self._who}: its agent did not answer {method} {target} in {timeout_s:.0f} s") from e
        except (OSError, Malformed, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as e:
            raise SandboxDied(f"{self._who}: its agent broke off {method} {target}: {_words(e)}") from e
        if self._closed:
            writer.close()
        else:
            self._idle.append((reader, writer))
        if "error" in trailer:
            raise self._error(target, "200", trailer["error"].encode())
        _check_fingerprint(self._who, head, trailer, answer)
        if head.first[1] != "200":
            raise self._error(target, head.first[1], answer)
        return answer

    def close(self) -> None:
        """Close every connection that is not in use, and each other one after its use."""
        self._closed = True
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _line(self) -> Line:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and reader.exception() is None:
                return reader, writer
            writer.close()
        return await self._dial()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        method: str,
        target: str,
        body: bytes,
        limit: int,
    ) -> tuple[Head, bytes, dict[str, str]]:
        headers = {**self._headers, "Content-Length": str(len(body))}
        writer.write(make_head(f"{method} {target} HTTP/1.1", headers))
        writer.write(body)
        await writer.drain()
        head = await read_head(reader)
        if head is None:
            raise Malformed("the connection was closed")
        if head.headers.get("transfer-encoding") == "chunked":
            return head, *await read_chunks(reader, limit + _REST_BYTES)
        return head, await read_body(reader, head.length(limit + _REST_BYTES)), {}

    def _error(self, target: str, status: str, said: bytes) -> Exception:
        fault = parsed(self._who, _Fault, said)
        name, message = fault.error[:100], fault.message[:_WORDS]
        if status == "401":
            return SandboxDied(f"{self._who}: its address or name belongs to another pod now ({message})")
        for mistake in _MISTAKES.get(target.partition("?")[0], ()):
            if mistake.__name__ == name:
                absent = mistake is FileNotFoundError
                return mistake(errno.ENOENT, "no such file in the workspace", message) if absent else mistake(message)
        if kind := _KINDS.get(name):
            return kind(f"{self._who}: {message}")
        return SandboxError(f"{self._who}: {name}: {message}")


def parsed(who: str, kind: type[R], said: bytes) -> R:
    """What an agent says. Raises SandboxDied for what no agent does."""
    try:
        return kind.model_validate_json(said)
    except ValidationError as e:
        raise SandboxDied(f"{who}: an answer that is no agent's: {said[:200]!r}") from e


def file_target(path: str) -> str:
    """Where a workspace file is read, written and removed. Raises PathRefused for a path that fits no request."""
    target = f"/file?path={quote(path, safe='/', errors='surrogateescape')}"
    if len(target) > HEAD_BYTES // 2:
        raise PathRefused(f"{path[:100]!r}...: {len(path)} characters; give a shorter path")
    return target


def check_arrived(who: str, answer: bytes, data: bytes) -> None:
    """Raise ShortWrite unless the agent has got, and has on disk, just these bytes."""
    said = parsed(who, Arrived, answer)
    if said != Arrived(size=len(data), fingerprint=fingerprint(data)):
        raise ShortWrite(f"{who}: {said.size} bytes {said.fingerprint} arrived, {len(data)} were sent")


def fingerprint(data: bytes) -> str:
    """``sha256:<hex>``."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _check_fingerprint(who: str, head: Head, trailer: dict[str, str], data: bytes) -> None:
    """Raise SandboxDied for what an agent did not send, or sent otherwise: it says the fingerprint of every answer."""
    said = (head.headers | trailer).get("fingerprint")
    if said is None:
        raise SandboxDied(f"{who}: an answer {head.first[1]} that is no agent's: {data[:200]!r}")
    if said != fingerprint(data):
        raise SandboxDied(f"{who}: what arrived is not what its agent sent")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
