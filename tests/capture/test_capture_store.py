"""Durability: what is committed survives a kill, an unfinished episode starts over, a finished one never runs again."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from occamy.capture.store import Busy, OpenEpisode, Store
from occamy.capture.turn import Exchange, Prefix, Turn
from occamy.contracts.capture import CaptureRules, EpisodeSetup
from occamy.contracts.episode import QuarantineReason

POLICY = EpisodeSetup(sampled_by="policy", rules=CaptureRules(subagents=True), key_digest="sha256:1")
EXCHANGE = Exchange("sha256:0", "00", "{}", 4, 0.125)


def _turn(ordinal: int) -> Turn:
    return Turn(
        run="root",
        role="root",
        summary=False,
        segment=0,
        ordinal=ordinal,
        repeats=0,
        continues=0 if ordinal else -1,
        parent=(ordinal, 3) if ordinal else None,
        opened_by="" if ordinal else "start",
        delta=array("i", [1, 2, 70_000]),
        prompt_tokens=3,
        tools=b"\x00" * 16,
        heard=bytes(range(32)),
        attempt=0,
        overlaps=bool(ordinal),
        prefix=Prefix.continued if ordinal else Prefix.start,
        cached_tokens=0,
        temperature=0.1 * ordinal,
        top_p=0.9,
        output=array("i", [4, 5]),
        logprobs=array("f", [-0.5, -2.0]),
        versions=array("i", [9, 10]),
        finish="stop",
        said=b'{"role":"assistant","content":"x"}',
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "capture.sqlite"


def test_turns_come_back_as_they_went_in(path: Path) -> None:
    store = Store(path)
    store.open_episode("e", POLICY)
    turns = [_turn(0), _turn(1)]
    for turn in turns:
        store.add_turn("e", turn, EXCHANGE)
    assert store.turns("e") == turns
    store.close()
    assert Store(path).turns("e") == turns


def test_an_unfinished_episode_is_started_over_and_a_finished_one_refused(path: Path) -> None:
    store = Store(path)
    for name in ("cut", "ungraded", "done"):
        store.open_episode(name, POLICY)
        store.add_turn(name, _turn(0), EXCHANGE)
    store.close_episode("ungraded", None)
    store.close_episode("done", QuarantineReason.unexplained_prefix)
    store.finish_episode("done", '{"score":1}')
    store.close()

    store = Store(path)
    assert store.finished() == {"done": '{"score":1}'}
    assert store.captured("done").quarantine is QuarantineReason.unexplained_prefix
    for name in ("cut", "ungraded"):
        store.open_episode(name, POLICY)
        assert store.turns(name) == []
    with pytest.raises(ValueError, match="episode done is finished"):
        store.open_episode("done", POLICY)
    assert len(store.turns("done")) == 1
    store.discard("done")
    assert store.finished() == {}
    store.open_episode("done", POLICY)


def test_only_a_closed_episode_can_be_finished_or_read(path: Path) -> None:
    store = Store(path)
    store.open_episode("e", POLICY)
    for name in ("e", "unknown"):
        with pytest.raises(ValueError, match=f"episode {name} is not closed"):
            store.finish_episode(name, "{}")
        with pytest.raises(KeyError, match=name):
            store.captured(name)


def test_a_closed_episode_never_changes(path: Path) -> None:
    store = Store(path)
    store.open_episode("e", POLICY)
    store.add_turn("e", _turn(0), EXCHANGE)
    store.close_episode("e", None)
    for name in ("e", "unknown"):
        with pytest.raises(KeyError, match=f"no open episode {name}"):
            store.add_turn(name, _turn(1), EXCHANGE)
    for _ in range(2):
        store.finish_episode("e", '{"score":1}')
    with pytest.raises(ValueError, match="finished with another record"):
        store.finish_episode("e", '{"score":0}')
    assert (store.finished(), store.turns("e")) == ({"e": '{"score":1}'}, [_turn(0)])


def test_a_turn_that_cannot_be_stored_leaves_nothing_of_itself(path: Path) -> None:
    store = Store(path)
    store.open_episode("e", POLICY)
    store.add_turn("e", _turn(0), EXCHANGE)
    with pytest.raises(sqlite3.IntegrityError):
        store.add_turn("e", _turn(0), EXCHANGE, QuarantineReason.state_drift)
    assert store.read_open("e") == OpenEpisode(POLICY, [_turn(0)], None)


def test_two_proxies_write_to_one_store(path: Path) -> None:
    stores = [Store(path), Store(path)]
    for store, name in zip(stores, "ab", strict=True):
        store.open_episode(name, POLICY)
    for ordinal in range(20):
        for store, name in zip(stores, "ab", strict=True):
            store.add_turn(name, _turn(ordinal), EXCHANGE)
    assert list(stores[0].open_episodes()) == ["a", "b"]
    assert [len(stores[0].turns(name)) for name in "ab"] == [20, 20]


def test_a_write_that_would_have_to_wait_is_refused_and_changes_nothing(path: Path) -> None:
    store = Store(path)
    store.open_episode("e", POLICY)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Busy), store.unless_busy():
        store.add_turn("e", _turn(0), EXCHANGE)
    other.execute("ROLLBACK")
    assert store.turns("e") == []
    with store.unless_busy():
        store.add_turn("e", _turn(0), EXCHANGE)
    assert store.turns("e") == [_turn(0)]
    with ThreadPoolExecutor(1) as pool, store.unless_busy(), pytest.raises(Busy):
        pool.submit(lambda: store.unless_busy().__enter__()).result()
    other.close()
    store.close()


def test_a_killed_process_loses_no_committed_turn(path: Path) -> None:
    code = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
import importlib.util
spec = importlib.util.spec_from_file_location("here", {__file__!r})
here = importlib.util.module_from_spec(spec)
spec.loader.exec_module(here)
store = here.Store(Path({str(path)!r}))
store.open_episode("done", here.POLICY)
store.add_turn("done", here._turn(0), here.EXCHANGE)
store.close_episode("done", None)
store.finish_episode("done", "record")
store.open_episode("cut", here.POLICY)
for ordinal in range(5):
    store.add_turn("cut", here._turn(ordinal), here.EXCHANGE)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -9
    store = Store(path)
    assert [t.ordinal for t in store.turns("cut")] == [0, 1, 2, 3, 4]
    assert store.finished() == {"done": "record"}
    assert len(store.captured("done").segments) == 1
