"""Episodes in sandboxes elsewhere: the same as on this machine, byte for byte, and typed faults when they break."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from occamy.capture.server import ProxyServer
from occamy.contracts.capture import CaptureRules
from occamy.contracts.episode import Outcome, QuarantineReason
from occamy.contracts.record import canonical_json
from occamy.contracts.release import load_release
from occamy.contracts.task import FieldSpec, TaskContract, WorldSpec
from occamy.harness.assignment import AgentRun, Assignment, Harness
from occamy.harness.client import open_http
from occamy.harness.loading import load
from occamy.rollout.config import RolloutConfig
from occamy.rollout.episode import EpisodeResult, Place, run_episode
from occamy.rollout.evidence import Evidence
from occamy.rollout.jobs import make_jobs
from occamy.rollout.oracle import OracleTeacher
from occamy.rollout.replay import replay_state
from occamy.rollout.workspace import LiveWorld, SandboxWorkspace
from occamy.sandboxes.config import Limits, LocalSandboxConfig
from occamy.sandboxes.local import LocalBackend
from occamy.sandboxes.protocol import LeaseExpired, Sandbox, SandboxBackend, SandboxDied, WorkspaceRefused
from occamy.worlds.workspace import FolderWorkspace, MemoryWorkspace
from occamy.worlds.world import World

SPEC = WorldSpec(services={"crm": {"visits": FieldSpec(kind="int")}}, records={"crm": {"A01": {"visits": 4}}})
Before = Callable[[str, int], Awaitable[None]]
"""Is told what is asked of a sandbox, and for the how manieth time; raises what goes wrong."""


class Elsewhere:
    """A sandbox as a pod is one: no folder on this machine, and it may fail at any call."""

    def __init__(self, inner: Sandbox, before: Before) -> None:
        self._inner, self._before = inner, before
        self._asked: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "workspace":
            raise AttributeError(name)
        call = getattr(self._inner, name)

        async def asked(*arguments: Any, **named: Any) -> Any:
            count = self._asked[name] = self._asked.get(name, 0) + 1
            await self._before(name, count)
            result = await call(*arguments, **named)
            await self._before(f"after {name}", count)
            return result

        return asked


class Cloud:
    """Leases of a local backend, given as sandboxes elsewhere."""

    def __init__(self, inner: LocalBackend, before: Before) -> None:
        self._inner, self._before, self.isolation = inner, before, inner.isolation

    async def lease(self, pool: str, owner: str, deadline_s: float, **terms: Sequence[Any]) -> Any:
        return Elsewhere(await self._inner.lease(pool, owner, deadline_s, **terms), self._before)

    async def close(self) -> None:
        await self._inner.close()


@pytest.fixture(scope="module")
def task(release: Path) -> TaskContract:
    """One that starts with a file, and reads and writes others."""
    tasks = load_release(release).select(pool="long")
    return next(t for t in tasks if t.world.files and any(c.name == "file_write" for c in t.grading.reference))


def attempt(
    task: TaskContract, checkpoint: Path, folder: Path, before: Before | None = None, harness: Harness | None = None
) -> tuple[EpisodeResult, Evidence]:
    """One attempt of the oracle: on this machine, or elsewhere."""
    [job] = make_jobs([task], trials=1, seed=1, sampled_by="teacher", temperature=0.0, model="oracle")
    teacher, config = OracleTeacher(0.0), RolloutConfig()
    teacher.enrol(job)

    async def run(proxy: ProxyServer) -> tuple[EpisodeResult, Evidence]:
        backend: SandboxBackend = LocalBackend(folder / "leases", config.sandbox)
        if before is not None:
            backend = Cloud(backend, before)
        async with open_http() as http:
            place = Place(proxy, harness or load("react"), http, backend, config, tools=None, programs=None)
            done = await run_episode(job, place)
        await backend.close()
        return done

    folder.mkdir()
    with ProxyServer(folder, checkpoint, engine_url=None, teacher=teacher) as proxy:
        return asyncio.run(run(proxy))


class Leaving:
    """A harness whose agent, at its end, leaves a file under a path that no system call takes."""

    def __init__(self, leases: Path) -> None:
        self._inner, self._leases = load("react"), leases

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def run(self, task: Assignment) -> AgentRun:
        run = await self._inner.run(task)
        [folder] = [os.open(p, os.O_RDONLY) for p in self._leases.rglob("workspace") if p.is_dir()]
        for _ in range(20):
            os.mkdir("d" * 255, dir_fd=folder)
            inner = os.open("d" * 255, os.O_RDONLY, dir_fd=folder)
            os.close(folder)
            folder = inner
        os.close(os.open("f", os.O_CREAT, dir_fd=folder))
        os.close(folder)
        return run


def test_a_file_too_deep_to_be_read_is_the_agents_fault(task: TaskContract, checkpoint: Path, tmp_path: Path) -> None:
    result, _ = attempt(task, checkpoint, tmp_path / "a", harness=Leaving(tmp_path / "a" / "leases"))
    assert (result.record.outcome, result.record.quarantine) == (Outcome.agent_failed, None)
    assert "a file lies too deep to be read" in result.record.error


def test_more_than_can_be_kept_as_evidence_is_the_agents_fault(
    task: TaskContract, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = attempt(task, checkpoint, tmp_path / "whole")
    calls = sum(len(event.response) + len(str(event.arguments)) for event in whole.events)
    for name, most, events in (("files", calls, whole.events), ("calls", calls - 1, ())):
        monkeypatch.setattr("occamy.rollout.episode._MOST_CHARACTERS", most)
        result, evidence = attempt(task, checkpoint, tmp_path / name)
        record = result.record
        assert (record.outcome, record.quarantine, record.reward) == (Outcome.agent_failed, None, 0.0)
        assert f"characters of files and of answers of tools; at most {most} are graded" in record.error
        assert (evidence.state, tuple(evidence.events), evidence.goals_met) == ({}, tuple(events), ())
        assert not events or replay_state(record, evidence, task) == []


def test_an_episode_elsewhere_is_the_same_as_here_byte_for_byte(
    task: TaskContract, checkpoint: Path, tmp_path: Path
) -> None:
    asked: list[str] = []

    async def before(name: str, _: int) -> None:
        asked.append(name)

    here, seen_here = attempt(task, checkpoint, tmp_path / "a")
    there, seen_there = attempt(task, checkpoint, tmp_path / "b", before)
    assert (here.record.outcome, here.record.score, here.record.success) == (Outcome.completed, 1.0, True)
    assert here.record.model_copy(update={"wall_seconds": there.record.wall_seconds}) == there.record
    assert here.record.final_fingerprint == there.record.final_fingerprint != ""
    assert canonical_json(asdict(seen_here) | {"trace": []}) == canonical_json(asdict(seen_there) | {"trace": []})
    assert [s.tokens.tolist() for s in here.segments] == [s.tokens.tolist() for s in there.segments]
    for record, evidence in ((here.record, seen_here), (there.record, seen_there)):
        assert replay_state(record, evidence, task) == []
    calls = [name for name in asked if not name.startswith("after")]
    assert calls.index("write") < calls.index("freeze")
    assert calls[calls.index("freeze") :] == ["freeze", "snapshot", "release"]  # graded is what stood still


@pytest.mark.parametrize(
    ("place", "count", "kind", "outcome"),
    [
        ("write", 1, SandboxDied, Outcome.infra_failed),  # the world's own file
        ("write", 2, SandboxDied, Outcome.infra_failed),  # a tool call
        ("after write", 2, SandboxDied, Outcome.infra_failed),  # it arrived, and nobody knows
        ("write", 2, LeaseExpired, Outcome.timed_out),
        ("freeze", 1, SandboxDied, Outcome.infra_failed),
        ("freeze", 1, LeaseExpired, Outcome.infra_failed),  # the agent was done in time
        ("snapshot", 1, SandboxDied, Outcome.infra_failed),  # the final state
        ("snapshot", 1, LeaseExpired, Outcome.infra_failed),
        ("snapshot", 1, ConnectionResetError, Outcome.infra_failed),
        ("snapshot", 1, WorkspaceRefused, Outcome.agent_failed),
    ],
)
def test_a_sandbox_that_fails_is_a_typed_outcome_and_never_a_reward_of_zero(
    place: str,
    count: int,
    kind: type[Exception],
    outcome: Outcome,
    task: TaskContract,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    released: list[str] = []

    async def before(name: str, number: int) -> None:
        if (name, number) == (place, count):
            raise kind("the pod is gone")
        if name == "after release":
            released.append(name)

    result, evidence = attempt(task, checkpoint, tmp_path / "a", before)
    record = result.record
    assert record.outcome is outcome and "the pod is gone" in record.error
    if outcome is Outcome.infra_failed:
        assert record.quarantine is QuarantineReason.infra_failed
    assert (record.score, record.success, record.final_fingerprint, evidence.state) == (0.0, False, "", {})
    assert evidence.goals_met == () and replay_state(record, evidence, task) == []
    assert released == ["after release"]


class Hasty:
    """Ends while a call of its own is under way."""

    manifest, digest, rules = Limits(), "sha256:0", CaptureRules()

    def __init__(self) -> None:
        self.writing = asyncio.Event()

    async def run(self, task: Assignment) -> AgentRun:
        arguments = ("file_write", '{"path":"late","text":"1"}')
        threading.Thread(target=task.dispatch, args=arguments).start()
        await self.writing.wait()
        return AgentRun(Outcome.completed, answer="done", turns=1)


def test_a_call_under_way_when_the_agent_ends_is_part_of_what_is_graded(
    task: TaskContract, checkpoint: Path, tmp_path: Path
) -> None:
    harness, asked = Hasty(), []

    async def before(name: str, count: int) -> None:
        asked.append(name)
        if name == "write" and count > len(task.world.files):
            harness.writing.set()
            await asyncio.sleep(0.1)  # time for a freeze that does not wait

    result, evidence = attempt(task, checkpoint, tmp_path / "a", before, harness)
    assert asked[asked.index("freeze") - 1] == "after write"
    assert [(e.name, e.ok) for e in evidence.events] == [("file_write", True)]
    assert evidence.state["files"]["late"] == "1" and "file late" in evidence.forbidden
    assert [f.name for f in replay_state(result.record, evidence, task)] == []


@contextlib.contextmanager
def workspaces(folder: Path) -> Iterator[Callable[[], SandboxWorkspace]]:
    """Makes workspaces behind an event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    backend = LocalBackend(folder, LocalSandboxConfig())

    def fresh() -> SandboxWorkspace:
        return SandboxWorkspace(asyncio.run_coroutine_threadsafe(backend.lease("p", "o", 600.0), loop).result(), loop)

    try:
        yield fresh
    finally:
        asyncio.run_coroutine_threadsafe(backend.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


PARTS = st.sampled_from(
    ["a", "b", "c.txt", "é" * 127, "é" * 128, "a" * 256, "", ".", "..", "x\0", ".hidden me\n", "%2e"]
)
PATHS = st.one_of(
    st.lists(PARTS, min_size=1, max_size=3).map("/".join),
    st.sampled_from(["/etc/passwd", "a/" * 40 + "a", "a/" * 9000 + "a", "é" * 9000]),
)
CALLS = st.one_of(
    st.tuples(st.just("file_read"), st.fixed_dictionaries({"path": PATHS})),
    st.tuples(st.just("file_write"), st.fixed_dictionaries({"path": PATHS, "text": st.text(max_size=5)})),
    st.just(("file_list", {})),
)


def test_any_calls_answer_and_change_the_same_wherever_the_files_are(tmp_path: Path) -> None:
    with workspaces(tmp_path / "leases") as fresh:
        numbers = iter(range(10**6))

        @settings(max_examples=60, deadline=None)
        @given(st.lists(CALLS, max_size=12))
        def same(calls: list[tuple[str, dict[str, str]]]) -> None:
            folder = tmp_path / f"folder{next(numbers)}"
            folder.mkdir()
            worlds = [World(SPEC, w) for w in (MemoryWorkspace(), FolderWorkspace(folder), fresh())]
            for name, arguments in calls:
                said = [world.call(name, json.dumps(arguments)) for world in worlds]
                assert said[0] == said[1] == said[2]
            states = [world.state() for world in worlds]
            assert states[0] == states[1] == states[2]

        same()


def test_what_an_agent_left_behind_has_a_text_or_is_no_file(tmp_path: Path) -> None:
    with workspaces(tmp_path / "leases") as fresh:
        elsewhere = fresh()
        elsewhere.write("a", "1")
        root = next((tmp_path / "leases").rglob("workspace"))
        (root / "raw").write_bytes(b"\xff1")
        (root / "link").symlink_to("raw")
        (root / "away").symlink_to("/etc")
        (root / "folder").mkdir()
        (root / "n\udcff").write_bytes(b"")
        assert elsewhere.list() == ["a", "raw"] and elsewhere.read("raw") == "\\xff1"
        assert elsewhere.texts() == FolderWorkspace(root).texts() == {"a": "1", "raw": "\\xff1"}
        for path in ("link", "folder", "away/passwd", "none"):
            with pytest.raises(FileNotFoundError):
                elsewhere.read(path)
        with pytest.raises(ValueError, match="symbolic link"):
            elsewhere.write("away/x", "1")
        for path in ("folder", "away/passwd", "none"):
            with pytest.raises(FileNotFoundError):
                elsewhere.remove(path)
        elsewhere.write("link", "2")
        assert elsewhere.read("link") == "2" and elsewhere.read("raw") == "\\xff1"


class Slow(MemoryWorkspace):
    """Writes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def write(self, path: str, text: str) -> None:
        self.asked.set()
        self.go.wait()
        super().write(path, text)


def test_a_call_that_nobody_waits_for_any_more_is_done_before_the_end_and_none_comes_after_it() -> None:
    workspace = Slow()
    world = LiveWorld(World(SPEC, workspace), check=lambda: None)
    given_up = threading.Thread(target=world.call, args=("file_write", '{"path":"f","text":"1"}'))

    async def body() -> dict[str, Any]:
        given_up.start()
        await asyncio.to_thread(workspace.asked.wait)
        ending = asyncio.create_task(world.end())
        await asyncio.sleep(0)
        assert not ending.done()
        workspace.go.set()
        await ending
        with pytest.raises(RuntimeError, match="the episode has ended; file_write was not called"):
            world.call("file_write", '{"path":"late","text":"1"}')
        return await world.state()

    assert asyncio.run(body())["files"] == {"f": "1"}
    given_up.join()
    assert [(e.name, e.ok) for e in world.events] == [("file_write", True)]
