"""The run directory: one version, one recipe, one writer; finished stages with equal inputs are known again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from occamy import __version__
from occamy.contracts.record import Record
from occamy.storage.progress import Progress, ProgressReader
from occamy.storage.rundir import RunDirectory, RunDirectoryError, StageRecord


class Settings(Record):
    steps: int = 1


def opened(path: Path, digest: str = "sha256:aa", seed: int = 1) -> RunDirectory:
    run = RunDirectory(path)
    run.open(Settings(), "mine", digest, seed)
    return run


def test_open_is_idempotent_and_remembers(tmp_path: Path) -> None:
    run = opened(tmp_path / "r")
    opened(tmp_path / "r")
    info = run.info()
    assert info is not None
    assert (info.recipe, info.seed, info.version) == ("mine", 1, __version__)
    assert run.run_id == "mine-1-aa"


@pytest.mark.parametrize(("digest", "seed", "word"), [("sha256:bb", 1, "recipe"), ("sha256:aa", 2, "seed")])
def test_refuses_another_recipe_or_seed(tmp_path: Path, digest: str, seed: int, word: str) -> None:
    opened(tmp_path)
    with pytest.raises(RunDirectoryError, match=f"another {word} needs a new directory"):
        opened(tmp_path, digest, seed)


def test_refuses_another_version_with_the_fix(tmp_path: Path) -> None:
    run = opened(tmp_path)
    path = tmp_path / "run.json"
    path.write_text(path.read_text().replace(f'"{__version__}"', '"0.0.1"'))
    with pytest.raises(RunDirectoryError, match=r"made by occamy 0\.0\.1 .* install that version"):
        run.info()


def test_refuses_to_go_on_from_another_base(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.check_base("sha256:aa")
    run.pin_base("sha256:aa")
    run.pin_base("sha256:aa")
    with pytest.raises(RunDirectoryError, match=r"began from base weights sha256:aa, .* now sha256:bb"):
        run.pin_base("sha256:bb")


def test_a_stage_record_is_there_or_says_what_to_do(tmp_path: Path) -> None:
    run = opened(tmp_path)
    with pytest.raises(RunDirectoryError, match="soup: not finished; run the stage first"):
        run.record("soup")


def test_refuses_a_damaged_run_file(tmp_path: Path) -> None:
    run = opened(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunDirectoryError, match="start in a new directory"):
        run.info()


def test_refuses_a_folder_with_foreign_stages(tmp_path: Path) -> None:
    (tmp_path / "stages" / "x").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match="is no run directory"):
        opened(tmp_path)


def test_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with run.lock(), pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"), run.lock():
        pass
    with run.lock():
        pass


def test_lock_lives_on_in_a_child_that_inherits_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with run.lock() as handle:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(handle,))
    try:
        with pytest.raises(RunDirectoryError, match="another occamy"), run.lock():
            pass
    finally:
        child.communicate(b"\n")
    with run.lock():
        pass


def test_a_finished_stage_is_known_by_its_inputs(tmp_path: Path) -> None:
    run = opened(tmp_path)
    assert run.finished("soup", "sha256:in") is None
    run.finish(StageRecord(stage="soup", inputs="sha256:in", output="sha256:out", facts={"n": 2}))
    found = run.finished("soup", "sha256:in")
    assert found is not None
    assert found.output == "sha256:out"
    with pytest.raises(RunDirectoryError, match="was made from other inputs"):
        run.finished("soup", "sha256:other")


def test_a_damaged_stage_record_is_refused_by_name(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.finish(StageRecord(stage="soup", inputs="i", output="o", facts={}))
    (tmp_path / "stages" / "soup.json").write_text('{"stage":"soup"')
    with pytest.raises(RunDirectoryError, match=r"soup\.json: unreadable; remove it"):
        run.finished("soup", "i")


def test_progress_is_read_in_order_and_a_torn_line_is_skipped(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path)
    assert reader.poll() == []
    progress = Progress(tmp_path, "sft")
    progress.state("started")
    progress(5, 5, "loss 0.1")
    with (tmp_path / "progress.jsonl").open("a") as f:
        f.write('{"time": 1.0, "sta')
    assert [(e.state, e.done, e.total, e.figure) for e in reader.poll()] == [
        ("started", 0, 0, ""),
        ("running", 5, 5, "loss 0.1"),
    ]
    with (tmp_path / "progress.jsonl").open("a") as f:
        f.write("\n")
    progress.state("failed", "no data")
    assert [(e.state, e.figure) for e in reader.poll()] == [("failed", "no data")]


def test_progress_is_thinned_but_the_last_step_always_shows(tmp_path: Path) -> None:
    progress = Progress(tmp_path, "sft")
    for i in range(1, 101):
        progress(i, 100)
    events = ProgressReader(tmp_path).poll()
    assert len(events) < 50
    assert events[-1].done == 100
