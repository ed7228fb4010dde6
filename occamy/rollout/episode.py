"""One episode: lease, world, harness behind the recording proxy, freeze, export, grade outside, record."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
from yarl import URL

from occamy.capture.segments import CapturedEpisode
from occamy.capture.server import ProxyServer
from occamy.contracts.episode import EpisodeRecord, Outcome, QuarantineReason, Segment
from occamy.contracts.record import digest
from occamy.harness.adapters.launch import AdapterHarness
from occamy.harness.assignment import AgentRun, Assignment, Harness, Outside, Programs
from occamy.rollout.config import RolloutConfig
from occamy.rollout.evidence import Evidence
from occamy.rollout.grading import Grade, grade
from occamy.rollout.jobs import EpisodeJob
from occamy.rollout.workspace import LiveWorld, open_world
from occamy.sandboxes.protocol import LeaseExpired, Sandbox, SandboxBackend, SandboxError, WorkspaceRefused
from occamy.worlds.tools import tool_schemas
from occamy.worlds.world import Event

if TYPE_CHECKING:  # an extra that only agent programs need
    from occamy.worlds.mcp import ToolServer

_POOL = "cowork"
"""Pool that agents' sandboxes come from, where there are pools, unless the sandbox section names another."""
_ROOT = "root"
_GRACE_S = 60.0  # a lease outlives the task's wall budget by this much, for export and release


@dataclass(frozen=True)
class Place:
    """Where episodes of a session run."""

    proxy: ProxyServer
    harness: Harness
    http: aiohttp.ClientSession
    sandboxes: SandboxBackend
    config: RolloutConfig
    tools: ToolServer | None
    """Where an agent program finds the tools of its world; None for harnesses of this process."""
    programs: Programs | None
    """Agent programs that sandboxes have of their own; None where they see those of this machine."""


@dataclass(frozen=True)
class EpisodeResult:
    """A finished attempt."""

    record: EpisodeRecord
    segments: list[Segment]
    """Token histories in order of run and index; none are trainable when the record is quarantined."""


async def run_episode(job: EpisodeJob, place: Place) -> tuple[EpisodeResult, Evidence]:
    """Run one attempt to its record. Faults of infrastructure give the outcome infra_failed, quarantined and unscored.

    Raises what is nobody's fault at run time: WorldError for a contract that cannot be built.
    """
    began = time.monotonic()
    key = place.proxy.open_episode(
        job.episode_id,
        sampled_by=job.sampled_by,
        seed=job.seed,
        rules=place.harness.rules,
        budget=job.task.meta.budget if isinstance(place.harness, AdapterHarness) else None,
    )
    try:
        run, state, events = await _act(job, place, key)
    except BaseException:  # cancelled, or a contract that cannot be built: leave the id free for another try
        place.proxy.close_episode(job.episode_id)
        raise
    captured = place.proxy.close_episode(job.episode_id)
    if isinstance(place.harness, AdapterHarness):
        run = _as_the_proxy_saw(run, captured)
    if (size := _characters(state, events)) > _MOST_CHARACTERS:
        if run.outcome is not Outcome.infra_failed:
            why = f"{size} characters of files and of answers of tools; at most {_MOST_CHARACTERS} are graded"
            run = dataclasses.replace(run, outcome=Outcome.agent_failed, error=why)
        state, events = {}, events if _characters({}, events) <= _MOST_CHARACTERS else ()
    unscored = run.outcome is Outcome.infra_failed or not state
    judged = _UNSCORED if unscored else grade(job.task, state, events, run.answer, run.outcome is Outcome.completed)
    seconds = time.monotonic() - began
    record = _record(job, place, run, captured, judged, digest(state) if state else "", seconds)
    logged = not isinstance(place.harness, AdapterHarness)  # an agent program has a shell in the workspace
    evidence = Evidence(state, events, run.trace, run.answer, judged.goals_met, judged.forbidden, logged_files=logged)
    return EpisodeResult(record, captured.segments), evidence


_UNSCORED = Grade(score=0.0, success=False, goals_met=(), forbidden=())
_MOST_CHARACTERS = 100_000_000
"""What one episode may leave behind. Our choice; JSON writes at most six bytes for each, and SQLite's largest row,
which holds them as evidence, has 10^9."""


def _characters(state: dict[str, Any], events: Sequence[Event]) -> int:
    """Size of what an agent can make large: texts of files, and what tools answered and were asked."""
    files = sum(map(len, state.get("files", {}).values()))
    return files + sum(len(event.response) + len(str(event.arguments)) for event in events)


async def _act(job: EpisodeJob, place: Place, key: str) -> tuple[AgentRun, dict[str, Any], Sequence[Event]]:
    """Let the agent act. Returns its run, the final state ({} when it cannot be trusted) and the event log."""
    sandbox: Sandbox | None = None
    world: LiveWorld | None = None
    run = AgentRun()
    try:
        sandbox = await _lease(job, place)
        world = await open_world(job.task.world, sandbox)
        run = await place.harness.run(_assignment(job, place, key, world, sandbox))
        await world.end()
        return run, await _export(world, sandbox), world.events
    except (SandboxError, OSError) as e:
        outcome = e.outcome if isinstance(e, SandboxError) else Outcome.infra_failed
        run = dataclasses.replace(run, outcome=outcome, error=f"{type(e).__name__}: {e}")
        return run, {}, world.events if world is not None else ()
    finally:
        if world is not None:
            world.close()
        if sandbox is not None:
            await sandbox.release()


async def _export(world: LiveWorld, sandbox: Sandbox) -> dict[str, Any]:
    """The final state, of a workspace that stands still.

    Raises SandboxError: the agent is done, so the time that is used up here is not its own, but the names of files are.
    """
    try:
        await sandbox.freeze()
        return await world.state()
    except LeaseExpired as e:
        raise SandboxError(f"the final state was not read in time: {e}") from e
    except OSError as e:
        if not isinstance(e, FileNotFoundError) and e.errno != errno.ENAMETOOLONG:
            raise
        raise WorkspaceRefused(f"a file lies too deep to be read: {str(e)[:200]}") from e


async def _lease(job: EpisodeJob, place: Place) -> Sandbox:
    """A sandbox for the episode; one that an agent program runs in has to reach its model and its tools."""
    wall = job.task.meta.budget.wall_seconds + _GRACE_S
    if place.tools is None or not isinstance(place.harness, AdapterHarness) or not place.harness.in_sandbox:
        return await place.sandboxes.lease(_POOL, job.episode_id, wall)
    proxy = URL(place.proxy.url)
    assert proxy.host is not None and proxy.port is not None
    return await place.sandboxes.lease(
        _POOL,
        job.episode_id,
        wall + place.harness.startup_seconds,
        reach=[(proxy.host, proxy.port), place.tools.address],
        readable=place.harness.readable if place.programs is None else (),
    )


def _as_the_proxy_saw(run: AgentRun, captured: CapturedEpisode) -> AgentRun:
    """What an agent program cannot tell of its own run: its turns, and whether it was the endpoint that failed it.

    A program that ended without a single turn never acted, which is an infrastructure fault too.
    """
    turns = len({turn.ordinal for turn in captured.turns if turn.run == _ROOT})
    rewrites = sum(segment.closed_by != "end" for segment in captured.segments if segment.run == _ROOT)
    run = dataclasses.replace(run, turns=turns, compactions=rewrites)
    if captured.quarantine is QuarantineReason.infra_failed:
        return dataclasses.replace(run, outcome=Outcome.infra_failed, error=f"the endpoint failed: {run.error}")
    if turns == 0 and run.outcome is not Outcome.infra_failed:
        return dataclasses.replace(run, outcome=Outcome.infra_failed, error=f"no turn was sampled: {run.error}")
    return run


def _assignment(job: EpisodeJob, place: Place, key: str, world: LiveWorld, sandbox: Sandbox) -> Assignment:
    outside: Outside | None = None
    if place.tools is not None:
        watch = partial(place.proxy.watch, job.episode_id)
        outside = Outside(job.episode_id, sandbox, place.programs, place.tools, watch)
    return Assignment(
        request=job.task.request,
        tools=tool_schemas(job.task.world, job.task.tools),
        dispatch=world.call,
        tools_may_block=world.may_block,
        budget=job.task.meta.budget,
        base_url=f"{place.proxy.url}/episodes/{job.episode_id}/root/v1",
        api_key=key,
        model=job.model,
        temperature=job.temperature,
        max_new_tokens=place.config.max_new_tokens,
        http=place.http,
        context_limit=place.config.context_limit,
        outside=outside,
    )


def _record(
    job: EpisodeJob,
    place: Place,
    run: AgentRun,
    captured: CapturedEpisode,
    judged: Grade,
    fingerprint: str,
    seconds: float,
) -> EpisodeRecord:
    failed = run.outcome is Outcome.infra_failed
    rewarded = run.outcome is Outcome.completed or (not place.config.reward_needs_completion and not failed)
    oldest, newest = _versions(captured.segments)
    meta = job.task.meta
    return EpisodeRecord(
        episode_id=job.episode_id,
        task_id=meta.task_id,
        task_digest=job.task.digest(),
        pool=meta.pool,
        split=meta.split,
        trial=job.trial,
        seed=job.seed,
        sampled_by=job.sampled_by,
        outcome=run.outcome,
        score=judged.score,
        reward=judged.score if rewarded else 0.0,
        success=judged.success,
        steps=run.turns,
        tool_calls=run.tool_calls,
        failed_calls=run.failed_calls,
        segments=len(captured.segments),
        input_tokens=sum(t.input_tokens for t in captured.turns),
        cached_tokens=sum(t.cached_tokens for t in captured.turns),
        output_tokens=sum(t.output_tokens for t in captured.turns),
        wall_seconds=seconds,
        harness_digest=place.harness.digest,
        final_fingerprint=fingerprint,
        model=job.model,
        version_min=oldest,
        version_max=newest,
        quarantine=QuarantineReason.infra_failed if failed else captured.quarantine,
        error=run.error,
    )


def _versions(segments: Sequence[Segment]) -> tuple[int, int]:
    """Oldest and newest weight version among sampled tokens, (-1, -1) when there are none."""
    sampled = [s.versions[s.versions >= 0] for s in segments]
    known = np.concatenate(sampled) if sampled else np.empty(0, np.int32)
    return (int(known.min()), int(known.max())) if known.size else (-1, -1)
