"""`occamy harness` and `occamy rollout --harness`: one command line for compositions and agent programs alike."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from occamy.capture.sealed import read_sealed
from occamy.cli.main import build_parser, main
from occamy.contracts.manifest import seal
from occamy.contracts.release import KIND, contract_bytes, contract_path
from occamy.harness.adapters.program import FOLDER
from occamy.synthesis.author import Slot
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.variants import write_task


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "release"
    for index in range(3):
        task = write_task(Slot("train", "short", index), SynthesisConfig(), 7)
        path = contract_path(folder, task.meta.task_id)
        path.parent.mkdir(parents=True)
        path.write_bytes(contract_bytes(task))
    seal(folder, KIND)
    return folder


@pytest.mark.parametrize("command", ["harness list", "harness install", "harness serve", "rollout"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args([*command.split(), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: occamy {command}" in text and len(text) > 200


@pytest.mark.parametrize("kind", ["composition", "adapter", "adapter, Python reached by a link"])
def test_one_harness_or_another_on_the_same_tasks(
    kind: str, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = "react"
    if "link" in kind:
        (tmp_path / "link").symlink_to(Path(sys.executable).parent)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "link" / Path(sys.executable).name))
    if "adapter" in kind:
        page = (Path(__file__).parents[2] / "docs" / "harnesses.md").read_text()
        for name, language in (("toy.py", "python"), ("toy.yaml", "yaml")):
            found = re.search(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
            assert found is not None
            (tmp_path / name).write_text(found[1])
        harness = str(tmp_path / "toy.yaml")
    out = tmp_path / "out"
    assert main(["rollout", "--harness", harness, "--tasks", str(tasks), "--limit", "2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"completed  score 1\.00  \d+ turns, \d+ tool calls, 1 segments", said)) == 2
    assert f"2 of 2 episodes succeed (completed 2); sealed in {out}/sealed" in said
    sealed = read_sealed(out / "sealed")
    assert len(sealed.records) == len(sealed.segments) == 2 and all(r.success for r in sealed.records)


def failing(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 1
    return capsys.readouterr().err


def test_what_cannot_be_rolled_out_is_said(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "nowhere"))
    out = ("--tasks", str(tasks), "--out", str(tmp_path / "out"))
    assert "--harness needs --tasks DIR" in failing(capsys, "rollout", "--harness", "react")
    assert "did you mean 'react'?" in failing(capsys, "rollout", "--harness", "raect", *out)
    missing = failing(capsys, "rollout", "--harness", "hermes", *out)
    assert "nowhere/hermes holds no such program; run `occamy harness install hermes`" in missing
    react = ("rollout", "--harness", "react", *out)
    assert "leave out --profile" in failing(capsys, *react, "--profile", "laptop")
    other = failing(capsys, *react, "--set", "rollout.harness=briefed")
    assert "--set rollout.harness=briefed contradicts --harness react" in other
    assert "there is only rollout" in failing(capsys, *react, "--set", "sao.steps=1")
    pods = (*react, "--set", "rollout.sandbox.backend=kubernetes")
    assert "rollout.sandbox.namespace: Field required" in failing(capsys, *pods)
    pods = (*pods, "--set", "rollout.sandbox.namespace=x")
    assert "unknown key 'rollout.sandbox.namespac'" in failing(capsys, *pods, "--set", "rollout.sandbox.namespac=x")
    demanded = ("--set", "rollout.sandbox.minimum_isolation=gvisor", "--out", str(tmp_path / "refused"))
    assert "isolation 'gvisor' is required, 'container' is what the pools give" in failing(capsys, *pods, *demanded)
    assert "127.0.0.1:1/health: nobody listens there" in failing(capsys, *react, "--engine", "http://127.0.0.1:1")
    assert f"{tasks}: is sealed already" in failing(capsys, *react, "--out", str(tasks))
    with pytest.raises(SystemExit):
        main([*react, "--limit", "-1"])
    assert "argument --limit: -1 is too small; give 1 or more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["harness", "serve", "accio_work", "--port", "99999"])
    assert "99999 is no port" in capsys.readouterr().err
    (tmp_path / "odd.yaml").write_bytes(b"\xff")
    assert "odd.yaml: no YAML" in failing(capsys, "rollout", "--harness", str(tmp_path / "odd.yaml"), *out)
    assert "a composition, which needs no program" in failing(capsys, "harness", "install", "react")


def test_harnesses_are_listed_with_their_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["harness", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("react" in line and "composition" in line for line in lines)
    assert any("hermes" in line and "adapter" in line and "holds no such program" in line for line in lines)
