"""Real episodes replay; whatever is changed in them is found, named, and keeps them out of training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from occamy.capture.replay import Change
from occamy.capture.sealed import read_sealed, write_sealed
from occamy.contracts.episode import Outcome, QuarantineReason
from occamy.contracts.manifest import SealError
from occamy.contracts.release import load_release
from occamy.contracts.task import TaskContract
from occamy.engines.local.launch import launch_engine
from occamy.harness.loading import load
from occamy.nano.base import base_checkpoint
from occamy.rollout import replay as state_replay
from occamy.rollout.admit import RECEIPTS, ReplayError, admit_trajectories, check_episode, replay_versions
from occamy.rollout.archive import EVIDENCE, Recorded, open_archive, write_archive
from occamy.rollout.config import DemonstrationConfig, RolloutConfig
from occamy.rollout.demonstrate import demonstrate
from occamy.rollout.jobs import make_jobs
from occamy.rollout.session import RolloutSession

Change_ = Callable[[Recorded], Recorded]


@pytest.fixture(scope="module")
def policy(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four episodes of the shipped base, two of them sampled after the weights were given another version. The
    session's folder, with its sealed episodes in it."""
    folder, base = tmp_path_factory.mktemp("policy"), base_checkpoint()
    tasks = load_release(release).select(pool="short")[:4]
    jobs = list(make_jobs(tasks, trials=1, seed=5, sampled_by="policy", temperature=1.0, model="base"))
    config = RolloutConfig(concurrency=2)
    with (
        launch_engine(base, max_running=4) as engine,
        RolloutSession(folder, checkpoint=base, engine_url=engine.url, harness=load("react"), config=config) as session,
    ):
        list(session.stream(jobs[:2], 2))
        session.update_weights(base, 1)
        list(session.stream(jobs[2:], 2))
        session.seal(kind="episodes", parents={"tasks": "x"}, facts={"seed": 5})
    return folder


def with_segment(one: Recorded, index: int, **arrays: np.ndarray) -> Recorded:
    segments = list(one.segments)
    segments[index] = replace(segments[index], **arrays)
    return replace(one, segments=segments)


def edited(array: np.ndarray, at: int, value: float) -> np.ndarray:
    copy = array.copy()
    copy[at] = value
    return copy


def first_target(one: Recorded) -> int:
    return int(np.flatnonzero(one.segments[0].mask)[0])


def test_untouched_episodes_replay(demonstrations: Path, policy: Path) -> None:
    for folder in (demonstrations, policy / "sealed", policy):
        archive = open_archive(folder)
        assert len(archive.records) == len(list(archive)) >= 4
        assert [f for one in archive for f in check_episode(one)] == []
        archive.close()


def test_a_session_and_its_sealed_episodes_tell_the_same(policy: Path) -> None:
    live, sealed = open_archive(policy), open_archive(policy / "sealed")
    assert live.records == sealed.records and live.tokenizer == sealed.tokenizer is not None
    for one, other in zip(live, sealed, strict=True):
        assert (one.record, one.evidence, one.contract) == (other.record, other.evidence, other.contract)
        assert one.turns is not None and other.turns is not None
        assert [t.output.tolist() for t in one.turns] == [t.output.tolist() for t in other.turns]
        assert [s.tokens.tolist() for s in one.segments] == [s.tokens.tolist() for s in other.segments]
    with pytest.raises(ValueError, match="no finished episode 'x' among 4"):
        sealed.episode("x")
    live.close()
    with pytest.raises(SealError, match="neither a sealed folder"):
        open_archive(policy / "sealed" / "nothing")


def test_log_probs_of_real_episodes_come_out_again_and_a_change_is_found(policy: Path, checkpoint: Path) -> None:
    archive = open_archive(policy / "sealed")
    ids = list(archive.records)
    episodes = [archive.episode(i) for i in ids]
    assert {e.record.version_max for e in episodes} == {0, 1}
    segments = [s for e in episodes for s in e.segments]
    base = base_checkpoint()
    old = next(s for s in segments if (s.versions == 0).any())
    target = int(np.flatnonzero(old.mask)[3])
    forged = replace(old, logprobs=edited(old.logprobs, target, old.logprobs[target] - 0.01))
    with launch_engine(base, version=1) as engine:
        assert replay_versions(segments, weights={0: base}, url=engine.url) == []
        altered = [forged if s is old else s for s in segments]
        [finding] = replay_versions(altered, weights={0: base}, url=engine.url)
        assert (finding.kind, finding.episode_id, finding.position) == (Change.logprob, old.episode_id, target)
        assert finding.recorded == pytest.approx(float(old.logprobs[target]) - 0.01)
        assert finding.replayed == pytest.approx(float(old.logprobs[target]), abs=1e-4)
        wrong = replay_versions([old], url=engine.url)
        assert [(f.kind, f.recorded, f.replayed) for f in wrong] == [(Change.weight_version, 0, 1)]
    with pytest.raises(ReplayError, match="sampled by weight version 0: give its checkpoint"):
        replay_versions(segments, weights={1: base})
    other_weights = replay_versions(segments, weights={0: checkpoint, 1: base})
    found = {f.episode_id for f in other_weights}
    assert found == {e.record.episode_id for e in episodes if e.record.version_max == 0}
    assert {f.kind for f in other_weights} == {Change.weight_version}


def test_a_changed_token_moves_the_log_probs_after_it(policy: Path) -> None:
    archive = open_archive(policy / "sealed")
    one = next(e for e in archive if e.record.version_max == 0)
    old = one.segments[0]
    at = first_target(one)
    forged = replace(old, tokens=edited(old.tokens, at, old.tokens[at] + 1))
    found = replay_versions([forged], weights={0: base_checkpoint()})
    assert found and found[0].position == at


def reseal(source: Path, out: Path, changes: dict[str, Change_]) -> list[str]:
    """Seal a folder again with some of its episodes changed, as a careless tool would."""
    episodes = []
    for one in open_archive(source):
        change = changes.get(one.record.episode_id)
        episodes.append(change(one) if change is not None else one)
    manifest = read_sealed(source).manifest
    write_archive(out, episodes)
    segments = [s for e in episodes for s in e.segments]
    write_sealed(
        out, [e.record for e in episodes], segments, kind=manifest.kind, parents=manifest.parents, facts=manifest.facts
    )
    return [e.record.episode_id for e in episodes]


def forged_result(one: Recorded) -> Recorded:
    assert one.evidence is not None
    first, *rest = one.evidence.events
    return replace(one, evidence=replace(one.evidence, events=(replace(first, response="forged"), *rest)))


def forged_token(one: Recorded) -> Recorded:
    at = first_target(one)
    return with_segment(one, 0, tokens=edited(one.segments[0].tokens, at, 1))


def forged_mask(one: Recorded) -> Recorded:
    return with_segment(one, 0, mask=edited(one.segments[0].mask, 0, True))


def forged_version(one: Recorded) -> Recorded:
    at = first_target(one)
    return with_segment(one, 0, versions=edited(one.segments[0].versions, at, 7))


def forged_logprob(one: Recorded) -> Recorded:
    at = first_target(one)
    return with_segment(one, 0, logprobs=edited(one.segments[0].logprobs, at, -3.5))


def dropped_turn(one: Recorded) -> Recorded:
    assert one.turns is not None
    return replace(one, turns=one.turns[:-1])


def other_contract(one: Recorded) -> Recorded:
    assert one.contract is not None
    return replace(one, contract=one.contract.model_copy(update={"request": "do nothing"}))


FORGERIES: list[tuple[Change_, QuarantineReason, str]] = [
    (forged_result, QuarantineReason.state_drift, "call 0: tool result"),
    (forged_token, QuarantineReason.token_mismatch, "segment 0, turn 0, position"),
    (forged_mask, QuarantineReason.token_mismatch, "mask: recorded False, found True"),
    (forged_version, QuarantineReason.mixed_weight_versions, "weight version: recorded -1, found 7"),
    (forged_logprob, QuarantineReason.token_mismatch, "logprob: recorded 0, found -3.5"),
    (dropped_turn, QuarantineReason.incomplete_capture, "missing turn"),
    (other_contract, QuarantineReason.state_drift, "contract digest of"),
]


def test_admission_keeps_what_replays_and_quarantines_every_forgery(demonstrations: Path, tmp_path: Path) -> None:
    names = list(open_archive(demonstrations).records)
    forged = dict(zip(names, FORGERIES, strict=False))
    reseal(demonstrations, tmp_path / "in", {name: change for name, (change, _, _) in forged.items()})
    manifest, receipts = admit_trajectories(tmp_path / "in", tmp_path / "out", share=1.0)
    by_id = {r.episode_id: r for r in receipts}
    assert by_id.keys() == set(names)
    for name, (_, reason, words) in forged.items():
        assert (by_id[name].admitted, by_id[name].reason) == (False, reason)
        assert any(words in f for f in by_id[name].findings), by_id[name].findings
    assert all(by_id[n].admitted and not by_id[n].findings for n in names if n not in forged)
    counts = manifest.counts["demonstrations"]
    assert (counts.raw, counts.admitted, counts.quarantined) == (20, 13, 7)
    assert manifest.facts["quarantine"] == {
        "incomplete_capture": 1, "mixed_weight_versions": 1, "state_drift": 2, "token_mismatch": 3,
    }  # fmt: skip
    assert manifest.facts["replayed_tokens"] == 0  # a teacher has no log-probs
    sealed = read_sealed(tmp_path / "out", "demonstrations")
    assert {r.episode_id: r.quarantine for r in sealed.records} == {r.episode_id: r.reason for r in receipts}
    lines = [json.loads(line) for line in (tmp_path / "out" / RECEIPTS).read_text().splitlines()]
    assert [line["episode_id"] for line in lines] == names and lines[0]["checks"] == ["capture", "state"]
    with pytest.raises(SealError, match="exists; admission writes a new folder"):
        admit_trajectories(tmp_path / "in", tmp_path / "out")


def test_a_share_of_policy_episodes_is_replayed_token_by_token(policy: Path, tmp_path: Path) -> None:
    names = list(open_archive(policy / "sealed").records)

    def both_forged(one: Recorded) -> Recorded:
        """In the turns too: nothing but an engine can tell."""
        assert one.turns is not None
        at = first_target(one)
        turns = [replace(one.turns[0], logprobs=edited(one.turns[0].logprobs, 0, -4.25)), *one.turns[1:]]
        logprobs = edited(one.segments[0].logprobs, at, -4.25)
        return replace(with_segment(one, 0, logprobs=logprobs), turns=turns)

    reseal(policy / "sealed", tmp_path / "in", {names[0]: both_forged})
    base = base_checkpoint()
    _, receipts = admit_trajectories(tmp_path / "in", tmp_path / "all", share=1.0, weights={0: base, 1: base})
    assert [r.reason for r in receipts] == [QuarantineReason.token_mismatch, None, None, None]
    assert all(r.checks == ("capture", "state", "tokens") for r in receipts)
    _, blind = admit_trajectories(tmp_path / "in", tmp_path / "none")
    assert all(r.admitted and r.checks == ("capture", "state") for r in blind)
    manifest, some = admit_trajectories(
        tmp_path / "in", tmp_path / "some", share=0.3, seed=1, weights={0: base, 1: base}
    )
    assert sum("tokens" in r.checks for r in some) == 2 == manifest.facts["replayed_tokens"]

    def warm(one: Recorded) -> Recorded:
        """Its first turn was sampled at another temperature, where no log-prob of it can be forced again."""
        assert one.turns is not None
        forged = both_forged(one)
        assert forged.turns is not None
        return replace(forged, turns=[replace(forged.turns[0], temperature=0.7), *forged.turns[1:]])

    reseal(policy / "sealed", tmp_path / "warm", {names[0]: warm})
    _, receipts = admit_trajectories(tmp_path / "warm", tmp_path / "cool", share=1.0, weights={0: base, 1: base})
    first = open_archive(tmp_path / "warm").episode(names[0])
    assert first.turns is not None
    targets = sum(int(s.mask.sum()) for s in first.segments)
    assert receipts[0].checks[2] == f"tokens ({targets - len(first.turns[0].output)} of {targets})"
    assert [r.reason for r in receipts] == [None] * 4 and receipts[1].checks[2] == "tokens"
    with pytest.raises(ValueError, match="share 2: give a part between 0 and 1"):
        admit_trajectories(tmp_path / "in", tmp_path / "more", share=2)


def test_a_folder_of_an_older_version_is_read_but_not_replayed(demonstrations: Path, tmp_path: Path) -> None:
    sealed = read_sealed(demonstrations)
    facts = {k: v for k, v in sealed.manifest.facts.items() if k != "tokenizer"}
    write_sealed(tmp_path / "old", sealed.records, sealed.segments, kind="demonstrations", parents={}, facts=facts)
    archive = open_archive(tmp_path / "old")
    one = next(iter(archive))
    assert (one.turns, one.evidence, one.contract, archive.tokenizer) == (None, None, None, None) and one.segments
    with pytest.raises(ReplayError, match="sealed without its turns"):
        admit_trajectories(tmp_path / "old", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_altered_file_of_evidence_is_refused(demonstrations: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demonstrations, tmp_path / "copy")
    data = bytearray((copy / EVIDENCE).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / EVIDENCE).write_bytes(data)
    with pytest.raises(SealError, match=f"{EVIDENCE} was altered"):
        open_archive(copy)


def test_a_demonstration_that_does_not_replay_is_counted_not_sealed(
    release: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The world answers otherwise when it is replayed, as it would after a change of its code."""
    config = DemonstrationConfig(pool="short", limit=4, rollout=RolloutConfig(concurrency=4))
    tasks: list[TaskContract] = load_release(release).select(pool="short")[:4]
    drifting = [f"{t.meta.task_id}.0" for t in tasks if t.world == tasks[1].world]
    original = state_replay.World.__init__

    def otherwise(self: Any, spec: Any, workspace: Any) -> None:
        original(self, spec, workspace)
        if spec == tasks[1].world and isinstance(workspace, state_replay.MemoryWorkspace):
            self._faults = frozenset({0})

    monkeypatch.setattr(state_replay.World, "__init__", otherwise)
    manifest = demonstrate(release, checkpoint, tmp_path / "demos", config, 3)
    counts = manifest.counts["demonstrations"]
    assert manifest.facts["quarantine"] == {"state_drift": len(drifting)}
    assert (counts.raw, counts.admitted, counts.quarantined) == (4, 4 - len(drifting), len(drifting))
    receipts = [json.loads(line) for line in (tmp_path / "demos" / RECEIPTS).read_text().splitlines()]
    assert [r["episode_id"] for r in receipts if not r["admitted"]] == drifting
    assert all(r.outcome is Outcome.completed for r in read_sealed(tmp_path / "demos").records)
