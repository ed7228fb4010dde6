"""The launcher: gives an agent program its configuration, runs it to its end, and reads the ending."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from occamy import __version__
from occamy.contracts.episode import Outcome
from occamy.contracts.record import Record, digest_bytes
from occamy.harness.adapters.declaration import Adapter, Command, Service, fill
from occamy.harness.adapters.ending import Ended, read_ending
from occamy.harness.adapters.program import (
    installed_version,
    program_folder,
    readable,
    stated_version,
    this_python,
)
from occamy.harness.adapters.served import ServedTools
from occamy.harness.adapters.service import drive
from occamy.harness.assignment import AgentRun, Assignment, Outside, Watched
from occamy.sandboxes.protocol import SandboxError

if TYPE_CHECKING:
    from occamy.worlds.mcp import ToolAccess

_WATCH_S = 0.25
"""How often the budget is looked at; the proxy and the tool server refuse calls beyond it at once (our choice)."""
_LOOK = 'printf "%s\\n" "$HOME" "$PWD"; [ -z "$1" ] || { cd "$0" && cat $1; }'
"""Tells where a program is at home, and works; then what its version file, a glob below its folder, says."""


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
    def in_sandbox(self) -> bool:
        """Whether its program runs in the episode's sandbox."""
        return isinstance(self.adapter.launch, Command)

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

        timed_out also when a budget is used up, or when it broke down over the context limit; infra_failed also when a
        tool broke, or when wall time ended while the endpoint, a tool or the program itself hung. Raises SandboxError,
        and ValueError when the assignment gives it no place of its own.
        """
        if task.outside is None:
            raise ValueError(f"harness {self.adapter.name} is a program of its own: give the assignment its outside")
        run, outside = AgentRun(), task.outside
        tools = ServedTools(task, run)
        with outside.tools.serve(outside.episode_id, task.tools, tools.call) as access:
            playing = asyncio.create_task(self._play(task, outside, access))
            try:
                await _ended_or(playing, lambda: bool(tools.used_up or outside.watch().used_up))
                if used_up := tools.used_up or outside.watch().used_up:
                    ended = Ended(Outcome.timed_out, error=used_up)
                else:
                    ended = playing.result()
                    if ended.outcome is Outcome.timed_out and (hung := self._hung(tools, outside.watch())):
                        ended = Ended(Outcome.infra_failed, error=f"{hung} when wall time ended")
                    elif ended.outcome is Outcome.infra_failed and (too_long := outside.watch().too_long):
                        ended = Ended(Outcome.timed_out, error=too_long)
            finally:
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
        if tools.broken:
            ended = Ended(Outcome.infra_failed, error=tools.broken)
        run.outcome, run.answer, run.error = ended
        return run

    def _hung(self, tools: ServedTools, model: Watched) -> str:
        """What kept the program from going on for so long that it is not the policy's doing, "" if nothing did."""
        stall = self.adapter.stall_seconds
        if model.pending >= stall:
            return f"a model call was pending for {model.pending:.0f} s"
        if tools.pending() >= stall:
            return f"a tool call was pending for {tools.pending():.0f} s"
        idle = min(model.idle, tools.idle())
        busy = model.pending or tools.pending() or self.adapter.tools.others
        return "" if busy or idle < stall else f"the program had been idle for {idle:.0f} s"

    async def _play(self, task: Assignment, outside: Outside, access: ToolAccess) -> Ended:
        if isinstance(self.adapter.launch, Service):
            return await drive(self.adapter.launch, task, access)
        return await self._execute(self.adapter.launch, task, outside, access)

    async def _execute(self, launch: Command, task: Assignment, outside: Outside, access: ToolAccess) -> Ended:
        sandbox = outside.sandbox
        there = await self._look(launch, outside)
        places, home = self._places(task, access) | there, there["home"]
        config = {path: _written(path, fill(data, places)) for path, data in launch.config.items()}
        unpacked = await sandbox.exec(["tar", "-xf", "-", "-C", home], stdin=_packed(config | self._scripts))
        if unpacked.exit_code != 0:
            return Ended(Outcome.infra_failed, error=f"no home for the program: {unpacked.stderr.decode()[-200:]}")
        result = await sandbox.exec(
            [str(word) for word in fill(launch.argv, places)],
            env={name: str(value) for name, value in fill(launch.env, places).items()},
            timeout_s=task.budget.wall_seconds + launch.startup_seconds,
        )
        report: bytes | None = None
        if self.adapter.ending.report and result.outcome is not Outcome.timed_out:
            read = await sandbox.exec(["cat", f"{home}/{self.adapter.ending.report}"])
            report = read.stdout if read.exit_code == 0 else None
        return read_ending(self.adapter.ending, result, report)

    async def _look(self, launch: Command, outside: Outside) -> dict[str, str]:
        """Where everything is in the sandbox. Raises SandboxError when its image holds another program."""
        own, name = outside.programs, self.adapter.name
        program = str(program_folder(name)) if own is None else f"{own.folder}/{name}"
        version_file = launch.installed.version_file if launch.installed else ""
        looked = await outside.sandbox.exec(["sh", "-c", _LOOK, program, version_file])
        home, workspace, stated = (*looked.stdout.decode(errors="replace").split("\n", 2), "", "", "")[:3]
        if not workspace:
            raise SandboxError(f"harness {name}: no shell in the sandbox: {looked.stderr[-200:]!r}")
        if launch.installed and own is not None:
            found = stated_version(stated, launch.installed)
            if found != self.adapter.version:
                there = f"version {found}" if found else "no such program"
                raise SandboxError(
                    f"harness {name}: the sandbox has {there} in {program}, the adapter is for "
                    f"{self.adapter.version}; put that into the pool's image, or set rollout.sandbox.programs"
                )
        python = str(this_python()) if own is None else own.python
        return {"home": home, "workspace": workspace, "program": program, "python": python}

    def _places(self, task: Assignment, access: ToolAccess) -> dict[str, Any]:
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
            "turns": task.budget.turns,
            "tool_calls": task.budget.tool_calls,
            "wall_seconds": task.budget.wall_seconds,
        }


async def _ended_or(playing: asyncio.Task[Ended], over: Callable[[], bool]) -> None:
    """Wait until the program has ended, or its budget has."""
    while not (await asyncio.wait((playing,), timeout=_WATCH_S))[0] and not over():
        pass


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
