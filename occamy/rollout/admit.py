"""Admission of trajectories: an episode trains only if its capture adds up and its replays find nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from occamy.capture.replay import TOLERANCE, TokenFinding, check_capture, comparable, replay_tokens
from occamy.capture.sealed import read_sealed, write_sealed
from occamy.contracts.episode import EpisodeRecord, QuarantineReason, Segment
from occamy.contracts.manifest import Counts, Manifest, SealError, seal, write_atomic
from occamy.contracts.record import Record, canonical_json
from occamy.engines.client import EngineClient
from occamy.engines.local.launch import launch_engine
from occamy.rollout.archive import Recorded, open_archive, write_archive
from occamy.rollout.replay import StateFinding, replay_state

RECEIPTS = "receipts.jsonl"
_KEPT = 20
"""Findings that a receipt keeps."""

Finding = TokenFinding | StateFinding


class ReplayError(ValueError):
    """A replay that was asked for cannot be made: names what is missing and the fix."""


class Receipt(Record):
    """What admission found out about one episode."""

    episode_id: str
    admitted: bool
    reason: QuarantineReason | None
    """Of the first finding, or the one that the episode was captured with; None when admitted."""
    checks: tuple[str, ...]
    """capture, state, tokens: what was done. Log-probs of other temperatures than 1 cannot be compared: then tokens is
    followed by how many of the targets were, as "tokens (12 of 40)"."""
    findings: tuple[str, ...]
    """The first ones, in words."""


def check_episode(episode: Recorded) -> list[Finding]:
    """Check the capture of an episode and replay its tool calls. No engine is needed.

    Raises ReplayError when the folder was sealed before turns and evidence were kept.
    """
    if episode.turns is None:
        raise ReplayError(f"episode {episode.record.episode_id} was sealed without its turns; make it again")
    return [*check_capture(episode.record, episode.segments, episode.turns), *check_state(episode)]


def check_state(episode: Recorded) -> list[StateFinding]:
    """Replay the tool calls of an episode. Raises ReplayError when its evidence or its task is not there."""
    name = episode.record.episode_id
    if episode.evidence is None:
        raise ReplayError(f"episode {name} was sealed without its tool calls; make it again")
    if episode.contract is None:
        raise ReplayError(f"episode {name}: no task {episode.record.task_id} to start from; name its release")
    return replay_state(episode.record, episode.evidence, episode.contract, episode.turns)


def receipt(record: EpisodeRecord, findings: Sequence[Finding], checks: Sequence[str]) -> Receipt:
    """Decide on one episode: quarantined by its capture, else by its first finding, else admitted."""
    reason = record.quarantine or (findings[0].reason if findings else None)
    said = tuple(str(f) for f in findings[:_KEPT])
    name = record.episode_id
    return Receipt(episode_id=name, admitted=reason is None, reason=reason, checks=tuple(checks), findings=said)


def replayable(episode: Recorded) -> list[Segment]:
    """Segments of an episode with the targets whose log-probs can be replayed: none of a teacher's, and none that were
    sampled at a temperature that does not allow it, or that nobody kept."""
    if episode.record.sampled_by != "policy" or episode.turns is None:
        return []
    return comparable(episode.segments, episode.turns)


def _targets(segments: Iterable[Segment]) -> int:
    return sum(int(s.mask.sum()) for s in segments)


def write_receipts(folder: Path, receipts: Iterable[Receipt]) -> None:
    """Write receipts.jsonl in order of episode id, to be sealed with the episodes."""
    ordered = sorted(receipts, key=lambda r: r.episode_id)
    write_atomic(folder / RECEIPTS, b"".join(canonical_json(r) + b"\n" for r in ordered))


def replay_versions(
    segments: Iterable[Segment],
    *,
    weights: Mapping[int, Path] | None = None,
    url: str | None = None,
    tolerance: float = TOLERANCE,
    threads: int = 1,
) -> list[TokenFinding]:
    """Token replay of all targets that a policy sampled, version by version.

    Each version is served by a local engine on its checkpoint folder in `weights`; `url` names an engine that serves
    whatever `weights` does not have. Raises ReplayError for a version that nobody holds, EngineError.
    """
    chosen = [s for s in segments if s.sampled_by == "policy" and s.mask.any()]
    versions = sorted({int(v) for s in chosen for v in np.unique(s.versions[s.mask])})
    found: list[TokenFinding] = []
    for version in versions:
        own = [s for s in chosen if (s.versions[s.mask] == version).any()]
        folder = (weights or {}).get(version)
        if folder is not None:
            with launch_engine(folder, version=version, threads=threads, max_running=32) as engine:
                found += asyncio.run(_replayed(engine.url, own, version, tolerance))
        elif url is not None:
            found += asyncio.run(_replayed(url, own, version, tolerance))
        else:
            raise ReplayError(f"{len(own)} segments were sampled by weight version {version}: give its checkpoint")
    return found


async def _replayed(url: str, segments: Sequence[Segment], version: int, tolerance: float) -> list[TokenFinding]:
    client = EngineClient(url)
    try:
        return await replay_tokens(client, segments, version=version, tolerance=tolerance)
    finally:
        await client.close()


def admit_trajectories(
    folder: Path,
    out: Path,
    *,
    weights: Mapping[int, Path] | None = None,
    url: str | None = None,
    share: float = 0.0,
    seed: int = 0,
    tolerance: float = TOLERANCE,
) -> tuple[Manifest, list[Receipt]]:
    """Check every episode of a sealed `folder` and seal them in `out`, those that fail with the reason of quarantine.

    Capture and state are checked for all; log-probs for a random `share` of the episodes of a policy, drawn by `seed`
    (see `replay_versions` for `weights` and `url`). `out` is of the same kind, so whatever reads one reads the other;
    receipts.jsonl in it says what was found. Raises SealError when `folder` is altered or `out` exists, ReplayError.
    """
    if out.exists():
        raise SealError(f"{out}: exists; admission writes a new folder")
    episodes = list(open_archive(folder))
    sealed = read_sealed(folder)
    drawn = _drawn(sealed.records, share, seed)
    chosen = {e.record.episode_id: replayable(e) for e in episodes if e.record.episode_id in drawn}
    tokens = replay_versions((s for own in chosen.values() for s in own), weights=weights, url=url, tolerance=tolerance)
    by_episode: dict[str, list[Finding]] = {}
    for finding in tokens:
        by_episode.setdefault(finding.episode_id, []).append(finding)
    receipts = []
    for episode in episodes:
        name = episode.record.episode_id
        found = [*check_episode(episode), *by_episode.get(name, [])]
        checks = ["capture", "state"]
        if name in drawn:
            compared, targets = _targets(chosen[name]), _targets(episode.segments)
            checks.append("tokens" if compared == targets else f"tokens ({compared} of {targets})")
        receipts.append(receipt(episode.record, found, checks))
    records = [e.record.model_copy(update={"quarantine": r.reason}) for e, r in zip(episodes, receipts, strict=True)]
    manifest = sealed.manifest
    write_archive(out, episodes)
    write_receipts(out, receipts)
    parents = {**manifest.parents, manifest.kind: manifest.digest()}
    reasons = Counter(r.reason.value for r in receipts if r.reason is not None)
    facts = {**manifest.facts, "quarantine": dict(sorted(reasons.items())), "replayed_tokens": len(drawn)}
    written = write_sealed(out, records, sealed.segments, kind=manifest.kind, parents=parents, facts=facts)
    refused = sum(reasons.values())
    counts = {
        name: Counts(raw=c.raw, validated=len(records), admitted=len(records) - refused, quarantined=refused)
        for name, c in written.counts.items()
    }
    return seal(out, manifest.kind, counts=counts, parents=parents, facts=facts), receipts


def _drawn(records: Sequence[EpisodeRecord], share: float, seed: int) -> set[str]:
    """Episodes of a policy whose log-probs are replayed: `share` of those that are not quarantined, rounded up."""
    if not 0 <= share <= 1:
        raise ValueError(f"share {share}: give a part between 0 and 1")
    names = [r.episode_id for r in records if r.sampled_by == "policy" and r.quarantine is None]
    return set(random.Random(seed).sample(names, -int(-share * len(names) // 1)))
