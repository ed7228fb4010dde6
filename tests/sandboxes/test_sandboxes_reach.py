"""What a command under bubblewrap may reach and read: the addresses and paths that its lease names, nothing else."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from occamy.contracts.episode import Outcome
from occamy.sandboxes import bubblewrap
from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.local import LocalBackend, LocalSandbox
from occamy.sandboxes.protocol import ExecResult, Isolation, IsolationRefused, Network, SandboxError

Within = Callable[..., None]
WRAPPED = LocalSandboxConfig(isolation=Isolation.bubblewrap)

needs_bubblewrap = pytest.mark.skipif(
    not bubblewrap.available(), reason="bubblewrap is not installed or may not make namespaces here"
)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write(b"end")
    writer.close()


def reaching(
    tmp_path: Path, python: tuple[str, Path], script: str, *servers: Callable[..., object], host: str = "127.0.0.1"
) -> ExecResult:
    """Run a Python script that may reach the first server and is given the ports of all."""

    async def run() -> ExecResult:
        started = [await asyncio.start_server(server, "127.0.0.1", 0) for server in servers]
        ports = [server.sockets[0].getsockname()[1] for server in started]
        backend = LocalBackend(tmp_path / "leases", WRAPPED)
        sandbox = await backend.lease("p", "o", 60.0, reach=[(host, ports[0])], readable=[python[1]])
        try:
            return await sandbox.exec([python[0], "-I", "-S", "-c", script, *map(str, ports)], timeout_s=30)
        finally:
            await sandbox.release()
            await backend.close()
            for server in started:
                server.close()

    return asyncio.run(run())


@needs_bubblewrap
def test_streams_flow_both_ways_as_they_come_in_parallel_and_end_properly(
    tmp_path: Path, python: tuple[str, Path]
) -> None:
    script = """
import socket, sys, threading
def talk(n):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as s:
        for i in range(20):  # each answer has to come before the next question is asked
            s.sendall(b"%d" % (i % 10))
            assert s.recv(1) == b"%d" % (i % 10)
        block = bytes([n]) * 300_000
        threading.Thread(target=lambda: (s.sendall(block), s.shutdown(socket.SHUT_WR))).start()
        got = b""
        while more := s.recv(1 << 16): got += more
        assert got == block + b"end", len(got)
        print("fine")
threads = [threading.Thread(target=talk, args=(n,)) for n in range(16)]
[t.start() for t in threads]; [t.join() for t in threads]
"""
    done = reaching(tmp_path, python, script, echo)
    assert (done.exit_code, done.stdout.count(b"fine"), done.stderr) == (0, 16, b"")


@needs_bubblewrap
def test_other_ports_other_hosts_and_names_are_out_of_reach(tmp_path: Path, python: tuple[str, Path]) -> None:
    script = """
import errno, socket, sys
def reach(host, port):
    try:
        socket.create_connection((host, port), 5).close()
        return "reached"
    except socket.gaierror: return "no such name"
    except OSError as e: return errno.errorcode[e.errno]
print(reach("127.0.0.1", int(sys.argv[1])), reach("localhost", int(sys.argv[1])), reach("127.0.0.1", int(sys.argv[2])),
      reach("192.0.2.1", 80), reach("example.com", 80), socket.if_nameindex())
"""
    done = reaching(tmp_path, python, script, echo, echo, host="localhost")
    assert done.stdout == b"reached reached ECONNREFUSED ENETUNREACH no such name [(1, 'lo')]\n"


@needs_bubblewrap
def test_each_end_notices_that_the_other_has_gone(tmp_path: Path, python: tuple[str, Path]) -> None:
    seen: list[bytes] = []

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read())  # returns when the client is gone
        writer.close()

    script = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.sendall(b"bye")
"""
    assert reaching(tmp_path, python, script, server).exit_code == 0 and seen == [b"bye"]

    script = "import socket, sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(9))"
    done = reaching(tmp_path, python, script, lambda _, writer: writer.close())
    assert done.stdout == b"b''\n"


@needs_bubblewrap
def test_a_server_that_is_down_is_a_closed_connection_and_back_later_is_reached(
    tmp_path: Path, python: tuple[str, Path]
) -> None:
    script = "import socket, sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(3))"

    async def run() -> list[bytes]:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        backend = LocalBackend(tmp_path / "leases", WRAPPED)
        sandbox = await backend.lease("p", "o", 60.0, reach=[("127.0.0.1", port)], readable=[python[1]])
        line = [python[0], "-I", "-S", "-c", script, str(port)]
        said = [(await sandbox.exec(line)).stdout]
        server = await asyncio.start_server(lambda _, w: (w.write(b"yes"), w.close()), "127.0.0.1", port)
        said.append((await sandbox.exec(line)).stdout)
        server.close()
        await sandbox.release()
        await backend.close()
        return said

    assert asyncio.run(run()) == [b"b''\n", b"b'yes'\n"]


@pytest.mark.parametrize("address", [("10.0.0.1", 80), ("example.com", 80), ("127.0.0.1", 0), ("::1", 80)])
def test_only_the_loopback_can_be_reached(within: Within, address: tuple[str, int]) -> None:
    with pytest.raises(ValueError, match=r"serve it on a port of 127\.0\.0\.1"):
        within(_nothing, reach=[address])


async def _nothing(sandbox: LocalSandbox) -> None:
    """A body that only needs the lease."""


@needs_bubblewrap
def test_a_network_that_cannot_be_made_is_a_fault_of_the_sandbox(within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        with pytest.raises(SandboxError, match=r"no network of its own: .*Address already in use") as caught:
            await sandbox.exec(["true"])
        assert caught.value.outcome is Outcome.infra_failed

    within(body, WRAPPED, reach=[("127.0.0.1", 4242), ("127.0.0.1", 4242)])


@needs_bubblewrap
def test_a_recipe_can_forbid_the_network(within: Within) -> None:
    config = LocalSandboxConfig(isolation=Isolation.bubblewrap, network=Network.none)
    with pytest.raises(IsolationRefused, match=r"127\.0\.0\.1:4242, and sandbox\.network is 'none'"):
        within(_nothing, config, reach=[("127.0.0.1", 4242)])


@pytest.mark.parametrize("network", Network)
def test_a_network_rule_that_the_level_cannot_keep_is_refused(within: Within, network: Network) -> None:
    config = LocalSandboxConfig(isolation=Isolation.process, network=network)
    with pytest.raises(IsolationRefused, match=f"{network.value!r} cannot be kept by isolation 'process'"):
        within(_nothing, config)


@needs_bubblewrap
def test_named_paths_can_be_read_and_run_and_not_written(within: Within, tmp_path: Path) -> None:
    program = tmp_path / "agent" / "bin" / "agent"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho I run; echo x > $0; echo x > $(dirname $0)/new\n")
    program.chmod(0o755)
    (tmp_path / "beside").write_text("private")

    async def body(sandbox: LocalSandbox) -> None:
        done = await sandbox.exec(["sh", "-c", f"{program}; ls {tmp_path}"])
        assert done.stdout == b"I run\nagent\nleases\n" and done.stderr.count(b"Read-only file system") == 2

    within(body, WRAPPED, readable=[tmp_path / "agent"])


@pytest.mark.parametrize("path", ["/", "/nowhere", "relative", "root", "leases"])
def test_paths_that_hold_the_leases_or_are_not_there_are_refused(within: Within, tmp_path: Path, path: str) -> None:
    given = {"root": tmp_path, "leases": tmp_path / "leases"}.get(path, Path(path))
    with pytest.raises(ValueError, match="readable path"):
        within(_nothing, readable=[given])


@needs_bubblewrap
def test_the_rest_of_the_machine_is_empty_read_only_or_private(within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        script = """
for f in /x /usr/x /etc/x /dev/x /proc/sys/kernel/hostname; do (echo y > $f) 2>/dev/null && echo wrote $f; done
touch /tmp/x /dev/shm/x $HOME/x $TMPDIR/x x && df --output=size -B1 /tmp /dev/shm | tail -n 2
cat /etc/passwd; ls /etc /proc/self/fd; grep CapEff /proc/self/status
"""
        done = await sandbox.exec(["sh", "-c", script])
        size, size_2, user, *names, rights = done.stdout.decode().splitlines()
        assert size.strip() == size_2.strip() == str(256 << 20) and user.startswith("agent:x:")
        etc = {"alternatives", "group", "hosts", "ld.so.cache", "passwd"}
        assert set(names) <= etc | {"", "/etc:", "/proc/self/fd:", "0", "1", "2", "3"}  # 3: of ls itself
        assert rights.split()[1] == "0" * 16 and done.stderr == b""
        assert not Path("/tmp/x").exists()

    within(body, WRAPPED)


@needs_bubblewrap
def test_exits_are_the_same_under_bubblewrap(within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        for script, code in (("exit 3", 3), ("kill -9 $$", 137), ("true", 0)):
            assert (await sandbox.exec(["sh", "-c", script])).exit_code == code
        assert (await sandbox.exec(["no-such-program"])).exit_code == 127
        assert (await sandbox.exec(["printf", "%s|", "a b", "", '"$1"'])).stdout == b'a b||"$1"|'

    within(body, WRAPPED)


@needs_bubblewrap
def test_what_bubblewrap_cannot_set_up_is_a_fault_of_the_sandbox(within: Within, tmp_path: Path) -> None:
    program = tmp_path / "agent"
    program.mkdir()

    async def body(sandbox: LocalSandbox) -> None:
        assert (await sandbox.exec(["true"])).exit_code == 0
        program.rmdir()
        with pytest.raises(SandboxError, match=f"bwrap ended with 1 and did not run it: bwrap: .*{program}") as caught:
            await sandbox.exec(["true"])
        assert caught.value.outcome is Outcome.infra_failed

    within(body, WRAPPED, readable=[program])


def test_the_process_level_reaches_what_it_is_told_and_more(within: Within) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
        assert (await sandbox.exec([sys.executable, "-I", "-S", "-c", code])).exit_code == 0
        server.close()

    within(body, reach=[("127.0.0.1", 4242)])
