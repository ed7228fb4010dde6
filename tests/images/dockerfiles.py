"""Reads Dockerfiles and the build context: instructions, stages, and which files of the repository a build is sent."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "images").glob("*/Dockerfile"))


def _script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"images_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


building = _script(ROOT / "images" / "build.py")
"""images/build.py, which is a script and in no package."""


@dataclass
class Stage:
    """One FROM and what follows it."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    """Instruction and its arguments on one line."""

    def of(self, instruction: str) -> list[str]:
        """Arguments of every such instruction, in order."""
        return [rest for word, rest in self.steps if word == instruction]


@dataclass
class Dockerfile:
    """A parsed Dockerfile."""

    arguments: dict[str, str]
    """Defaults of the ARGs before the first stage."""
    stages: list[Stage]


def parse(text: str) -> Dockerfile:
    """Read a Dockerfile: continuation lines are joined, comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = Dockerfile({}, [])
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        rest = " ".join(rest.split())
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found.stages.append(Stage(base, name))
        elif found.stages:
            found.stages[-1].steps.append((word, rest))
        elif word == "ARG":
            name, _, default = rest.partition("=")
            found.arguments[name] = default
    return found


def copied(stage: Stage) -> list[str]:
    """Sources of the stage that come from the build context."""
    plain = [rest.split() for rest in stage.of("COPY") if not rest.startswith("--from=")]
    assert stage.of("ADD") == [], "ADD unpacks and downloads; COPY does neither"
    return [source for words in plain for source in words[:-1]]


def context(listed: list[str], ignore: str) -> set[str]:
    """Which of these files a build is sent, by the rules of .dockerignore: the last that matches decides."""
    rules = [line for line in ignore.splitlines() if line and not line.startswith("#")]
    return {path for path in listed if not _ignored(path, rules)}


def _ignored(path: str, rules: list[str]) -> bool:
    parents = path.split("/")
    prefixes = ["/".join(parents[: i + 1]) for i in range(len(parents))]
    ignored = False
    for rule in rules:
        pattern = rule.removeprefix("!")
        anywhere = pattern.removeprefix("**/")
        hit = any(
            _matches(prefix, pattern) or (anywhere != pattern and _matches(prefix.rpartition("/")[2], anywhere))
            for prefix in prefixes
        )
        if hit:
            ignored = not rule.startswith("!")
    return ignored


def _matches(path: str, pattern: str) -> bool:
    """Like Go's filepath.Match: a star does not cross a slash."""
    return path.count("/") == pattern.count("/") and all(
        fnmatch.fnmatchcase(a, b) for a, b in zip(path.split("/"), pattern.split("/"))
    )


def tracked() -> list[str]:
    """Files that Git knows, of the working tree."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.splitlines() if (ROOT / path).is_file()]
