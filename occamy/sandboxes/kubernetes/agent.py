"""The agent in a sandbox pod: serves its one sandbox over HTTP to who has the lease's token. Standard library only.

`bundle` makes one file of it, which an image carries: `python3 -I -S sandbox-agent.pyz`. It should be the first process
of its container: nothing in the pod can kill it then, and it can kill everything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import signal
import socket
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import parse_qsl, urlsplit

from occamy.sandboxes.kubernetes.http import HEAD_BYTES, Head, Malformed, make_head, read_body, read_head
from occamy.sandboxes.kubernetes.inside import Inside, Order
from occamy.sandboxes.protocol import PathRefused, SandboxError

PORT = 8750
BODY_BYTES = 2 << 30
"""Largest body of a request. Our choice; clients have lower limits of their own."""
_GREETING_S = 10.0  # in which who has connected has to show the token
_CHUNK = 1 << 20


class Agent:
    """Serves one sandbox."""

    def __init__(self, inside: Inside, token: bytes) -> None:
        """`token` is what every request but /healthz has to bear."""
        if not token:
            raise ValueError("the token is empty; anybody could call the agent")
        self._inside, self._token = inside, token

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after the other."""
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        patience: float | None = _GREETING_S
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError, asyncio.CancelledError):
            while await self._answer(reader, writer, patience):
                patience = None
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float | None) -> bool:
        """Serve one request. Returns whether the connection goes on."""
        try:
            async with asyncio.timeout(patience):
                head = await read_head(reader)
            if head is None:
                return False
            if head.first[:2] == ["GET", "/healthz"]:
                await _reply(writer, 200, b"serves\n")
                return False
            if not hmac.compare_digest(head.headers.get("authorization", "").encode(), b"Bearer " + self._token):
                await _reply(writer, 401, _fault("Unauthorized", "this is another pod's token, or none"))
                return False
            body = await read_body(reader, head.length(BODY_BYTES))
        except Malformed as e:
            await _reply(writer, 400, _fault("Malformed", str(e)))
            return False
        try:
            await self._serve(head, body, reader, writer)
        except FileNotFoundError as e:
            await _reply(writer, 422, _fault("FileNotFoundError", str(e.filename)))
        except (SandboxError, PathRefused, ValueError, KeyError, TypeError, OSError) as e:
            if isinstance(e, ConnectionError):
                raise
            await _reply(writer, 422, _fault(type(e).__name__, str(e)))
        return True

    async def _serve(self, head: Head, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(head.first[1])
        query = dict(parse_qsl(url.query, errors="surrogateescape", keep_blank_values=True))
        limit = int(query.get("limit", BODY_BYTES))
        match head.first[0], url.path:
            case "GET", "/state":
                await _reply(writer, 200, b"{}")
            case "POST", "/exec":
                await _reply(writer, 200, await self._while_connected(self._exec(body), reader))
            case "GET", "/file":
                data = await self._inside.read(query["path"], limit)
                await _reply(writer, 200, data)
            case "PUT", "/file":
                await self._inside.write(query["path"], body)
                await _reply(writer, 200, json.dumps({"size": len(body), "fingerprint": _fingerprint(body)}).encode())
            case "DELETE", "/file":
                await self._inside.remove(query["path"])
                await _reply(writer, 200, b"{}")
            case "GET", "/files":
                found = await self._inside.files(limit)
                await _reply(writer, 200, b"".join(os.fsencode(path) + b"\0" for path in found))
            case "POST", "/freeze":
                await asyncio.shield(self._inside.freeze(limit))
                await _reply(writer, 200, b"{}")
            case "GET", "/snapshot":
                await self._snapshot(limit, writer)
            case "PUT", "/restore":
                await self._inside.restore(body, limit)
                await _reply(writer, 200, json.dumps({"size": len(body), "fingerprint": _fingerprint(body)}).encode())
            case method, path:
                await _reply(writer, 404, _fault("Malformed", f"{method} {path}: no such request"))

    async def _exec(self, body: bytes) -> bytes:
        line, _, stdin = body.partition(b"\n")
        done = await self._inside.exec(Order(**json.loads(line)), stdin)
        said = {"exit": done.exit_code, "truncated": done.truncated, "limit": done.limit, "stdout": len(done.stdout)}
        return json.dumps(said).encode() + b"\n" + done.stdout + done.stderr

    async def _while_connected(self, work: Any, reader: asyncio.StreamReader) -> bytes:
        """The result of `work`, which is cancelled when the client goes away. A client sends nothing meanwhile."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ConnectionResetError("the client has gone away")
            return cast(bytes, task.result())
        finally:
            for each in (task, gone):
                each.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _snapshot(self, limit: int, writer: asyncio.StreamWriter) -> None:
        chunks = _Chunks(asyncio.get_running_loop(), writer)
        try:
            await self._inside.snapshot(limit, cast(IO[bytes], chunks))
            await chunks.send()
            trailer = make_head("0", {"Fingerprint": f"sha256:{chunks.digest.hexdigest()}"})
        except (SandboxError, OSError) as e:
            if not chunks.begun or isinstance(e, ConnectionError):
                raise
            trailer = make_head("0", {"Error": _fault(type(e).__name__, str(e)).decode()})
        writer.write(trailer)
        await writer.drain()


class _Chunks:
    """What a thread writes to send a body in chunks, as fast as the client takes them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, writer: asyncio.StreamWriter) -> None:
        self.begun = False
        self.digest = hashlib.sha256()
        self._loop, self._writer = loop, writer
        self._held = bytearray()

    def write(self, data: bytes) -> int:
        self._held += data
        if len(self._held) >= _CHUNK:
            asyncio.run_coroutine_threadsafe(self.send(), self._loop).result()
        return len(data)

    async def send(self) -> None:
        if not self.begun:
            self.begun = True
            self._writer.write(make_head("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"}))
        if self._held:
            data = bytes(self._held)
            self._held.clear()
            self.digest.update(data)
            self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self._writer.drain()


async def _reply(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    headers = {"Content-Length": str(len(body)), "Fingerprint": _fingerprint(body)}
    writer.write(make_head(f"HTTP/1.1 {status} .", headers))
    writer.write(body)
    await writer.drain()


def _fault(kind: str, message: str) -> bytes:
    return json.dumps({"error": kind, "message": message[:2000]}).encode()


def _fingerprint(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


async def serve(agent: Agent, inside: Inside, host: str | None, port: int) -> None:
    """Serve until SIGTERM, then leave no process behind."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    server = await asyncio.start_server(agent.connected, host, port, limit=HEAD_BYTES)
    inside.prepare()
    print(f"serves on port {port}", flush=True)
    await ended.wait()
    server.close()
    await inside.end()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="sandbox-agent", description=__doc__)
    parser.add_argument("--workspace", type=Path, default=Path("/workspace"), help="folder that commands run in")
    parser.add_argument("--home", type=Path, default=Path("/tmp/agent/home"), help="HOME of commands; made if absent")
    parser.add_argument("--token", type=Path, default=Path("/run/occamy/token"), help="file that holds the token")
    parser.add_argument("--host", help="address to serve at; every one by default")
    parser.add_argument("--port", type=int, default=PORT)
    args = parser.parse_args()
    token = args.token.read_bytes().strip()
    asyncio.run(_run(args.workspace.resolve(), args.home, token, args.host, args.port))


async def _run(workspace: Path, home: Path, token: bytes, host: str | None, port: int) -> None:
    inside = Inside(workspace, home)
    await serve(Agent(inside, token), inside, host, port)
