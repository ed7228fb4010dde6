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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import occamy
from occamy.sandboxes.protocol import SandboxDied, SandboxError

if TYPE_CHECKING:  # a record of pydantic's, which the agent in a sandbox pod does without
    from occamy.sandboxes.config import Limits

_KILL_WAIT_S = 10.0
_DRAIN_S = 0.2  # after the command's exit, background processes may hold its pipes open for ever
_PACKAGES = str(Path(occamy.__file__).resolve().parent.parent)
_BOOT = "import sys; sys.path.append(sys.argv[1]); from occamy.sandboxes.keeper import main; main(int(sys.argv[2]))"


@dataclass(frozen=True)
class Launch:
    """A command and the bounds of its tree."""

    argv: Sequence[str]
    env: dict[str, str]
    cwd: Path
    limits: Limits
    folder: Path
    """Folder of the lease, whose size is limited."""
    seconds: float
    """Seconds until the lease ends, and the tree with it."""
    reach: Sequence[tuple[str, int]] = ()
    """Addresses of the host to carry into a network of the command's own; empty leaves the network as it is."""
    status_fd: int | None = None
    """Descriptor on which bwrap tells the command's exit; None when there is no bwrap around it."""
    own_user: bool = True
    """Whether the kernel may count processes by user: other sandboxes have users of their own."""


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
        self.limit = ""
        self.killed = False
        self._process = process
        self._control = control
        self._bytes = output_bytes
        self._out = bytearray()
        self._err = bytearray()
        self._report: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._reports = asyncio.create_task(self._follow(reader))
        assert process.stdout is not None and process.stderr is not None
        self._drains = [
            asyncio.create_task(self._drain(process.stdout, self._out)),
            asyncio.create_task(self._drain(process.stderr, self._err)),
        ]

    async def finish(self, stdin: bytes, timeout_s: float) -> int | None:
        """Feed stdin and wait for the command (not its daemons). Its exit, None at a deadline, 137 after `kill`.

        Raises SandboxDied when the keeper went first, SandboxError when it could not set the command up.
        """
        feed = asyncio.create_task(self._feed(stdin))
        try:
            async with asyncio.timeout(timeout_s):
                report = await asyncio.shield(self._report)
        except TimeoutError:
            return None
        finally:
            feed.cancel()
        if report is None:
            if self.killed:
                return 128 + signal.SIGKILL
            raise SandboxDied("the keeper of a command died before the command ended")
        await asyncio.wait(self._drains, timeout=_DRAIN_S)
        if "fault" in report:
            said = self._err[-500:].decode(errors="replace").strip()
            raise SandboxError(f"a command could not be set up: {report['fault']}: {said}")
        self.limit = report.get("limit", "")
        return None if self.limit == "deadline" else int(report["exit"])

    @property
    def gone(self) -> bool:
        """True when the keeper is gone, and the tree with it if the keeper ended well: see `collect`."""
        return self._reports.done()

    def output(self) -> tuple[bytes, bytes]:
        """What stdout and stderr gave so far."""
        return bytes(self._out), bytes(self._err)

    async def kill(self) -> None:
        """End the whole tree, daemons included, and wait until its keeper is gone. Safe to call again."""
        self.killed = True
        with contextlib.suppress(OSError):
            self._control.write_eof()
        _, late = await asyncio.wait([self._reports], timeout=_KILL_WAIT_S)
        if late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._control.close()

    async def collect(self) -> bool:
        """After `kill`: let go of pipes and exit status. Returns whether it is certain that the tree is gone.

        It is when the keeper has ended of itself, having killed them all, and nobody holds a pipe any more.
        """
        well = await asyncio.wait_for(self._process.wait(), _KILL_WAIT_S) == 0
        _, held = await asyncio.wait(self._drains, timeout=_KILL_WAIT_S if well else 0)
        for drain in held:
            drain.cancel()
        return well and not held

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        """Take the keeper's first report; return when the keeper is gone."""
        with contextlib.suppress(OSError):
            if line := await reader.readline():
                self._report.set_result(json.loads(line))
                await reader.read()
        if not self._report.done():
            self._report.set_result(None)

    async def _feed(self, data: bytes) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            pipe.write(data)
            await pipe.drain()
        pipe.close()

    async def _drain(self, stream: asyncio.StreamReader, kept: bytearray) -> None:
        while chunk := await stream.read(1 << 16):
            room = self._bytes - len(kept)
            kept += chunk[:room]
            self.truncated |= len(chunk) > room


@dataclass(frozen=True)
class Keeper:
    """A keeper that waits for its command."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    control: asyncio.StreamWriter

    @property
    def waits(self) -> bool:
        """False when somebody has killed it."""
        return self.process.returncode is None and not self.reader.at_eof()

    async def end(self) -> None:
        """Have it end, and wait for that."""
        self.control.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


async def start(launch: Launch, keeper: Keeper | None = None) -> Command:
    """Start a command, under this keeper or a new one. Raises SandboxError when the host cannot start processes."""
    keeper = keeper or await start_keeper(launch.cwd, launch.argv[0])
    keeper.control.write(json.dumps(_spec(launch)).encode() + b"\n")
    return Command(keeper.process, keeper.reader, keeper.control, launch.limits.output_bytes)


async def start_keeper(cwd: Path, what: str) -> Keeper:
    """Start a keeper, which takes longer than all that follows. Raises SandboxError, naming `what` it is for."""
    ours, theirs = socket.socketpair()
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _BOOT, _PACKAGES, str(theirs.fileno())),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=cwd,
            env={},
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except BaseException as e:
        ours.close()
        if isinstance(e, OSError):
            raise SandboxError(f"cannot start a process for {what!r}: {e.strerror}") from e
        raise
    finally:
        theirs.close()
    return Keeper(process, *await asyncio.open_connection(sock=ours))


def _spec(launch: Launch) -> dict[str, Any]:
    limits = launch.limits
    processes = {resource.RLIMIT_NPROC: limits.processes} if launch.own_user else {}
    return {
        "argv": list(launch.argv),
        "env": launch.env,
        "cwd": str(launch.cwd),
        "reach": list(launch.reach),
        "status_fd": launch.status_fd,
        "seconds": launch.seconds,
        "limits": {
            resource.RLIMIT_CPU: limits.cpu_seconds,
            resource.RLIMIT_DATA: limits.reserved_bytes or 2 * limits.memory_bytes,  # what is filled is watched
            resource.RLIMIT_FSIZE: limits.file_bytes,
            **processes,
            resource.RLIMIT_NOFILE: limits.open_files,
            resource.RLIMIT_CORE: 0,
        },
        "watch": {
            "processes": limits.processes,
            "memory": limits.memory_bytes,
            "disk": limits.workspace_bytes,
            "folder": str(launch.folder),
        },
    }
