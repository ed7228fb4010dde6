from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from occamy.training.exchange import Exchange, ExchangeBusy


def _write(text: str):  # type: ignore[no-untyped-def]
    return lambda folder: (folder / "data").write_text(text)


def test_folders_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)

    def broken(folder: Path) -> None:
        (folder / "data").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        exchange.publish_batch(1, broken)
    assert exchange.batch(1) is None
    assert list((tmp_path / "batches").iterdir()) == []  # a half batch would go on filling the disk
    batch = exchange.publish_batch(1, _write("whole"))
    assert batch == tmp_path / "batches" / "00001" == exchange.batch(1)
    assert (batch / "data").read_text() == "whole"


def test_published_folders_are_never_replaced(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    exchange.publish_batch(3, _write("first"))
    exchange.publish_batch(3, _write("second"))
    assert (tmp_path / "batches/00003/data").read_text() == "first"


def test_weights_newest_and_pruned(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    assert exchange.newest_weights() == 0
    for version in (1, 2, 3, 4):
        exchange.publish_weights(version, _write(str(version)))
    exchange.prune_weights(keep=2)
    assert exchange.newest_weights() == 4
    assert [exchange.weights(v) is not None for v in (1, 2, 3, 4)] == [False, False, True, True]
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["00003", "00004"]


def test_metrics_keep_one_line_per_step_and_survive_a_torn_line(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    exchange.append_metrics(1, {"reward": 0.5})
    with (tmp_path / "metrics.jsonl").open("ab") as f:
        f.write(b'{"reward": 0.7, "st')  # killed while appending
    assert exchange.metrics() == [{"reward": 0.5, "step": 1}]
    exchange.append_metrics(1, {"reward": 0.9})  # a resumed worker repeats step 1
    exchange.append_metrics(2, {"reward": 0.7})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward"] for line in lines] == [0.5, 0.7]


def test_stop_is_a_file_that_can_be_withdrawn(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    assert not exchange.stop_requested()
    exchange.request_stop("enough")
    assert exchange.stop_requested() and (tmp_path / "stop").read_text() == "enough"
    exchange.clear_stop()
    assert not exchange.stop_requested()


def test_one_driver_at_a_time_and_a_killed_one_is_noticed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from occamy.training.exchange import Exchange\n"
        "with Exchange(Path(sys.argv[1])).held('driver') as token: print(token, flush=True); sys.stdin.read()"
    )
    exchange = Exchange(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    token = child.stdout.readline().strip()
    assert exchange.holder_alive("driver", token)
    assert not exchange.holder_alive("driver", "another")
    with pytest.raises(ExchangeBusy, match=str(child.pid)), exchange.held("driver", wait_s=0.0):
        pass
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert not exchange.holder_alive("driver", token)
    partial = tmp_path / "batches" / ".00002.1.tmp"
    partial.mkdir()
    with exchange.held("driver") as mine:
        assert exchange.holder_alive("driver", mine) and not exchange.holder_alive("driver", token)
        assert not partial.exists()
    assert not exchange.holder_alive("driver", mine)
