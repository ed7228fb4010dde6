"""The in-pod agent as one file of the standard library alone: who may call it, what it withstands, what it ends."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from occamy.sandboxes.config import Limits
from occamy.sandboxes.kubernetes.bundle import PARTS, write_bundle
from occamy.sandboxes.kubernetes.wire import AgentClient, Line, check_arrived, file_target
from occamy.sandboxes.protocol import PathRefused, SandboxDied, SandboxFrozen, ShortWrite

Alive = Callable[[str], list[str]]
LIMITS = Limits(memory_bytes=512 << 20, workspace_bytes=8 << 20)


@dataclass
class Running:
    """An agent of this machine."""

    process: subprocess.Popen[str]
    folder: Path
    port: int
    token: str

    def client(self, token: str | None = None) -> AgentClient:
        """A client, with the right token unless another is given."""

        async def dial() -> Line:
            return await asyncio.open_connection("127.0.0.1", self.port)

        return AgentClient(dial, self.token if token is None else token, "lease l")

    def raw(self, data: bytes) -> bytes:
        """What it answers to these bytes, until it closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as line:
            line.sendall(data)
            said = b""
            while piece := line.recv(65536):
                said += piece
            return said


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Running]:
    """Started the way an image starts it, with an environment of two variables."""
    write_bundle(tmp_path / "agent.pyz")
    token = secrets.token_urlsafe(32)
    (tmp_path / "token").write_text(token)
    (tmp_path / "workspace").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-I", "-S", "agent.pyz", "--workspace", "workspace", "--home", "scratch/home"]
    command += ["--token", "token", "--host", "127.0.0.1", "--port", str(port)]
    environment = {"PATH": "/usr/bin:/bin", "TEMPLATE": "given"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == f"serves on port {port}\n"
        try:
            yield Running(process, tmp_path, port, token)
        finally:
            process.kill()


def order(*argv: str, **changes: object) -> bytes:
    """The body of a request that runs a command."""
    limits = LIMITS.model_dump()
    fields = {"argv": argv, "env": {}, "cwd": ".", "timeout_s": 20.0, "lease_s": 60.0, "min_free_bytes": 1}
    return json.dumps({**fields, "limits": limits, **changes}).encode() + b"\n"


async def run(client: AgentClient, *argv: str, **changes: object) -> tuple[int | None, bytes]:
    """Exit and standard output of a command."""
    answer = await client.call("POST", "/exec", order(*argv, **changes), limit=1 << 20, timeout_s=30)
    line, _, output = answer.partition(b"\n")
    return json.loads(line)["exit"], output[: json.loads(line)["stdout"]]


def test_one_file_holds_it_and_equal_sources_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_bundle(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with zipfile.ZipFile(tmp_path / "a") as bundle:
        assert bundle.namelist() == ["__main__.py", *(f"occamy/{part}" for part in PARTS)]


def test_only_the_holder_of_the_token_is_served(agent: Running) -> None:
    async def body() -> None:
        for token in ("", "wrong", agent.token[:-1], agent.token + "x", "ä"):
            for method, target, data in (
                ("POST", "/exec", order("touch", "planted")),
                ("PUT", "/file?path=planted", b"x"),
                ("GET", "/file?path=kept", b""),
                ("DELETE", "/file?path=kept", b""),
                ("GET", "/files", b""),
                ("POST", "/freeze", b""),
                ("GET", "/snapshot", b""),
                ("PUT", "/restore", b"x"),
            ):
                with pytest.raises(SandboxDied, match=r"belongs to another pod now|broke off P"):  # closed, body unread
                    await agent.client(token).call(method, target, data, timeout_s=10)
        assert await agent.client().call("GET", "/state", timeout_s=10) == b"{}"

    (agent.folder / "workspace" / "kept").write_text("old")
    asyncio.run(body())
    assert os.listdir(agent.folder / "workspace") == ["kept"]
    assert agent.raw(b"GET /healthz HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\nserves\n")  # the kubelet has no token
    for basic in (b"", b"Authorization: Basic eDp5\r\n", b"Authorization: Bearer\r\n"):
        assert agent.raw(b"GET /state HTTP/1.1\r\n" + basic + b"\r\n").startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
        b"GET /state HTTP/1.1\r\nX: " + b"y" * 40000,
        b"PUT /file?path=x HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nContent-Length: -5\r\n\r\n",
        b"PUT /file?path=x HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nContent-Length: 99999999999\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused_and_the_agent_serves_on(agent: Running, garbage: bytes) -> None:
    answer = agent.raw(garbage.replace(b"TOKEN", agent.token.encode()))
    assert answer.startswith(b"HTTP/1.1 400") or (answer.startswith(b"HTTP/1.1 401") and b"state" not in garbage)
    assert asyncio.run(agent.client().call("GET", "/state", timeout_s=10)) == b"{}"


def test_unknown_requests_and_fields_are_refused_by_name(agent: Running) -> None:
    async def body() -> None:
        client = agent.client()
        for method, target in (("GET", "/etc/passwd"), ("DELETE", "/files"), ("GET", "/exec")):
            with pytest.raises(Exception, match=f"{method} {target.partition('?')[0]}: no such request"):
                await client.call(method, target, timeout_s=10)
        with pytest.raises(Exception, match="unexpected keyword argument 'shell'"):
            await client.call("POST", "/exec", order("true", shell=True), timeout_s=10)
        with pytest.raises(PathRefused):
            await client.call("PUT", "/file?path=%2e%2e/x", b"1", timeout_s=10)

    asyncio.run(body())
    assert not (agent.folder / "x").exists()


def test_commands_see_the_containers_environment_without_the_token_and_no_shell_runs_them(agent: Running) -> None:
    async def body() -> None:
        client = agent.client()
        seen = (await run(client, "env"))[1].decode()
        names = {line.partition("=")[0] for line in seen.splitlines()}
        assert names == {"PATH", "TEMPLATE", "HOME", "TMPDIR", "PWD"} | ({"LC_CTYPE"} & names)
        assert agent.token not in seen
        assert await run(client, "echo", "$HOME; touch x", "`id`") == (0, b"$HOME; touch x `id`\n")
        assert agent.token.encode() not in (await run(client, "cat", f"/proc/{agent.process.pid}/cmdline"))[1]

    asyncio.run(body())
    assert os.listdir(agent.folder / "workspace") == []


def test_freeze_finds_what_has_killed_its_keeper_and_hidden_its_parents(agent: Running, alive: Alive) -> None:
    async def body() -> None:
        client = agent.client()
        with pytest.raises(SandboxDied, match="keeper of a command died"):
            await run(client, "sh", "-c", "setsid env -i sh -c 'setsid sleep 641.5 &' & kill -9 $PPID; sleep 641.25")
        await client.call("POST", f"/freeze?limit={1 << 20}", timeout_s=30)
        assert alive("sleep 641.") == []
        with pytest.raises(SandboxFrozen):
            await run(client, "true")

    asyncio.run(body())


def test_told_to_end_it_leaves_no_process(agent: Running, alive: Alive) -> None:
    async def body() -> None:
        await run(agent.client(), "sh", "-c", "(setsid sleep 642.5 >/dev/null 2>&1 &)")
        assert alive("sleep 642.5")

    asyncio.run(body())
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(20) == 0
    assert alive("sleep 642.5") == []


def test_an_empty_token_is_refused_at_the_start(tmp_path: Path) -> None:
    write_bundle(tmp_path / "agent.pyz")
    (tmp_path / "token").write_text("\n")
    command = [sys.executable, "-I", "-S", "agent.pyz", "--workspace", ".", "--token", "token"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "the token is empty; anybody could call the agent" in done.stderr


def test_an_answer_that_is_cut_or_altered_on_its_way_is_noticed(agent: Running) -> None:
    async def altered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Stands between client and agent, and changes one letter, or breaks off."""
        there, back = await asyncio.open_connection("127.0.0.1", agent.port)
        back.write(await reader.read(65536))
        said = b""
        while b"hello" not in said:  # head and body may arrive one after the other
            said += await there.read(65536)
        writer.write(said.replace(b"hello", b"hullo") if cuts[0] is None else said[: cuts[0]])
        writer.close()

    cuts: list[int | None] = [None]

    async def body() -> None:
        await agent.client().call("PUT", file_target("f"), b"hello", timeout_s=10)
        server = await asyncio.start_server(altered, "127.0.0.1", 0)
        between = Running(agent.process, agent.folder, server.sockets[0].getsockname()[1], agent.token)
        with pytest.raises(SandboxDied, match="what arrived is not what its agent sent"):
            await between.client().call("GET", file_target("f"), limit=100, timeout_s=10)
        for cuts[0] in (0, 10, 40, -1):
            for target in (file_target("f"), "/snapshot"):
                with pytest.raises(SandboxDied, match="broke off GET"):
                    await between.client().call("GET", target, limit=1 << 20, timeout_s=10)
        server.close()

    asyncio.run(body())


def test_fewer_bytes_than_were_sent_are_a_short_write() -> None:
    answer = json.dumps({"size": 2, "fingerprint": "sha256:0"}).encode()
    with pytest.raises(ShortWrite, match="2 bytes sha256:0 arrived, 3 were sent"):
        check_arrived("lease l", answer, b"abc")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n<html>hello</html>",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        b'HTTP/1.1 422 No\r\nContent-Length: 38\r\n\r\n{"error": "ValueError", "message": ""}\n',
    ],
)
def test_what_is_no_agent_is_never_taken_for_one_whatever_it_answers(answer: bytes) -> None:
    """The address of a pod that is gone may be anybody's, and a read that it answered would be graded."""

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(stranger, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def dial() -> Line:
            return await asyncio.open_connection("127.0.0.1", port)

        for request in ("GET /file?path=a", "PUT /file?path=a", "GET /files", "POST /freeze"):
            with pytest.raises(SandboxDied):
                await AgentClient(dial, "token", "lease l").call(*request.split(), limit=1000, timeout_s=20)
        server.close()

    asyncio.run(body())
