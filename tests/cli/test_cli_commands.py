"""The command line: help that teaches, errors as one message with the fix, exit codes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from occamy.cli.main import build_parser, main
from occamy.nano.base import FOLDER
from occamy.recipe import load_recipe
from occamy.storage.rundir import RunDirectory

COMMANDS = [
    *("run", "doctor", "synth", "admit", "rollout", "train sft", "train hdpo", "train sao", "merge", "eval"),
    *("report", "compile", "ui", "nano pretrain", "learning-table"),
    *("episode list", "episode show", "replay tokens", "replay state", "replay admit"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args([*command.split(), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: occamy {command}" in text
    assert len(text) > 200


def failing(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def test_unknown_key_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    error = failing(capsys, "run", "--profile", "ci", "--set", "hdpo.stpes=2")
    assert error == "occamy run: unknown key 'hdpo.stpes' (did you mean 'hdpo.steps'?)\n"


def test_resume_of_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    error = failing(capsys, "run", "--resume", str(tmp_path / "none"))
    assert f"{tmp_path / 'none'}: no run directory" in error
    assert "occamy run --out" in error


def test_second_run_in_one_directory_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with RunDirectory(tmp_path).lock():
        error = failing(capsys, "run", "--profile", "ci", "--out", str(tmp_path))
    assert "another occamy" in error
    assert "choose another --out" in error


def test_another_recipe_in_a_used_directory_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = load_recipe("ci")
    RunDirectory(tmp_path).open(recipe, recipe.name, recipe.digest(), recipe.seed)
    error = failing(capsys, "run", "--profile", "ci", "--set", "hdpo.steps=2", "--out", str(tmp_path))
    assert "another recipe needs a new directory" in error


def test_a_stage_says_which_command_comes_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    error = failing(capsys, "admit", "--profile", "ci", "--out", str(tmp_path))
    assert f"stage synthesis has not finished; run `occamy synth --out {tmp_path}` first" in error


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no run directory"):
        main(["--debug", "run", "--resume", str(tmp_path / "none")])


def test_doctor_tells_all_failures_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"version": "0.0.0"}')
    (tmp_path / "mlflow.db").write_text("no database, but long enough to be taken for one" * 20)
    sets = ["--set", f"base={tmp_path / 'nowhere'}", "--set", "disk_gib=1000000"]
    assert main(["doctor", "--profile", "ci", "--out", str(tmp_path), *sets]) == 1
    text = capsys.readouterr().out
    for check in ("disk space", "run directory", "base weights", "tracking database"):
        line = next(line for line in text.splitlines() if check in line)
        assert line.startswith("FAIL"), line
    assert "4 of" in text


def test_doctor_is_content_with_a_good_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--profile", "ci", "--out", str(tmp_path)]) == 0
    assert "ready" in capsys.readouterr().out


def test_doctor_finds_replaced_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in FOLDER.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    with (base / "model.safetensors").open("r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(b"\x7f")
    assert main(["doctor", "--profile", "ci", "--out", str(tmp_path / "r"), "--set", f"base={base}"]) == 1
    assert "model.safetensors" in capsys.readouterr().out


def test_compile_writes_yaml_for_the_asked_image(tmp_path: Path) -> None:
    out = tmp_path / "p.yaml"
    command = [sys.executable, "-m", "occamy.cli.main", "compile", "-o", str(out), "--image", "example/python:9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out)
    assert "image: example/python:9" in out.read_text()


def test_compile_refuses_another_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ends in .yaml" in failing(capsys, "compile", "-o", "p.json")


def test_ui_names_a_taken_port(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = load_recipe("ci")
    RunDirectory(tmp_path).open(recipe, recipe.name, recipe.digest(), recipe.seed)
    assert "not there yet" in failing(capsys, "ui", str(tmp_path))
    (tmp_path / "mlflow.db").touch()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        error = failing(capsys, "ui", str(tmp_path), "--port", str(port))
    assert f"port {port} is taken" in error
    assert "--port" in error


def test_knobs_that_keep_the_recipe_override_nothing() -> None:
    from occamy.stages.start import _KEEP, _KNOBS, knob_overrides

    assert knob_overrides({name: _KEEP.get(name, 0) for name in _KNOBS}) == []
    assert knob_overrides({"sft_epochs": 2.0, "hdpo_efficiency_weight": 0.0}) == [
        "marathon_sft.epochs=2",
        "sprint.epochs=2",
        "hdpo.w_eff=0",
    ]
