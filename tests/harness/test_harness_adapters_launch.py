"""The launcher in a real sandbox: what the program finds, where its files lie, and tools that fail it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from occamy.contracts.episode import Outcome
from occamy.contracts.task import Budget, FieldSpec, WorldSpec
from occamy.harness.adapters.declaration import Adapter
from occamy.harness.adapters.launch import AdapterHarness
from occamy.harness.adapters.program import FOLDER, this_python
from occamy.harness.assignment import AgentRun, Assignment, Outside, Programs
from occamy.harness.client import open_http
from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.local import LocalBackend
from occamy.sandboxes.protocol import SandboxError
from occamy.worlds.mcp import ToolServer
from occamy.worlds.tools import tool_names, tool_schemas
from occamy.worlds.workspace import MemoryWorkspace
from occamy.worlds.world import World

SPEC = WorldSpec(
    services={"crm": {"tier": FieldSpec(kind="enum", values=("gold", "iron"))}},
    records={"crm": {"A01": {"tier": "iron"}}},
)
CALL = """
import json, sys, urllib.request
setup = json.load(open(sys.argv[1]))
def call(name, **arguments):
    params = {"name": name, "arguments": arguments}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
    headers = {"Authorization": "Bearer " + setup["key"], "Content-Type": "application/json",
               "Accept": "application/json, text/event-stream"}
    with urllib.request.urlopen(urllib.request.Request(setup["url"], body, headers)) as answer:
        return json.load(answer)["result"]["content"][0]["text"]
"""
SETUP = {"url": "{tools_url}", "key": "{tools_key}", "limit": "{context_limit}", "who": "{model} at {temperature}"}


@dataclass(frozen=True)
class Quiet:
    """A proxy that nobody has called."""

    pending: float = 0.0
    idle: float = 0.0
    used_up: str = ""
    too_long: str = ""


def play(
    folder: Path,
    script: str,
    *,
    dispatch: Callable[[str, str], Any] | None = None,
    config: dict[str, Any] | None = None,
    wall: float = 60.0,
    watch: Callable[[], Any] = Quiet,
    programs: Programs | None = None,
    installed: dict[str, Any] | None = None,
    **adapter: Any,
) -> tuple[AgentRun, World, list[str]]:
    """Run a script as an agent program. Returns its run, the world and the files of its workspace."""
    here = folder / "here"
    here.mkdir()
    (here / "go.py").write_text(script)
    launch = {
        "kind": "command",
        "argv": ["{python}", "{home}/go.py", "{home}/etc/setup.json", "{request}", "{turns}"],
        "env": {"WHO": "{model}", "LIMIT": "{context_limit}"},
        "scripts": ["go.py"],
        "config": {"etc/setup.json": SETUP, **(config or {})},
        "installed": installed,
    }
    declared = {"name": "go", "version": "1", "launch": launch, "stall_seconds": 1.0, **adapter}
    harness = AdapterHarness(Adapter.model_validate(declared), here)
    world = World(SPEC, MemoryWorkspace())

    async def run() -> tuple[AgentRun, list[str]]:
        backend = LocalBackend(folder / "leases", LocalSandboxConfig())
        tools = ToolServer()
        await tools.start()
        images = [Path(programs.folder)] if programs and Path(programs.folder).exists() else []
        sandbox = await backend.lease("p", "e", 120.0, reach=[tools.address], readable=[*harness.readable, *images])
        async with open_http() as http:
            task = Assignment(
                request="do 'this' $HOME {now}",
                tools=tool_schemas(SPEC, tool_names(SPEC)),
                dispatch=dispatch or world.call,
                budget=Budget(turns=9, tool_calls=3, tokens=99, wall_seconds=wall),
                base_url="http://127.0.0.1:9/episodes/e/root/v1",
                api_key="k",
                model="m",
                temperature=0.5,
                max_new_tokens=7,
                http=http,
                context_limit=4096,
                outside=Outside("e", sandbox, programs, tools, watch),
            )
            done = await harness.run(task)
        files = sorted(p.name for p in sandbox.workspace.iterdir())
        await sandbox.release()
        await tools.stop()
        await backend.close()
        return done, files

    done, files = asyncio.run(run())
    return done, world, files


def test_a_program_finds_its_setup_at_home_and_its_tools_over_mcp(tmp_path: Path) -> None:
    script = (
        CALL
        + """
import os
open("made", "w").write("by the agent")
said = [call("crm_update", id="A01", tier="gold"), call("crm_get", id="B")]
print(json.dumps({"said": said, "setup": setup["limit"], "who": setup["who"],
                  "env": os.environ["WHO"] + os.environ["LIMIT"], "asked": sys.argv[2],
                  "turns": sys.argv[3], "yaml": open(os.environ["HOME"] + "/c.yaml").read(),
                  "text": open(os.environ["HOME"] + "/note").read()}))
"""
    )
    config = {"c.yaml": {"limit": "{context_limit}", "é": ["{key}"]}, "note": "for {model}\n"}
    run, world, files = play(tmp_path, script, config=config)
    assert (run.outcome, run.error) == (Outcome.completed, "")
    assert json.loads(run.answer) == {
        "said": ["ok", '{"error":"not_found"}'],
        "setup": 4096,
        "who": "m at 0.5",
        "env": "m4096",
        "asked": "do 'this' $HOME {now}",
        "turns": "9",
        "yaml": "limit: 4096\né:\n- k\n",
        "text": "for m\n",
    }
    assert (run.tool_calls, run.failed_calls) == (2, 1) and files == ["made"]
    assert [e.name for e in world.events] == ["crm_update", "crm_get"]
    assert [t["name"] for t in run.trace if t["kind"] == "tool"] == ["crm_update", "crm_get"]


def test_a_report_is_read_from_home(tmp_path: Path) -> None:
    script = 'import os, json\njson.dump({"failed": True}, open(os.environ["HOME"] + "/r.json", "w"))\nprint("sorry")\n'
    run, _, _ = play(tmp_path, script, ending={"report": "r.json", "failed": "failed"})
    assert (run.outcome, run.error) == (Outcome.agent_failed, "the program reports a failed run: sorry")


def test_a_tool_that_raises_is_infrastructure_whatever_the_program_says(tmp_path: Path) -> None:
    def broken(name: str, arguments: str) -> Any:
        raise OSError("the disk is gone")

    run, _, _ = play(tmp_path, CALL + 'print(call("file_list"))\n', dispatch=broken)
    assert (run.outcome, run.answer) == (Outcome.infra_failed, "")
    assert run.error == "tool file_list failed: OSError: the disk is gone"


def test_a_tool_that_hangs_is_infrastructure(tmp_path: Path) -> None:
    never = threading.Event()
    run, _, _ = play(tmp_path, CALL + 'print(call("file_list"))\n', dispatch=lambda *_: never.wait(), wall=4.0)
    never.set()
    assert run.outcome is Outcome.infra_failed and "a tool call was pending for" in run.error


def test_one_call_too_many_ends_the_program(tmp_path: Path) -> None:
    script = (
        CALL + 'import time\nwhile True:\n    open("n", "a").write(call("file_list") + "\\n")\n    time.sleep(0.01)\n'
    )
    run, world, _ = play(tmp_path, script)
    assert (run.outcome, run.error) == (Outcome.timed_out, "budget of 3 tool_calls is used up")
    assert run.tool_calls == len(world.events) == 3


def test_a_program_with_tools_of_its_own_may_be_busy_with_them(tmp_path: Path) -> None:
    def idle() -> Quiet:
        return Quiet(idle=50.0)

    script = "import time\nwhile True: time.sleep(1)\n"
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    hung, _, _ = play(tmp_path / "a", script, wall=3.0, watch=idle)
    busy, _, _ = play(tmp_path / "b", script, wall=3.0, watch=idle, tools={"others": True})
    assert hung.outcome is Outcome.infra_failed and "had been idle for" in hung.error
    assert busy.outcome is Outcome.timed_out


def test_an_assignment_without_an_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "go.py").write_text("")
    launch = {"kind": "command", "argv": ["true"]}
    adapter = Adapter.model_validate({"name": "go", "version": "1", "launch": launch})
    with pytest.raises(ValueError, match="harness go is a program of its own"):
        asyncio.run(_run_inside(AdapterHarness(adapter, tmp_path)))


async def _run_inside(harness: AdapterHarness) -> None:
    budget = Budget(turns=1, tool_calls=1, tokens=1)
    async with open_http() as http:
        await harness.run(Assignment("r", [], lambda *_: None, budget, "u/root/v1", "k", "m", 1.0, 1, http))  # type: ignore


def test_a_sandbox_with_programs_of_its_own_is_asked_for_their_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, version in (("here", "1"), ("image", "1"), ("other", "2")):
        (tmp_path / "programs" / place / "go").mkdir(parents=True)
        (tmp_path / "programs" / place / "go" / "VERSION-x").write_text(f"go\nversion {version}\n")
    monkeypatch.setenv(FOLDER, str(tmp_path / "programs" / "here"))
    installed = {"version_file": "VERSION-*", "version_pattern": r"^version (\S+)", "steps": []}

    def said(name: str) -> str:
        (tmp_path / name).mkdir()
        programs = Programs(str(this_python()), str(tmp_path / "programs" / name))
        script = "import json, sys\nprint(json.load(open(sys.argv[1]))['at'])\n"
        setup = {"etc/setup.json": {"at": "{program}"}}
        run, _, _ = play(tmp_path / name, script, config=setup, programs=programs, installed=installed)
        return run.answer

    assert said("image") == f"{tmp_path}/programs/image/go"
    for name, found in (("other", "version 2"), ("none", "no such program")):
        with pytest.raises(SandboxError, match=f"has {found} in .*/{name}/go, the adapter is for 1"):
            said(name)
