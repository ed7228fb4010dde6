"""Adapters as data: placeholders, endings, programs found and installed, declarations refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from occamy.contracts.episode import Outcome
from occamy.harness.adapters.declaration import Adapter, Command, Ending, fill
from occamy.harness.adapters.ending import dig, read_ending
from occamy.harness.adapters.launch import AdapterHarness
from occamy.harness.adapters.program import FOLDER, ProgramMissing, install, installed_version
from occamy.harness.agent import ComposedHarness
from occamy.harness.compose import CompositionError
from occamy.harness.loading import load, load_adapter, load_composition, names
from occamy.sandboxes.protocol import ExecResult

TOY: dict[str, Any] = {
    "name": "toy",
    "version": "2.1",
    "launch": {
        "kind": "command",
        "argv": ["toy", "{request}"],
        "installed": {
            "version_file": "VERSION",
            "version_pattern": "^toy (.+)$",
            "steps": [
                ["sh", "-c", "mkdir -p {program} && echo x >> {here}/ran"],
                ["cp", "{here}/V", "{program}/VERSION"],
            ],
            "needs": "a shell",
        },
    },
}


def test_places_are_filled_in_typed_and_inside_text() -> None:
    places = {"context_limit": 65536, "base": "http://h/episodes/e", "key": "k"}
    data = {"a": "{context_limit}", "b": ["{base}/sub/v1", {"c": "Bearer {key}"}], "d": 3, "e": None}
    filled = {"a": 65536, "b": ["http://h/episodes/e/sub/v1", {"c": "Bearer k"}], "d": 3, "e": None}
    assert fill(data, places) == filled


def test_an_unknown_place_is_refused_where_the_declaration_is_read(tmp_path: Path) -> None:
    launch = {"kind": "command", "argv": ["toy"], "config": {"c.json": {"deep": ["{api_key}"]}}}
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump({**TOY, "launch": launch}))
    with pytest.raises(CompositionError, match=r"nothing is called \{api_key\}; known are base, context_limit"):
        load(tmp_path / "toy.yaml")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"retries": {"server_error": 1}}, "retries: Extra inputs are not permitted"),
        ({"version": 2}, "version"),
        ({"launch": {"kind": "telepathy"}}, "'telepathy'"),
        ({"capture": {"summaries": [{"role": "user", "starts": ""}]}}, "capture.summaries.0.starts"),
        ({"retry": 3}, "retry: Extra inputs are not permitted"),
        ({"name": "../toy"}, r"name: .* \(got '../toy'\)"),
        ({"tools": {"result": "("}}, r"tools.result: .*no regular expression: .* \(got '\('\)"),
        ({"capture": {"auxiliaries": [{"run": "my-aux", "purpose": "title"}]}}, "capture.auxiliaries.0.run"),
        (
            {"capture": {"auxiliaries": [{"run": "aux", "purpose": p} for p in ("summary", "title")]}},
            "two auxiliaries have the run 'aux'; give each kind of call a run of its own",
        ),
        ({"capture": {"appends": ["system"]}}, "capture.appends.0"),
        ({"launch": {"kind": "command", "argv": ["toy"], "scripts": ["../go.py"]}}, "scripts.0: .*without '..'"),
        ({"launch": {"kind": "command", "argv": ["toy"], "config": {"/etc/c.json": {}}}}, "config.*below the folder"),
    ],
)
def test_a_bad_declaration_is_refused_by_its_key(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump({**TOY, **change}))
    with pytest.raises(CompositionError, match=said):
        load(tmp_path / "toy.yaml")


def ended(code: int | None = 0, out: str = "", err: str = "", **more: Any) -> ExecResult:
    kinds = {None: Outcome.timed_out, 0: Outcome.completed}
    return ExecResult(kinds.get(code, Outcome.agent_failed), code, out.encode(), err.encode(), 12.3, **more)


HERMES_LIKE = Ending(
    codes={0: Outcome.completed, 2: Outcome.agent_failed},
    report="u.json",
    failed="run.failed",
    no_answer=("No reply:",),
)
FINE = b'{"run": {"failed": false}}'


@pytest.mark.parametrize(
    ("result", "report", "outcome", "text"),
    [
        (ended(0, " it is done \n"), FINE, Outcome.completed, "it is done"),
        (ended(0, "done"), b'{"run": {"failed": true}}', Outcome.agent_failed, "reports a failed run: done"),
        (ended(0, "done"), b"no json", Outcome.completed, "done"),
        (ended(0, "done"), None, Outcome.infra_failed, "left no u.json: done"),
        (ended(0, "  \n"), FINE, Outcome.agent_failed, "the final answer is empty"),
        (ended(0, "No reply: gave up"), FINE, Outcome.agent_failed, "No reply: gave up"),
        (ended(2, "", "gave up"), FINE, Outcome.agent_failed, "gave up"),
        (ended(3, "", "Traceback"), FINE, Outcome.infra_failed, "ended with status 3: Traceback"),
        (ended(139), None, Outcome.infra_failed, "ended with status 139: it said nothing"),
        (ended(137, limit="memory"), None, Outcome.agent_failed, "killed: too much of memory"),
        (ended(None, "half"), None, Outcome.timed_out, "used up after 12 s"),
    ],
)
def test_endings(result: ExecResult, report: bytes | None, outcome: Outcome, text: str) -> None:
    said = read_ending(HERMES_LIKE, result, report)
    assert said.outcome is outcome
    if outcome is Outcome.completed:
        assert (said.answer, said.error) == (text, "")
    else:
        assert said.answer == "" and text in said.error


def test_an_answer_may_lie_in_json() -> None:
    ending = Ending(answer="payloads.1.text")
    out = json.dumps({"payloads": [{"text": "thinking"}, {"text": "done"}]})
    assert read_ending(ending, ended(0, out), None).answer == "done"
    assert read_ending(ending, ended(0, "{}"), None).outcome is Outcome.agent_failed
    assert read_ending(ending, ended(0, "not json"), None).outcome is Outcome.agent_failed
    assert dig({"a": [1]}, "a.1") is None and dig({"a": [1]}, "a.x") is None and dig("a", "a") is None


def test_a_program_is_installed_once_and_in_its_own_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "programs"))
    adapter = Adapter.model_validate(TOY)
    here = tmp_path / "here"
    here.mkdir()
    with pytest.raises(ProgramMissing, match="holds no such program; run `occamy harness install toy`"):
        installed_version(adapter)
    with pytest.raises(ProgramMissing, match=r"`cp .*/here/V .*` ended with 1; it needs a shell"):
        install(adapter, here)
    (here / "V").write_text("toy 2.1\n")
    (tmp_path / "programs/toy/VERSION").write_text("toy 2.1\n")  # half installed: the attempt before was cut off
    with pytest.raises(ProgramMissing, match="no such program"):
        installed_version(adapter)
    assert install(adapter, here) == tmp_path / "programs/toy"
    assert installed_version(adapter) == "2.1" and (here / "ran").read_text() == "x\nx\n"
    install(adapter, here)
    assert (here / "ran").read_text() == "x\nx\n"
    (tmp_path / "programs/toy/VERSION").write_text("toy 2.2\n")
    with pytest.raises(ProgramMissing, match=r"holds version 2\.2, the adapter is for 2\.1"):
        installed_version(adapter)


def test_the_manifest_holds_what_runs(tmp_path: Path) -> None:
    launch = {"kind": "command", "argv": ["sh", "{home}/go.sh"], "scripts": ["go.sh"]}
    (tmp_path / "go.sh").write_text("echo 1")
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump({**TOY, "launch": launch}))
    first = load(tmp_path / "toy.yaml")
    again = load(tmp_path / "toy.yaml")
    (tmp_path / "go.sh").write_text("echo 2")
    other = load(tmp_path / "toy.yaml")
    assert isinstance(first, AdapterHarness) and first.digest == again.digest != other.digest
    assert str(tmp_path) not in first.manifest.model_dump_json()
    with pytest.raises(ValueError, match=r"context of 9000 tokens or more, rollout\.context_limit is 4096"):
        AdapterHarness(first.adapter.model_copy(update={"minimum_context": 9000}), tmp_path).check_context(4096)


def test_every_shipped_adapter_is_a_declaration_that_holds() -> None:
    adapters = {}
    for name in names():
        try:
            adapter, here = load_adapter(name)
        except CompositionError as e:
            assert "a composition" in str(e)
            continue
        adapters[name] = adapter
        assert adapter.name == name
        if isinstance(adapter.launch, Command):
            assert all((here / script).is_file() for script in adapter.launch.scripts)
    assert {"hermes", "accio_work"} <= adapters.keys()
    stand_in = load_composition("accio_work")
    assert isinstance(stand_in, ComposedHarness)
    assert stand_in.rules == adapters["accio_work"].capture
    with pytest.raises(CompositionError, match="did you mean 'hermes'"):
        load("hemres")
