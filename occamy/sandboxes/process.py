"""One supervised command as seen from the event loop: starts its keeper, feeds and drains its pipes, ends its tree."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from occamy.sandboxes import keeper
from occamy.sandboxes.config import Limits
from occamy.sandboxes.protocol import SandboxError

_KILL_WAIT_S = 10.0
_DRAIN_S = 0.2  # after the command's exit, background processes may hold its pipes open for ever


class Command:
    """A running command and the tree below it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        control: asyncio.StreamWriter,
        output_bytes: int,
    ) -> None:
        self.truncated = False
        self._process = process
        self._reader = reader
        self._control = control
        self._limit = output_bytes
        self._out = bytearray()
        self._err = bytearray()
        assert process.stdout is not None and process.stderr is not None
        self._drains = [
            asyncio.create_task(self._drain(process.stdout, self._out)),
            asyncio.create_task(self._drain(process.stderr, self._err)),
        ]

    async def finish(self, stdin: bytes, timeout_s: float) -> int | None:
        """Feed stdin and wait for the command (not its daemons). Returns the exit status, None at the deadline."""
        feed = asyncio.create_task(self._feed(stdin))
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._reader.readline()
        except TimeoutError:
            return None
        finally:
            feed.cancel()
        if not line:
            raise SandboxError("the keeper of a command died before the command ended")
        await asyncio.wait(self._drains, timeout=_DRAIN_S)
        return int(line)

    def output(self) -> tuple[bytes, bytes]:
        """What stdout and stderr gave so far."""
        return bytes(self._out), bytes(self._err)

    async def kill(self) -> None:
        """End the whole tree, daemons included, and wait until its keeper is gone. Safe to call again."""
        with contextlib.suppress(OSError):
            self._control.write_eof()
        try:
            await asyncio.wait_for(self._reader.read(), _KILL_WAIT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._control.close()

    async def collect(self) -> None:
        """After `kill`, and the end of whoever held its pipes: let go of the pipes and the exit status."""
        await asyncio.wait(self._drains, timeout=_KILL_WAIT_S)
        await asyncio.wait_for(self._process.wait(), _KILL_WAIT_S)

    async def _feed(self, data: bytes) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            pipe.write(data)
            await pipe.drain()
        pipe.close()

    async def _drain(self, stream: asyncio.StreamReader, kept: bytearray) -> None:
        while chunk := await stream.read(1 << 16):
            room = self._limit - len(kept)
            kept += chunk[:room]
            self.truncated |= len(chunk) > room


async def start(argv: Sequence[str], env: dict[str, str], cwd: Path, limits: Limits) -> Command:
    """Start `argv` under a keeper. Raises SandboxError when the host cannot start processes."""
    ours, theirs = socket.socketpair()
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno())),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=cwd,
            env={},
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except OSError as e:
        ours.close()
        raise SandboxError(f"cannot start a process for {argv[0]!r}: {e.strerror}") from e
    finally:
        theirs.close()
    reader, control = await asyncio.open_connection(sock=ours)
    spec = {"argv": list(argv), "env": env, "limits": _rlimits(limits)}
    control.write(json.dumps(spec).encode() + b"\n")
    return Command(process, reader, control, limits.output_bytes)


def _rlimits(limits: Limits) -> dict[int, int]:
    return {
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NPROC: limits.processes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CORE: 0,
    }
