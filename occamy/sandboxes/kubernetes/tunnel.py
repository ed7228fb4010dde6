"""Connections to an agent whose address cannot be reached: through pods/exec, by a relay of a few lines in the pod."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import aiohttp

from occamy.sandboxes.kubernetes.api import Api
from occamy.sandboxes.kubernetes.http import HEAD_BYTES

CONTAINER = "agent"
_STDIN, _STDOUT, _STDERR, _END = 0, 1, 2, 3
_PIECE = 32 << 10
_RELAY = """
import os, socket, sys, threading
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def give():
    while data := os.read(0, 65536): s.sendall(data)
    s.shutdown(socket.SHUT_WR)
threading.Thread(target=give, daemon=True).start()
while data := s.recv(65536):
    while data: data = data[os.write(1, data):]
"""


class Tunnel:
    """Reaches the agent of one pod. Each connection is a process of its own in the pod, which freeze kills."""

    def __init__(self, api: Api, namespace: str, pod: str, port: int) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec"
        command = ["python3", "-I", "-S", "-c", _RELAY, str(port)]
        self._query = [("command", word) for word in command]
        self._query += [("container", CONTAINER), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
        self._pumps: set[asyncio.Task[None]] = set()
        self.words = ""
        """What a relay last said of its end, for errors."""

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the agent. Raises ApiError, ApiDown; what fails in the pod shows on first use."""
        websocket = await self._api.stream(self._path, self._query)
        ours, theirs = socket.socketpair()
        pump = asyncio.create_task(self._pump(websocket, theirs))  # whose all of it is, whatever becomes of this call
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)
        return await asyncio.open_connection(sock=ours, limit=HEAD_BYTES)

    async def close(self) -> None:
        """End every connection."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, websocket: aiohttp.ClientWebSocketResponse, near: socket.socket) -> None:
        """Carry bytes both ways until one side ends."""
        reader, writer = await asyncio.open_connection(sock=near)
        out = asyncio.create_task(_send(websocket, reader))
        back = asyncio.create_task(self._receive(websocket, writer))
        try:
            await asyncio.wait([out, back], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (out, back):
                each.cancel()
            await asyncio.gather(out, back, return_exceptions=True)
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                await websocket.close()

    async def _receive(self, websocket: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
        async for message in websocket:
            if message.type is not aiohttp.WSMsgType.BINARY or len(message.data) < 2:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == _STDOUT:
                writer.write(data)
                await writer.drain()
            elif channel == _STDERR:
                self.words = data[-300:].decode(errors="replace").strip()
            elif channel == _END:
                self.words = f"{self.words} {_ending(data)}".strip()
                return


async def _send(websocket: aiohttp.ClientWebSocketResponse, reader: asyncio.StreamReader) -> None:
    while data := await reader.read(_PIECE):
        await websocket.send_bytes(bytes([_STDIN]) + data)


def _ending(status: bytes) -> str:
    """What the last message of a stream says of the relay's end."""
    try:
        return str(json.loads(status).get("message", ""))
    except (ValueError, AttributeError):
        return status[:200].decode(errors="replace")
