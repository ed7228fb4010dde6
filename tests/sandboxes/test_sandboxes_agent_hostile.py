"""An in-pod agent that was taken over: whatever it answers is a fault of that one lease, in bounded space."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from occamy.contracts.outcome import Outcome
from occamy.sandboxes import archive
from occamy.sandboxes.kubernetes import leases
from occamy.sandboxes.kubernetes.backend import KubernetesSandbox
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig
from occamy.sandboxes.kubernetes.leases import Held
from occamy.sandboxes.kubernetes.wire import AgentClient, Line
from occamy.sandboxes.protocol import PathRefused, Sandbox, SandboxDied, SandboxError

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _nobody_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no operator to wait for."""
    monkeypatch.setattr(leases, "_REASON_S", 0.0)


def answer(body: bytes, status: str = "200") -> bytes:
    """A whole answer, with the fingerprint that makes it an agent's."""
    sealed = hashlib.sha256(body).hexdigest()
    return f"HTTP/1.1 {status} .\r\nContent-Length: {len(body)}\r\nFingerprint: sha256:{sealed}\r\n\r\n".encode() + body


@asynccontextmanager
async def hostile(serve: Serve) -> AsyncIterator[tuple[AgentClient, KubernetesSandbox]]:
    """A client of such an agent, and the sandbox of one that answered its first request well."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except OSError:
            pass  # the client has had enough
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def dial() -> Line:
        return await asyncio.open_connection("127.0.0.1", port)

    held = Held("pool-1", "uid", status={"pod": "pod-1", "endpoint": f"http://127.0.0.1:{port}"})
    config = KubernetesSandboxConfig(namespace="n", route="agent")
    none = cast(Any, None)  # no API server is asked for anything
    sandbox = KubernetesSandbox(config, none, none, held, "owner", "token")
    sandbox.route = "agent"
    sandbox.begin(600.0)
    client = AgentClient(dial, "token", "lease l")
    yield client, sandbox
    client.close()
    server.close()


def always(said: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(said)
            await writer.drain()

    return serve


CALLS: dict[str, Callable[[Sandbox], Awaitable[Any]]] = {
    "exec": lambda sandbox: sandbox.exec(["true"]),
    "read": lambda sandbox: sandbox.read("f"),
    "write": lambda sandbox: sandbox.write("f", b"abc"),
    "remove": lambda sandbox: sandbox.remove("f"),
    "files": lambda sandbox: sandbox.files(),
    "freeze": lambda sandbox: sandbox.freeze(),
    "snapshot": lambda sandbox: sandbox.snapshot(),
    "restore": lambda sandbox: sandbox.restore(b"abc"),
}
DONE = {"exit": 0, "truncated": False, "limit": "", "stdout": 0}
WRONG: list[dict[str, Any]] = [
    {"stdout": "x"},
    {"stdout": -1},
    {"exit": "x"},
    {"exit": [0]},
    {"exit": 1.5},
    {"limit": {}},
    {"truncated": []},
]
NONSENSE = [b"", b"\xff", b"null", b"[]", b"{}", b"[" * 100_000, b"1" * 5000]
NONSENSE += [json.dumps(DONE | wrong).encode() for wrong in WRONG]
KINDS = ["ValueError", "PathRefused", "FileNotFoundError", "KeyError", "LeaseExpired", "x" * 9000]


@pytest.mark.parametrize("call", ["exec", "write", "restore"])
@pytest.mark.parametrize("said", NONSENSE, ids=lambda said: repr(said[:20]))
def test_an_answer_that_says_nothing_is_an_infrastructure_fault(call: str, said: bytes) -> None:
    async def body() -> None:
        async with hostile(always(answer(said))) as (_, sandbox):
            with pytest.raises(SandboxDied, match=r"lease pool-1 .*no agent's"):
                await CALLS[call](sandbox)

    asyncio.run(body())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_raises_nothing_that_the_call_does_not_raise_by_itself(call: str, kind: str) -> None:
    """An error that no caller waits for would end a whole rollout."""
    expected: dict[str, tuple[type[Exception], ...]] = {
        "ValueError": (ValueError,) if call == "restore" else (),
        "PathRefused": (PathRefused,) if call in ("exec", "read", "write", "remove", "restore") else (),
        "FileNotFoundError": (FileNotFoundError,) if call in ("read", "write", "remove") else (),
    }
    fault = json.dumps({"error": kind, "message": "m" * 1_000_000}).encode()

    async def body() -> None:
        async with hostile(always(answer(fault, "422"))) as (_, sandbox):
            with pytest.raises(expected.get(kind) or SandboxError) as caught:
                await CALLS[call](sandbox)
            assert not isinstance(caught.value, SandboxError) or caught.value.outcome is Outcome.infra_failed
            assert len(str(caught.value)) < 3000

    asyncio.run(body())


@pytest.mark.parametrize("said", NONSENSE[:7], ids=lambda said: repr(said[:20]))
def test_a_fault_that_is_none_is_an_infrastructure_fault(said: bytes) -> None:
    async def body() -> None:
        async with hostile(always(answer(said, "422"))) as (_, sandbox):
            with pytest.raises(SandboxDied, match="no agent's"):
                await sandbox.freeze()

    asyncio.run(body())


@pytest.mark.parametrize(("begin", "chunk"), [(b"", b"-1\r\n\r\n"), (b"0\r\n", b"x: y\r\n")])
def test_an_answer_without_end_is_broken_off(begin: bytes, chunk: bytes) -> None:
    """Nothing of it grows by bytes that count, so that no limit of a body ends it."""
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 .\r\nTransfer-Encoding: chunked\r\n\r\n" + begin)
        while sent < 100 << 20:
            writer.write(chunk * 1000)
            await writer.drain()
            sent += len(chunk) * 1000

    async def body() -> None:
        async with hostile(serve) as (client, _):
            with pytest.raises(SandboxDied, match=r"Malformed: a (trailer that does not end|chunk of -1 bytes)"):
                await client.call("GET", "/snapshot", limit=1000, timeout_s=100)
        assert sent < 20 << 20

    asyncio.run(body())


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_call_that_has_failed_sends_nothing_more_and_keeps_nothing(cancelled: bool) -> None:
    """A write that timed out must not arrive later, nor what it was to send stay in memory for as long as the pod."""
    data = bytes(64 << 20)
    got = 0

    async def body() -> None:
        begun, over, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal got
            got = len(await reader.read(1 << 16))
            begun.set()
            await over.wait()
            try:
                while piece := await reader.read(1 << 16):
                    got += len(piece)
            finally:
                ended.set()

        async with hostile(serve) as (client, _):
            call = asyncio.create_task(client.call("PUT", "/file?path=f", data, timeout_s=600.0 if cancelled else 0.5))
            await begun.wait()
            if cancelled:
                call.cancel()
            with pytest.raises(asyncio.CancelledError if cancelled else SandboxDied):
                await call
            over.set()
            await ended.wait()
        assert got < len(data)

    asyncio.run(body())


def _sparse(size: int) -> bytes:
    """An archive of 1.5 KiB with a file of so many zeros."""
    header = bytearray(tarfile.TarInfo("f").tobuf(tarfile.GNU_FORMAT))
    header[156:157], header[483:495] = tarfile.GNUTYPE_SPARSE, b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def _long_names(count: int) -> bytes:
    """An archive that names one file so many times over."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1
    return (info.tobuf(tarfile.GNU_FORMAT) + b"x" + bytes(511)) * count + bytes(1024)


@pytest.mark.parametrize("packed", [b"", b"x" * 2000, _sparse(1 << 32), _long_names(3000)], ids=len)
def test_an_archive_that_is_none_or_grows_is_an_infrastructure_fault(packed: bytes) -> None:
    async def body() -> None:
        async with hostile(always(answer(packed))) as (_, sandbox):
            exported = await sandbox.snapshot()
            with pytest.raises(SandboxDied, match="no snapshot's archive"):
                archive.contents(exported.archive)

    asyncio.run(body())
