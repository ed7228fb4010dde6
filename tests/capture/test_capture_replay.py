"""Token replay: segments against the turns they were made of, and log-probs against an engine's, on hand-made ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from occamy.capture.ledger import LedgerTurn, read_ledgers, write_ledgers
from occamy.capture.replay import Change, TokenFinding, check_capture, comparable, compare_logprobs, turns_of
from occamy.contracts.episode import EpisodeRecord, Origin, Outcome, QuarantineReason, Segment
from occamy.contracts.manifest import SealError

I, S, C, O = Origin.INHERITED, Origin.SAMPLED, Origin.SUBAGENT, Origin.OBSERVED  # noqa: E741


def turn(ordinal: int, prompt: int, delta: list[int], output: list[int], **more: Any) -> LedgerTurn:
    values: dict[str, Any] = {
        "run": "root", "segment": 0, "attempt": 0, "prefix": "continue", "opened_by": "", "parent_ordinal": -1,
        "parent_attempt": -1, "cached_tokens": 0, "finish": "stop", "trains": True, "temperature": 1.0, "top_p": 1.0,
        "calls": "[]",
        "logprobs": [-0.5 * (ordinal + 1)] * len(output), "versions": [3] * len(output),
    } | more  # fmt: skip
    arrays = {name: np.asarray(values.pop(name), dtype) for name, dtype in (("logprobs", "f4"), ("versions", "i4"))}
    return LedgerTurn(
        ordinal=ordinal,
        prompt_tokens=prompt,
        delta=np.asarray(delta, np.int32),
        output=np.asarray(output, np.int32),
        **values,
        **arrays,
    )


TURNS = [
    turn(0, 3, [11, 12, 13], [21, 22], opened_by="start"),
    turn(1, 6, [14], [23]),
    turn(2, 2, [15, 16], [24, 25], opened_by="summary_replacement", segment=1, versions=[4, 4]),
]


def segment(
    index: int, tokens: list[int], origin: list[int], logprobs: list[float], versions: list[int], **more: Any
) -> Segment:
    return Segment(
        "e", more.get("run", "root"), index, "end", "policy",
        tokens=np.array(tokens, np.int32), mask=np.array(origin) == S, logprobs=np.array(logprobs, np.float32),
        versions=np.array(versions, np.int32), origin=np.array(origin, np.int8),
    )  # fmt: skip


SEGMENTS = [
    segment(
        0, [11, 12, 13, 21, 22, 14, 23], [I, I, I, S, S, O, S], [0, 0, 0, -0.5, -0.5, 0, -1], [-1, -1, -1, 3, 3, -1, 3]
    ),
    segment(1, [15, 16, 24, 25], [I, I, S, S], [0, 0, -1.5, -1.5], [-1, -1, 4, 4]),
]


def record(**more: Any) -> EpisodeRecord:
    values: dict[str, Any] = {
        "episode_id": "e", "task_id": "t", "task_digest": "d", "pool": "long", "split": "train", "trial": 0, "seed": 1,
        "sampled_by": "policy", "outcome": Outcome.completed, "score": 1.0, "reward": 1.0, "success": True, "steps": 3,
        "tool_calls": 2, "failed_calls": 0, "segments": 2, "input_tokens": 11, "cached_tokens": 0, "output_tokens": 5,
        "wall_seconds": 1.0, "harness_digest": "h", "final_fingerprint": "f", "model": "m", "version_min": 3,
        "version_max": 4,
    }  # fmt: skip
    return EpisodeRecord(**(values | more))


def changed(place: Segment, name: str, at: int, value: float) -> Segment:
    array = getattr(place, name).copy()
    array[at] = value
    return dataclasses.replace(place, **{name: array})


def cut(place: Segment, start: int, stop: int) -> Segment:
    keep = np.r_[0:start, stop : len(place.tokens)]
    arrays = {n: getattr(place, n)[keep] for n in ("tokens", "mask", "logprobs", "versions", "origin")}
    return dataclasses.replace(place, **arrays)


def where(finding: TokenFinding) -> tuple[Any, ...]:
    return (finding.kind, finding.run, finding.segment, finding.turn, finding.position)


def test_segments_that_are_what_their_turns_say_pass() -> None:
    assert check_capture(record(), SEGMENTS, TURNS) == []


@pytest.mark.parametrize(
    ("name", "index", "at", "value", "kind", "turn", "recorded"),
    [
        ("tokens", 0, 4, 99, Change.token, 0, 22),
        ("tokens", 0, 1, 99, Change.token, 0, 12),  # of the prompt
        ("tokens", 0, 5, 99, Change.token, 1, 14),  # of a tool result
        ("tokens", 1, 3, 99, Change.token, 1 - 1, 25),
        ("logprobs", 0, 6, -1.001, Change.logprob, 1, -1.0),
        ("logprobs", 0, 5, -0.1, Change.logprob, 1, 0.0),
        ("mask", 0, 5, True, Change.mask, 1, False),
        ("mask", 1, 2, False, Change.mask, 0, True),
        ("origin", 0, 5, I, Change.origin, 1, O),
        ("versions", 1, 2, 3, Change.weight_version, 0, 4),
    ],
)
def test_one_changed_value_is_found_where_it_lies(
    name: str, index: int, at: int, value: float, kind: Change, turn: int, recorded: float
) -> None:
    segments = list(SEGMENTS)
    segments[index] = changed(segments[index], name, at, value)
    [finding] = check_capture(record(), segments, TURNS)
    assert where(finding) == (kind, "root", index, turn, at)
    assert finding.recorded == pytest.approx(recorded) and finding.replayed == pytest.approx(value)
    text = str(finding)
    assert text.startswith(f"episode e, run root, segment {index}, turn {turn}, position {at}: ")


@pytest.mark.parametrize("start", [0, 5])
def test_a_turn_that_is_missing_in_its_segment_is_named(start: int) -> None:
    short = cut(SEGMENTS[0], start, start + (5 if start == 0 else 2))
    [finding] = check_capture(record(), [short, SEGMENTS[1]], TURNS)
    assert where(finding) == (Change.missing_turn, "root", 0, start // 5, start)
    assert finding.reason is QuarantineReason.incomplete_capture


def test_a_turn_that_is_missing_in_the_record_is_named() -> None:
    found = check_capture(record(), SEGMENTS, [TURNS[0], TURNS[2]])
    assert (Change.missing_turn, "root", 0, 1, 5) in [where(f) for f in found]
    found = check_capture(record(), SEGMENTS, TURNS[1:])
    assert (Change.missing_turn, "root", 0, 0, 0) in [where(f) for f in found]


def test_a_turn_that_is_missing_in_both_is_missed_by_the_totals() -> None:
    found = check_capture(record(), [cut(SEGMENTS[0], 5, 7), SEGMENTS[1]], [TURNS[0], TURNS[2]])
    assert {(f.kind, f.note, f.recorded, f.replayed) for f in found} == {
        (Change.total, "prompt tokens", 11, 5),
        (Change.total, "sampled tokens", 5, 4),
        (Change.missing_turn, "turns of the root run", 3, 2),
    }
    middle = check_capture(record(), [cut(SEGMENTS[0], 3, 5), SEGMENTS[1]], [TURNS[1], TURNS[2]])
    assert (Change.missing_turn, 0) in [(f.kind, f.position) for f in middle]


def test_a_missing_segment_and_other_versions_than_the_records_are_named() -> None:
    found = check_capture(record(), SEGMENTS[:1], TURNS)
    assert where(found[-1]) == (Change.missing_turn, "root", 1, 0, 0) and found[-1].recorded == "turn 2"
    assert {f.note for f in found} == {"segments", "newest version", ""}
    [finding] = check_capture(record(version_max=5), SEGMENTS, TURNS)
    assert (finding.kind, finding.recorded, finding.replayed) == (Change.weight_version, 5, 4)
    assert finding.reason is QuarantineReason.mixed_weight_versions


def test_who_sampled_and_how_many_turns_are_those_of_the_record() -> None:
    others = [dataclasses.replace(SEGMENTS[0], sampled_by="teacher"), SEGMENTS[1]]
    [finding] = check_capture(record(), others, TURNS)
    assert (finding.note, finding.recorded, finding.replayed) == ("sampled by", "policy", "teacher")
    [finding] = check_capture(record(steps=4), SEGMENTS, TURNS)
    assert (finding.kind, finding.recorded, finding.replayed) == (Change.missing_turn, 4, 3)


def test_whichever_attempt_was_used_explains_the_segment() -> None:
    other = dataclasses.replace(TURNS[0], attempt=1, output=np.array([31, 32, 33], np.int32),
                                logprobs=np.full(3, -9, np.float32), versions=np.full(3, 3, np.int32))  # fmt: skip
    totals = record(input_tokens=14, output_tokens=8)
    assert check_capture(totals, SEGMENTS, [TURNS[0], other, *TURNS[1:]]) == []
    mixed = changed(changed(SEGMENTS[0], "tokens", 3, 31), "tokens", 4, 32)
    assert check_capture(totals, [mixed, SEGMENTS[1]], [TURNS[0], other, *TURNS[1:]])


def test_attempts_that_sampled_the_same_tokens_are_told_apart_by_log_probs_and_versions() -> None:
    totals = record(input_tokens=14, output_tokens=7)
    for more in ({"logprobs": np.full(2, -9, np.float32)}, {"versions": np.full(2, 4, np.int32)}):
        other = dataclasses.replace(TURNS[0], attempt=1, **more)
        assert check_capture(totals, SEGMENTS, [TURNS[0], other, *TURNS[1:]]) == []
        other = dataclasses.replace(TURNS[0], **more)
        again = dataclasses.replace(TURNS[0], attempt=1)
        assert check_capture(totals, SEGMENTS, [other, again, *TURNS[1:]]) == []


def test_a_fork_holds_the_answer_that_it_goes_on_from_once() -> None:
    dropped = turn(0, 2, [11, 12], [21], opened_by="start")
    fork = turn(1, 4, [11, 12, 21, 14], [22], opened_by="branch", run="branch-0", trains=False, parent_ordinal=0,
                parent_attempt=0)  # fmt: skip
    again = dataclasses.replace(dropped, attempt=1, output=np.array([25], np.int32))
    root = segment(0, [11, 12, 25], [I, I, S], [0, 0, -0.5], [-1, -1, 3])
    held = segment(0, [11, 12, 21, 14, 22], [I, I, C, I, C], [0, 0, -0.5, 0, -1], [-1, -1, 3, -1, 3], run="branch-0")
    totals = record(steps=2, input_tokens=8, output_tokens=3, version_max=3)
    assert check_capture(totals, [root, held], [dropped, again, fork]) == []
    bare = segment(0, [11, 12, 21, 14, 22], [I, I, I, I, C], [0, 0, 0, 0, -1], [-1, -1, -1, -1, 3], run="branch-0")
    assert check_capture(totals, [root, bare], [dropped, again, fork]) == []
    [finding] = check_capture(totals, [root, changed(held, "logprobs", 2, -7)], [dropped, again, fork])
    assert where(finding) == (Change.logprob, "branch-0", 0, 0, 2)


@given(st.data())
def test_any_single_change_is_found(data: st.DataObject) -> None:
    index = data.draw(st.integers(0, 1))
    place = SEGMENTS[index]
    name = data.draw(st.sampled_from(["tokens", "mask", "logprobs", "versions", "origin"]))
    at = data.draw(st.integers(0, len(place.tokens) - 1))
    old = getattr(place, name)[at].item()
    value = not old if name == "mask" else old + data.draw(st.sampled_from([-2, -1, 1, 2]))
    segments = list(SEGMENTS)
    segments[index] = changed(place, name, at, value)
    found = check_capture(record(), segments, TURNS)
    assert (index, at) in [(f.segment, f.position) for f in found]


def test_log_probs_are_compared_where_the_version_sampled() -> None:
    place = changed(SEGMENTS[0], "versions", 6, 4)
    nan = float("nan")
    assert compare_logprobs(place, np.array([nan, 7, 7, -0.5, -0.5, 7, nan]), version=3, tolerance=1e-6) == []
    [finding] = compare_logprobs(place, np.array([0, 0, 0, 0, 0, 0, nan]), version=4, tolerance=9.0)
    assert where(finding) == (Change.logprob, "root", 0, 1, 6)


def test_log_probs_are_compared_at_temperature_1_and_at_0_where_engines_report_1() -> None:
    turns = [
        dataclasses.replace(t, temperature=temperature)
        for t, temperature in zip(TURNS, (0.0, 0.7, float("nan")), strict=True)
    ]
    left = comparable(SEGMENTS, turns)
    assert [s.mask.nonzero()[0].tolist() for s in left] == [[3, 4], []]
    assert [s.mask.nonzero()[0].tolist() for s in SEGMENTS] == [[3, 4, 6], [2, 3]]
    assert [s.mask.sum() for s in comparable(SEGMENTS, TURNS)] == [3, 2]
    hot = [*TURNS[:2], dataclasses.replace(TURNS[2], top_p=0.5)]
    assert [s.mask.sum() for s in comparable(SEGMENTS, hot)] == [3, 2]  # log-probs are of the whole distribution


def test_one_deviating_log_prob_is_named_and_most_of_them_mean_other_weights() -> None:
    [finding] = compare_logprobs(SEGMENTS[0], np.array([0, 0, 0, -0.5, -0.75, 0, -1]), version=3, tolerance=0.2)
    assert where(finding) == (Change.logprob, "root", 0, 0, 4)
    assert (finding.recorded, finding.replayed, finding.count) == (-0.5, -0.75, 1)
    assert str(finding) == ("episode e, run root, segment 0, turn 0, position 4: logprob: recorded -0.5, found -0.75")
    assert finding.reason is QuarantineReason.token_mismatch
    [finding] = compare_logprobs(SEGMENTS[0], np.array([0, 0, 0, -0.5, -0.75, 0, -3]), version=3, tolerance=0.2)
    assert where(finding) == (Change.weight_version, "root", 0, 0, 4)
    assert finding.note == "2 of 3 log-probs differ, by up to 2 nats"


def test_every_token_belongs_to_the_turn_whose_prompt_it_was_new_in() -> None:
    assert turns_of(SEGMENTS[0].origin).tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert turns_of(np.array([I, S, O, S, O, O, S], np.int8)).tolist() == [0, 0, 1, 1, 2, 2, 2]


def test_turns_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    write_ledgers(tmp_path / "turns.parquet", [("e", TURNS), ("none", []), ("f", TURNS[:1])])
    back = read_ledgers(tmp_path / "turns.parquet")
    assert back.keys() == {"e", "f"} and [len(t) for t in back.values()] == [3, 1]
    for before, after in zip(TURNS, back["e"], strict=True):
        for field in dataclasses.fields(LedgerTurn):
            assert np.array_equal(getattr(before, field.name), getattr(after, field.name))
    write_ledgers(tmp_path / "turns.parquet", [])
    assert read_ledgers(tmp_path / "turns.parquet") == {}
    pq.write_table(pq.read_table(tmp_path / "turns.parquet").drop_columns("temperature"), tmp_path / "turns.parquet")
    with pytest.raises(SealError, match=r"turns\.parquet: has no temperature; it is of an earlier version"):
        read_ledgers(tmp_path / "turns.parquet")
