"""`occamy episode` and `occamy replay` on a hand-made sealed folder of the nano model's tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from occamy.capture.ledger import LedgerTurn
from occamy.capture.sealed import write_sealed
from occamy.capture.transcript import Reader
from occamy.cli.episode_screen import episode_view
from occamy.cli.main import main
from occamy.contracts.episode import EpisodeRecord, Origin, Outcome, QuarantineReason, Segment
from occamy.contracts.lineage import tokenizer_digest
from occamy.contracts.record import digest
from occamy.contracts.task import Budget, FieldSpec, FileEquals, Grading, Metadata, TaskContract, WorldSpec
from occamy.nano.base import base_checkpoint
from occamy.nano.tokenizer import build_tokenizer
from occamy.rollout.archive import Recorded, write_archive
from occamy.rollout.evidence import Evidence
from occamy.worlds.workspace import MemoryWorkspace
from occamy.worlds.world import World

CONTRACT = TaskContract(
    request="write visits of crm A01 to file memo",
    world=WorldSpec(services={"crm": {"visits": FieldSpec(kind="int")}}, records={"crm": {"A01": {"visits": 12}}}),
    tools=("crm_get", "file_write"),
    grading=Grading(goals=(FileEquals(path="memo", text="12"),)),
    meta=Metadata(
        task_id="t1", pool="short", split="train", route="environment_first", capabilities=("act",), templates=("x",),
        seed=1, budget=Budget(turns=4, tool_calls=4, tokens=99),
    ),
)  # fmt: skip
PARTS = [
    ("<user>write visits of crm A01 to file memo<assistant>", Origin.INHERITED),
    ('crm_get{"id":"A01"}<end>', Origin.SAMPLED),
    ('<tool>{"visits":12}<assistant>', Origin.OBSERVED),
    ("done<end>", Origin.SAMPLED),
]


def played(
    name: str, *, copies: int = 1, quarantine: QuarantineReason | None = None, temperature: float = 1.0
) -> Recorded:
    """An episode of one root segment and one subagent's, its middle turn said `copies` times."""
    tokenizer = build_tokenizer()
    parts = [PARTS[0], *PARTS[1:3] * copies, PARTS[3]]
    ids = [np.array(tokenizer.encode(text), np.int32) for text, _ in parts]
    origin = np.concatenate([np.full(len(i), o, np.int8) for i, (_, o) in zip(ids, parts, strict=True)])
    tokens, sampled = np.concatenate(ids), origin == Origin.SAMPLED
    arrays = {"logprobs": np.where(sampled, -0.25, 0).astype("f4"), "versions": np.where(sampled, 3, -1).astype("i4")}
    root = Segment(name, "root", 0, "end", "policy", tokens, sampled, origin=origin, **arrays)
    seen = np.where(sampled, Origin.SUBAGENT, origin).astype(np.int8)
    child = Segment(name, "sub-0", 0, "end", "policy", tokens, np.zeros_like(sampled), origin=seen, **arrays)
    turns, at = [], 0
    for run in ("root", "sub-0"):
        at = 0
        for k in range(0, len(ids), 2):
            calls = '[["crm_get","{\\"id\\":\\"A01\\"}",true]]' if run == "root" and k + 2 < len(ids) else "[]"
            turns.append(_turn(run, len(turns), ids[k], ids[k + 1], at, calls, temperature))
            at += len(ids[k]) + len(ids[k + 1])
    world = World(CONTRACT.world, MemoryWorkspace())
    for _ in range(copies):
        world.call("crm_get", {"id": "A01"})
    state = world.state()
    evidence = Evidence(state, tuple(world.events), [], "done", (False,), ())
    record = EpisodeRecord(
        episode_id=name, task_id="t1", task_digest=CONTRACT.digest(), pool="short", split="train", trial=0, seed=1,
        sampled_by="policy", outcome=Outcome.completed, score=0.0, reward=0.0, success=False, steps=copies + 1,
        tool_calls=copies, failed_calls=0, segments=2, input_tokens=sum(t.prompt_tokens for t in turns),
        cached_tokens=0, output_tokens=sum(len(t.output) for t in turns), wall_seconds=1.0, harness_digest="sha256:h",
        final_fingerprint=digest(state), model="nano", version_min=3, version_max=3, quarantine=quarantine,
    )  # fmt: skip
    return Recorded(record, [root, child], turns, evidence, CONTRACT)


def _turn(
    run: str, ordinal: int, delta: np.ndarray, output: np.ndarray, at: int, calls: str, temperature: float
) -> LedgerTurn:
    n, first = len(output), at == 0
    return LedgerTurn(
        run, 0, ordinal, 0, "start" if first else "continue", "start" if first else "", -1, -1, at + len(delta), 0,
        temperature, 1.0, "stop", calls, run == "root", delta, output, np.full(n, -0.25, "f4"), np.full(n, 3, "i4"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("episodes") / "sealed"
    episodes = [played("a.0"), played("b.0", copies=60, quarantine=QuarantineReason.token_mismatch)]
    write_archive(out, episodes)
    facts = {"tokenizer": tokenizer_digest(base_checkpoint())}
    segments = [s for e in episodes for s in e.segments]
    write_sealed(out, [e.record for e in episodes], segments, kind="episodes", parents={}, facts=facts)
    return out


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(argv) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 or captured.out else captured.err


def test_a_list_has_one_line_for_each_episode(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, first, second = said(capsys, "episode", "list", str(folder)).splitlines()
    assert head.split()[:4] == ["episode", "pool", "outcome", "by"]
    assert first.split() == ["a.0", "short", "completed", "policy", "0.00", "2", "1", "2", "14", "7", "3"]
    assert second.split()[-2:] == ["3", "token_mismatch"] and second.split()[9] == "0"  # none of it trains


def test_a_transcript_in_a_pipe_marks_tokens_by_origin(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "episode", "show", str(folder), "a.0")
    lines = text.splitlines()
    assert lines[0] == "episode a.0: completed, not solved, score 0.00, reward 0.00"
    assert "tokens: inherited  ⟦sampled⟧  ⟨subagent⟩  ‹observed›" in lines
    assert "── run root, segment 1 of 1: 24 tokens, 7 train, opened by start, closed by end" in lines
    assert "user       write visits of crm A01 to file memo" in lines
    call = '⟦crm_get{"id":"A01"}<end>⟧  (turn 0: 5 tokens, version 3, log-prob -0.25, least -0.25)'
    assert f"assistant  {call}" in lines
    assert 'tool       ‹{"visits":12}›' in lines
    assert "assistant  ⟨done<end>⟩  (turn 1: 2 tokens, version 3, log-prob -0.25, least -0.25)" in lines
    assert "0 crm_get(id='A01') {\"visits\":12}" in lines and "answer: done" in lines
    assert lines[-3:] == ["run root: 7 = 7 of 24", "run sub-0: 0 = 0 of 24", "in all: 7 of 48"]
    assert "\x1b" not in text and not any(line.endswith(" ") for line in lines)


def test_a_long_episode_is_cut_unless_all_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = said(capsys, "episode", "show", str(folder), "b.0")
    assert "… 82 messages more, shown by --full" in short and "… 20 calls more, shown by --full" in short
    assert "QUARANTINED: token_mismatch; nothing of it trains" in short
    assert "(turn 60: 2 tokens" in short  # turns are numbered over what is hidden
    full = said(capsys, "episode", "show", str(folder), "b.0", "--full")
    assert "--full" not in full and full.count('⟦crm_get{"id":"A01"}<end>⟧') == 60


def test_a_terminal_gets_colours_instead_of_marks() -> None:
    console = Console(force_terminal=True, color_system="standard", width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    reader = Reader(base_checkpoint() / "tokenizer.json")
    console.print(episode_view(played("a.0"), reader, colours=True, full=True))
    text = console.export_text(styles=True)
    assert '\x1b[1;32mcrm_get{"id":"A01"}<end>\x1b[0m' in text  # sampled: bold green
    assert "\x1b[36m" in text and "\x1b[35m" in text and "⟦" not in text


def test_ids_alone_are_looked_up_below_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "runs" / "x" / "episodes")
    assert said(capsys, "episode", "show", "a.0").startswith("episode a.0: completed")
    error = said(capsys, "episode", "show", "z.9", code=1)
    assert "episode z.9: held by none of the 1 folders" in error
    shutil.copytree(folder, tmp_path / "runs" / "y")
    error = said(capsys, "episode", "show", "a.0", code=1)
    assert "runs/x/episodes, runs/y; name the folder before the id" in error


def test_what_cannot_be_shown_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no finished episode 'z.9' among 2" in said(capsys, "episode", "show", str(folder), "z.9", code=1)
    assert "neither a sealed folder" in said(capsys, "episode", "list", str(tmp_path), code=1)
    other = tmp_path / "model"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    error = said(capsys, "episode", "show", str(folder), "a.0", "--model", str(other), code=1)
    assert "its tokenizer is not that of the episodes" in error


def test_state_replay_says_what_it_did_and_fails_on_findings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "replay", "state", str(folder)) == "2 episodes, 61 tool calls made again: 0 findings\n"
    episode = played("a.0")
    assert episode.evidence is not None
    episode.evidence.state["services"]["crm"]["A01"]["visits"] = 13
    write_archive(tmp_path / "bad", [episode])
    write_sealed(tmp_path / "bad", [episode.record], episode.segments, kind="episodes", parents={}, facts={})
    lines = said(capsys, "replay", "state", str(tmp_path / "bad"), "a.0", code=1).splitlines()
    assert lines[1] == "episode a.0: final state crm A01: recorded {'visits': 13}, found {'visits': 12}"
    assert lines[-1] == "1 episodes, 1 tool calls made again: 3 findings"
    said(capsys, "replay", "admit", str(tmp_path / "bad"), str(tmp_path / "out"))
    shown = said(capsys, "episode", "list", str(tmp_path / "out"))
    assert shown.splitlines()[1].split()[-1] == "state_drift"


def test_token_replay_needs_the_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = said(capsys, "replay", "tokens", str(folder), "a.0", code=1)
    assert "1 segments were sampled by weight version 3: give its checkpoint" in error
    error = said(capsys, "replay", "tokens", str(folder), "--weights", "3:x", code=1)
    assert "--weights 3:x: give VERSION=DIR" in error
    base = str(base_checkpoint())
    lines = said(capsys, "replay", "tokens", str(folder), "a.0", "--weights", f"3={base}", code=1).splitlines()
    assert "run root, segment 0, turn 0" in lines[0]  # its log-probs were made up
    assert lines[-1] == "1 episodes, 7 log-probs compared: 1 findings"


def test_token_replay_says_what_it_could_not_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warm = played("w.0", temperature=0.7)
    write_archive(tmp_path / "warm", [warm])
    write_sealed(tmp_path / "warm", [warm.record], warm.segments, kind="episodes", parents={}, facts={})
    assert said(capsys, "replay", "tokens", str(tmp_path / "warm")) == (
        "1 episodes, 0 log-probs compared (7 not: their temperature is not 1, or was not kept): 0 findings\n"
    )
