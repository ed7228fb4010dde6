"""The launcher: gives an agent program its configuration, runs it to its end, and reads the ending."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from occamy import __version__
from occamy.contracts.episode import Outcome
from occamy.contracts.record import Record, digest_bytes
from occamy.harness.adapters.declaration import Adapter, Command, Service, fill
from occamy.harness.adapters.ending import Ended, read_ending
from occamy.harness.adapters.program import installed_version, program_folder, readable
from occamy.harness.adapters.served import ServedTools
from occamy.harness.adapters.service import drive
from occamy.harness.assignment import AgentRun, Assignment, Outside

if TYPE_CHECKING:
    from occamy.worlds.mcp import ToolAccess

_STALL_S = 30.0
"""A tool call pending this long when wall time ends is an infrastructure fault (our choice, as for compositions)."""


class AdapterManifest(Record):
    """What runs, in full. Written before the rollout; its digest stands in every episode record."""

    adapter: Adapter
    program_version: str
    """Version found on this machine."""
    scripts: dict[str, str]
    """Digest of each script that goes into the private home."""
    code_version: str
    """Version of this package, which holds the launcher."""


class AdapterHarness:
    """An agent program behind its declaration. Satisfies `Harness`."""

    def __init__(self, adapter: Adapter, here: Path) -> None:
        """`here` is the folder of the declaration. Raises ProgramMissing, and FileNotFoundError for a script."""
        names = adapter.launch.scripts if isinstance(adapter.launch, Command) else ()
        self._scripts = {name: (here / name).read_bytes() for name in names}
        self.adapter = adapter
        self.manifest = AdapterManifest(
            adapter=adapter,
            program_version=installed_version(adapter),
            scripts={name: digest_bytes(data) for name, data in self._scripts.items()},
            code_version=__version__,
        )
        self.digest = self.manifest.digest()
        self.rules = adapter.capture

    @property
    def readable(self) -> list[Path]:
        """Folders that its sandbox must let it read."""
        return readable(self.adapter)

    @property
    def startup_seconds(self) -> float:
        """Wall time on top of a task's budget."""
        return self.adapter.launch.startup_seconds if isinstance(self.adapter.launch, Command) else 0.0

    def check_context(self, limit: int) -> None:
        """Raise ValueError when the program does not run within a context limit, tokens."""
        if limit < self.adapter.minimum_context:
            raise ValueError(
                f"harness {self.adapter.name} runs with a context of {self.adapter.minimum_context} tokens or more, "
                f"rollout.context_limit is {limit}; raise it"
            )

    async def run(self, task: Assignment) -> AgentRun:
        """Run the program to its end: see `read_ending` for the outcomes.

        timed_out also when the tool calls are used up; infra_failed also when a tool broke or hung. Raises
        SandboxError, and ValueError when the assignment gives it no place of its own.
        """
        if task.outside is None:
            raise ValueError(f"harness {self.adapter.name} is a program of its own: give the assignment its outside")
        run = AgentRun()
        tools = ServedTools(task, run)
        with task.outside.tools.serve(task.outside.episode_id, task.tools, tools.call) as access:
            playing = asyncio.create_task(self._play(task, task.outside, access))
            out_of_budget = asyncio.create_task(tools.used_up.wait())
            try:
                await asyncio.wait((playing, out_of_budget), return_when=asyncio.FIRST_COMPLETED)
                ended = _budget_ended(task) if out_of_budget.done() else playing.result()
            finally:
                pending = tools.pending()
                await _end(playing, out_of_budget)
        if ended.outcome is Outcome.timed_out and pending >= _STALL_S:
            ended = Ended(Outcome.infra_failed, error=f"a tool call was pending for {pending:.0f} s at the deadline")
        if tools.broken:
            ended = Ended(Outcome.infra_failed, error=tools.broken)
        run.outcome, run.answer, run.error = ended
        return run

    async def _play(self, task: Assignment, outside: Outside, access: ToolAccess) -> Ended:
        if isinstance(self.adapter.launch, Service):
            return await drive(self.adapter.launch, task, access)
        return await self._execute(self.adapter.launch, task, outside, access)

    async def _execute(self, launch: Command, task: Assignment, outside: Outside, access: ToolAccess) -> Ended:
        sandbox = outside.sandbox
        home = (await sandbox.exec(["sh", "-c", 'printf %s "$HOME"'])).stdout.decode()
        places = self._places(task, access, home, str(sandbox.workspace))
        config = {path: _written(path, fill(data, places)) for path, data in launch.config.items()}
        await sandbox.exec(["tar", "-xf", "-", "-C", home], stdin=_packed(config | self._scripts))
        result = await sandbox.exec(
            fill(launch.argv, places),
            env=fill(launch.env, places),
            timeout_s=task.budget.wall_seconds + launch.startup_seconds,
        )
        report: bytes | None = None
        if self.adapter.ending.report and result.outcome is not Outcome.timed_out:
            read = await sandbox.exec(["cat", f"{home}/{self.adapter.ending.report}"])
            report = read.stdout if read.exit_code == 0 else None
        return read_ending(self.adapter.ending, result, report)

    def _places(self, task: Assignment, access: ToolAccess, home: str, workspace: str) -> dict[str, Any]:
        return {
            "request": task.request,
            "base": task.base_url.removesuffix("/root/v1"),
            "key": task.api_key,
            "model": task.model,
            "temperature": task.temperature,
            "max_new_tokens": task.max_new_tokens,
            "context_limit": task.context_limit,
            "tools_url": access.url,
            "tools_key": access.key,
            "home": home,
            "workspace": workspace,
            "program": str(program_folder(self.adapter.name)),
            "python": sys.executable,
            "turns": task.budget.turns,
            "tool_calls": task.budget.tool_calls,
            "wall_seconds": task.budget.wall_seconds,
        }


def _budget_ended(task: Assignment) -> Ended:
    return Ended(Outcome.timed_out, error=f"budget of {task.budget.tool_calls} tool_calls is used up")


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _written(path: str, data: Any) -> bytes:
    """A configuration file: JSON or YAML by its suffix, text as it is."""
    if path.endswith(".json"):
        return json.dumps(data, indent=1).encode()
    if path.endswith((".yaml", ".yml")):
        return yaml.safe_dump(data, allow_unicode=True, sort_keys=False).encode()
    return str(data).encode()


def _packed(files: dict[str, bytes]) -> bytes:
    """A tar archive: one command writes all files, on any sandbox."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(data), 0o600
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
