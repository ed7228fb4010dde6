"""State replay: calls, results, times, states and judgements that are not as they were recorded are each named."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from occamy.contracts.episode import Outcome, QuarantineReason
from occamy.rollout import replay as state_replay
from occamy.rollout.archive import Recorded, open_archive
from occamy.rollout.replay import Drift, replay_state


@pytest.fixture(scope="module")
def episode(demonstrations: Path) -> Recorded:
    """A demonstration of two segments with a write in the middle."""
    for one in open_archive(demonstrations):
        assert one.evidence is not None
        writes = [e for e in one.evidence.events[:-1] if e.name.endswith("_update") and e.ok]
        if one.record.segments > 1 and writes:
            return one
    raise AssertionError("no such demonstration")


def drifts(one: Recorded) -> list[tuple[Drift, int]]:
    assert one.evidence is not None and one.contract is not None
    return [(f.kind, f.call) for f in replay_state(one.record, one.evidence, one.contract, one.turns)]


def of_state(one: Recorded) -> list[Drift]:
    return [kind for kind, _ in drifts(one) if kind is not Drift.grade]


def with_event(one: Recorded, at: int, **changes: Any) -> Recorded:
    assert one.evidence is not None
    events = list(one.evidence.events)
    events[at] = dataclasses.replace(events[at], **changes)
    return replace(one, evidence=replace(one.evidence, events=tuple(events)))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"score": 0.5}, ["score"]),
        ({"success": False}, ["success"]),
        ({"reward": 0.0}, ["reward"]),
        ({"outcome": Outcome.agent_failed}, ["success"]),
    ],
)
def test_a_judgement_that_does_not_follow_from_the_evidence_is_named(
    episode: Recorded, changes: dict[str, Any], names: list[str]
) -> None:
    assert episode.evidence is not None and episode.contract is not None
    record = episode.record.model_copy(update=changes)
    found = replay_state(record, episode.evidence, episode.contract)
    assert [(f.kind, f.name) for f in found] == [(Drift.grade, name) for name in names]
    assert {f.reason for f in found} == {QuarantineReason.state_drift}


def test_a_completed_episode_has_an_answer_and_a_final_state(episode: Recorded) -> None:
    assert episode.evidence is not None and episode.contract is not None
    silent = replace(episode.evidence, answer=" ")
    [finding] = replay_state(episode.record, silent, episode.contract)
    assert (finding.name, finding.recorded, finding.replayed) == ("outcome", "completed", "no answer")
    lost = replace(episode.evidence, state={})
    names = [f.name for f in replay_state(episode.record, lost, episode.contract)]
    assert names == ["outcome", "score", "success", "reward", "goals met"]


def test_a_changed_tool_result_is_named_with_both_values(episode: Recorded) -> None:
    assert episode.evidence is not None and episode.contract is not None
    other = with_event(episode, 1, response='{"forged":1}')
    assert other.evidence is not None
    [finding] = replay_state(other.record, other.evidence, episode.contract)
    before = episode.evidence.events[1]
    assert (finding.kind, finding.call, finding.recorded, finding.replayed) == (
        Drift.tool_result, 1, '{"forged":1}', before.response,
    )  # fmt: skip
    assert finding.reason is QuarantineReason.state_drift
    assert str(finding).startswith(f"episode {episode.record.episode_id}, call 1: tool result {before.name} {{")


def test_other_effects_errors_and_times_are_named(episode: Recorded) -> None:
    assert episode.evidence is not None
    events = episode.evidence.events
    write = next(e for e in events[:-1] if e.name.endswith("_update") and e.ok)
    assert drifts(with_event(episode, write.ordinal, fingerprint="0" * 32)) == [(Drift.fingerprint, write.ordinal)]
    assert drifts(with_event(episode, 0, ok=False, error="conflict")) == [(Drift.tool_result, 0)]
    assert drifts(with_event(episode, 0, clock="2026-01-05T09:00:01Z")) == [(Drift.clock, 0)]
    target = {**write.arguments, "id": "Z99"}
    other = drifts(with_event(episode, write.ordinal, arguments=target))
    assert other[:2] == [(Drift.tool_result, write.ordinal), (Drift.fingerprint, write.ordinal)]
    assert (Drift.final_state, -1) in other


def test_a_call_that_is_missing_in_the_log_is_named(episode: Recorded) -> None:
    assert episode.evidence is not None
    events = episode.evidence.events
    other = replace(episode, evidence=replace(episode.evidence, events=events[:2] + events[3:]))
    assert drifts(other) == [(Drift.missing_call, 2)]
    last_write = max(e.ordinal for e in events if e.ok and e.fingerprint != events[e.ordinal - 1].fingerprint)
    shorter = replace(episode, evidence=replace(episode.evidence, events=events[:last_write]))
    lost = [(Drift.missing_call, last_write)] * (len(events) - last_write)
    assert drifts(shorter) == [(Drift.final_state, -1), *lost]


def test_a_last_call_that_only_read_is_missed_by_the_messages(demonstrations: Path) -> None:
    """No other call, and no state, tells of it."""
    one, last = next(
        (e, e.evidence.events[-1])
        for e in open_archive(demonstrations)
        if e.evidence is not None and not e.evidence.events[-1].name.endswith(("_update", "_create", "_write"))
    )
    assert one.evidence is not None and one.contract is not None and drifts(one) == []
    without = replace(one.evidence, events=one.evidence.events[:-1])
    [finding] = replay_state(one.record, without, one.contract, one.turns)
    assert (finding.kind, finding.call, finding.reason) == (
        Drift.missing_call, last.ordinal, QuarantineReason.incomplete_capture,
    )  # fmt: skip
    assert finding.name == f"{last.name} {state_replay.canonical_json(last.arguments).decode()}"
    assert (finding.recorded, finding.replayed) == ("its result", "no such call")
    more = replace(one.evidence, events=(*one.evidence.events, replace(last, ordinal=last.ordinal + 1)))
    found = replay_state(one.record, more, one.contract, one.turns)
    assert (Drift.missing_call, last.ordinal + 1, "not asked") in [(f.kind, f.call, f.replayed) for f in found]


def test_calls_of_an_agent_program_are_counted_where_they_were_served(demonstrations: Path) -> None:
    one = next(iter(open_archive(demonstrations)))
    assert one.evidence is not None and one.contract is not None
    program = replace(one.evidence, logged_files=False)
    assert replay_state(one.record, program, one.contract, one.turns) == []
    count = len(program.events)
    record = one.record.model_copy(update={"tool_calls": count + 1})
    [finding] = replay_state(record, program, one.contract, one.turns)
    assert (finding.kind, finding.call, finding.recorded, finding.replayed) == (
        Drift.missing_call, count, f"{count + 1} calls", f"{count} calls",
    )  # fmt: skip


def test_another_contract_and_other_world_code_are_named(episode: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    assert episode.contract is not None and episode.evidence is not None
    other = replace(episode, contract=episode.contract.model_copy(update={"request": "do nothing"}))
    assert drifts(other) == [(Drift.contract, -1)]
    world = episode.contract.world
    broken = world.model_copy(update={"records": {"nowhere": {}}})
    assert drifts(replace(episode, contract=episode.contract.model_copy(update={"world": broken}))) == [
        (Drift.contract, -1), (Drift.contract, -1),
    ]  # fmt: skip
    moved = world.model_copy(update={"clock": "2027-01-05T09:00:00Z"})
    found = drifts(replace(episode, contract=episode.contract.model_copy(update={"world": moved})))
    assert found[0] == (Drift.contract, -1) and {k for k, _ in found[1:]} == {Drift.clock}
    monkeypatch.setattr(state_replay, "WORLD_VERSION", 2)
    assert drifts(episode) == [(Drift.world_version, -1)]


def test_files_that_no_call_wrote_are_drift_unless_the_agent_has_a_shell(episode: Recorded) -> None:
    assert episode.evidence is not None
    state = json.loads(json.dumps(episode.evidence.state))
    state["files"]["smuggled"] = "1"
    fingerprint = state_replay.digest(state)
    record = episode.record.model_copy(update={"final_fingerprint": fingerprint})
    other = replace(episode, record=record, evidence=replace(episode.evidence, state=state))
    assert of_state(other) == [Drift.final_state]
    assert other.evidence is not None
    assert of_state(replace(other, evidence=replace(other.evidence, logged_files=False))) == []
    assert of_state(replace(other, record=episode.record)) == [Drift.final_state, Drift.final_state]
    assert Drift.grade in [kind for kind, _ in drifts(other)]  # nobody asked for that file
