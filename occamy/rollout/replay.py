"""State replay: the logged tool calls, made again from the initial world, must answer and change the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from occamy.capture.ledger import LedgerTurn
from occamy.contracts.episode import EpisodeRecord, Outcome, QuarantineReason
from occamy.contracts.record import canonical_json, digest
from occamy.contracts.task import TaskContract
from occamy.rollout.evidence import Evidence
from occamy.rollout.grading import Grade, grade
from occamy.worlds.tools import FILE_TOOLS
from occamy.worlds.workspace import MemoryWorkspace
from occamy.worlds.world import WORLD_VERSION, Event, World, WorldError, decode_arguments

_SHOWN = 120
"""Characters of a value that a message shows."""


class Drift(StrEnum):
    """What a replay found to be otherwise than recorded."""

    contract = "contract"
    world_version = "world_version"
    clock = "clock"
    tool_result = "tool_result"
    fingerprint = "fingerprint"
    final_state = "final_state"
    missing_call = "missing_call"
    grade = "grade"


@dataclass(frozen=True)
class StateFinding:
    """One thing that is not as it was recorded."""

    kind: Drift
    episode_id: str
    call: int
    """Ordinal of the tool call, from 0; -1 when it concerns the whole episode."""
    name: str
    """The call as ``crm_get {"id":"A01"}``, or the place in the final state."""
    recorded: str
    replayed: str

    @property
    def reason(self) -> QuarantineReason:
        """Why an episode with this finding may not train."""
        missing = self.kind is Drift.missing_call
        return QuarantineReason.incomplete_capture if missing else QuarantineReason.state_drift

    def __str__(self) -> str:
        where = f", call {self.call}" if self.call >= 0 else ""
        what = f"{self.kind.value.replace('_', ' ')} {self.name}".strip()
        return f"episode {self.episode_id}{where}: {what}: recorded {_cut(self.recorded)}, found {_cut(self.replayed)}"


def replay_state(
    record: EpisodeRecord, evidence: Evidence, contract: TaskContract, turns: Sequence[LedgerTurn] | None = None
) -> list[StateFinding]:
    """Make the logged calls again in a fresh world and compare result, change and clock of each, the final state, and
    the grade that follows from it. With the captured `turns` the log is also compared with what they say of it.

    Where an agent could write files past the dispatcher, files at the end and what file tools answer are not compared.
    A mismatch of versions comes first, since it may explain the others.
    """
    found = list(_drift(record, evidence, contract))
    try:
        world = World(contract.world, MemoryWorkspace())
    except WorldError as e:
        return [*found, StateFinding(Drift.contract, record.episode_id, -1, "initial world", "a world", str(e))]
    try:
        lost = False
        for place, event in enumerate(evidence.events):
            if event.ordinal != place:  # the calls after it meet another world, and would all be found
                lost, numbers = True, (f"call {event.ordinal}", f"call {place}")
                found.append(StateFinding(Drift.missing_call, record.episode_id, place, _named(event), *numbers))
                break
            found += _call(record.episode_id, world, event, evidence.logged_files)
        if evidence.state and not lost:
            found += _final(record, evidence.state, world.state(), evidence.logged_files)
        if not lost:
            found += _unlogged(record, evidence, contract, turns)
    finally:
        world.close()
    return [*found, *_graded(record, evidence, contract)]


def _unlogged(
    record: EpisodeRecord, evidence: Evidence, contract: TaskContract, turns: Sequence[LedgerTurn] | None
) -> Iterator[StateFinding]:
    """Calls that the log lacks, as the last one may be if it only read, and calls that nobody made.

    A harness of ours hands on every call of a tool of the task whose arguments are an object, as it was sampled. An
    agent program may answer some itself and alter others, so there the calls that were served are counted, if the run
    came to an end that tells.
    """
    if not evidence.logged_files:
        served, logged = record.tool_calls, len(evidence.events)
        if served != logged and evidence.state and record.outcome is not Outcome.infra_failed:
            place = record.episode_id, min(served, logged), "of the tool server"
            yield StateFinding(Drift.missing_call, *place, f"{served} calls", f"{logged} calls")
        return
    if turns is None:
        return
    said = [call for turn in turns for call in orjson.loads(turn.calls)]
    left = Counter((event.name, canonical_json(event.arguments)) for event in evidence.events)
    made = Counter[tuple[str, bytes]]()
    for name, arguments, answered in said:
        read = decode_arguments(arguments)
        key = name, canonical_json(arguments if read is None else read)
        made[key] += 1
        if answered and read is not None and name in contract.tools:
            left[key] -= 1
            if left[key] < 0:
                call = f"{name} {key[1].decode()}"
                yield StateFinding(
                    Drift.missing_call, record.episode_id, len(evidence.events), call, "its result", "no such call"
                )
    for event in evidence.events:
        key = event.name, canonical_json(event.arguments)
        made[key] -= 1
        if made[key] < 0:
            yield StateFinding(Drift.missing_call, record.episode_id, event.ordinal, _named(event), "made", "not asked")


def _graded(record: EpisodeRecord, evidence: Evidence, contract: TaskContract) -> Iterator[StateFinding]:
    """What of the judgement does not follow from the evidence."""
    completed, place = record.outcome is Outcome.completed, (Drift.grade, record.episode_id, -1)
    if completed and not (evidence.state and evidence.answer.strip()):
        yield StateFinding(*place, "outcome", "completed", "no answer" if evidence.state else "no final state")
    again = Grade(score=0.0, success=False, goals_met=(), forbidden=())
    if record.outcome is not Outcome.infra_failed and evidence.state:
        again = grade(contract, evidence.state, evidence.events, evidence.answer, completed)
    rewards = {again.score} if completed else {0.0, again.score}
    pairs = [
        ("score", record.score, again.score),
        ("success", record.success, again.success),
        ("reward", record.reward, record.reward if record.reward in rewards else again.score),
        ("goals met", tuple(evidence.goals_met), again.goals_met),
        ("forbidden", tuple(evidence.forbidden), again.forbidden),
    ]
    for name, recorded, found in pairs:
        if recorded != found:
            yield StateFinding(*place, name, str(recorded), str(found))


def _drift(record: EpisodeRecord, evidence: Evidence, contract: TaskContract) -> Iterator[StateFinding]:
    given = contract.digest()
    if given != record.task_digest:
        yield StateFinding(
            Drift.contract, record.episode_id, -1, f"digest of {contract.meta.task_id}", record.task_digest, given
        )
    if evidence.world_version != WORLD_VERSION:
        versions = str(evidence.world_version or "unknown"), str(WORLD_VERSION)
        yield StateFinding(Drift.world_version, record.episode_id, -1, "", *versions)


def _call(episode_id: str, world: World, event: Event, logged_files: bool) -> Iterator[StateFinding]:
    world.call(event.name, event.arguments)
    again = world.events[-1]
    if event == again:
        return
    place = episode_id, event.ordinal, _named(event)
    if event.clock != again.clock:
        yield StateFinding(Drift.clock, *place, event.clock, again.clock)
    known = logged_files or event.name not in FILE_TOOLS
    if known and (event.response, event.ok, event.error) != (again.response, again.ok, again.error):
        yield StateFinding(Drift.tool_result, *place, event.response, again.response)
    if event.fingerprint and event.fingerprint != again.fingerprint:
        yield StateFinding(Drift.fingerprint, *place, event.fingerprint, again.fingerprint)


def _named(event: Event) -> str:
    arguments = event.arguments if isinstance(event.arguments, str) else canonical_json(event.arguments).decode()
    return f"{event.name} {arguments}"


def _final(
    record: EpisodeRecord, state: dict[str, Any], again: dict[str, Any], logged_files: bool
) -> Iterator[StateFinding]:
    kept = digest(state)
    if kept != record.final_fingerprint:
        yield StateFinding(
            Drift.final_state, record.episode_id, -1, "fingerprint of the kept state", record.final_fingerprint, kept
        )
    if state == again:
        return
    before, now = _cells(state, logged_files), _cells(again, logged_files)
    for place in sorted(before.keys() | now.keys()):
        if before.get(place) != now.get(place):
            values = str(before.get(place, "nothing")), str(now.get(place, "nothing"))
            yield StateFinding(Drift.final_state, record.episode_id, -1, place, *values)


def _cells(state: dict[str, Any], files: bool) -> dict[str, Any]:
    """Place -> value of everything in a state."""
    cells = {f"{service} {key}": row for service, rows in state["services"].items() for key, row in rows.items()}
    return cells | ({f"file {path}": text for path, text in state["files"].items()} if files else {})


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
