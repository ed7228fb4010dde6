"""Agent programs on this machine: where they are installed, in which version, and how they come there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from occamy.harness.adapters.declaration import Adapter, Command, Installed

FOLDER = "OCCAMY_HARNESSES"
"""Environment variable naming the folder that holds one folder per agent program; ``.harness`` by default."""

_BEGUN = ".begun"
"""Ends the name of the file that stands beside a folder while something is installed there."""


class ProgramMissing(RuntimeError):
    """An agent program is not installed, or in another version than its adapter is written for."""


def program_folder(name: str) -> Path:
    """Where the program of an adapter lies, whether it is there or not."""
    return (Path(os.environ.get(FOLDER, ".harness")) / name).resolve()


def installed_version(adapter: Adapter) -> str:
    """Version found on this machine; the adapter's own when nothing is installed for it.

    Raises ProgramMissing, naming the command that installs it.
    """
    installed = adapter.launch.installed if isinstance(adapter.launch, Command) else None
    if installed is None:
        return adapter.version
    folder = program_folder(adapter.name)
    found = _version(folder, installed)
    fix = f"run `occamy harness install {adapter.name}`, or set {FOLDER} to the folder that holds it"
    if found is None:
        raise ProgramMissing(f"harness {adapter.name}: {folder} holds no such program; {fix}")
    if found != adapter.version:
        raise ProgramMissing(
            f"harness {adapter.name}: {folder} holds version {found}, the adapter is for {adapter.version}; {fix}"
        )
    return found


def install(adapter: Adapter, here: Path) -> Path:
    """Install the program in the version that its adapter is written for, unless it is there. `here` holds the
    declaration and its pins.

    Raises ProgramMissing when a step fails.
    """
    folder = program_folder(adapter.name)
    installed = adapter.launch.installed if isinstance(adapter.launch, Command) else None
    if installed is None or _version(folder, installed) == adapter.version:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    begun = folder.with_name(f"{folder.name}{_BEGUN}")
    begun.touch()
    places = {"{program}": str(folder), "{python}": sys.executable, "{here}": str(here)}
    for step in installed.steps:
        argv = [re.sub(r"\{\w+\}", lambda m: places[m[0]], word) for word in step]
        needs = f"; it needs {installed.needs}" if installed.needs else ""
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, check=False)
        except OSError as e:
            raise ProgramMissing(f"harness {adapter.name}: `{argv[0]}` cannot be run: {e.strerror}{needs}") from e
        if done.returncode != 0:
            raise ProgramMissing(f"harness {adapter.name}: `{' '.join(argv)}` ended with {done.returncode}{needs}")
    begun.unlink()
    installed_version(adapter)
    return folder


def readable(adapter: Adapter) -> list[Path]:
    """Folders that the program is read from: its own, and those of the Python that it may run on."""
    if not isinstance(adapter.launch, Command):
        return []
    folders = {Path(sys.prefix), Path(sys.base_prefix)}
    if adapter.launch.installed is not None:
        folders.add(program_folder(adapter.name))
    return sorted(folder.resolve() for folder in folders)


def this_python() -> Path:
    """This Python, where `readable` has it: links to its folder are resolved, and its own is not, which makes it that
    of a virtual environment."""
    found = Path(sys.executable)
    return found.parent.resolve() / found.name


def stated_version(text: str, installed: Installed) -> str | None:
    """The version that a version file states."""
    found = re.search(installed.version_pattern, text, re.MULTILINE)
    return found[1] if found else None


def _version(folder: Path, installed: Installed) -> str | None:
    if folder.with_name(f"{folder.name}{_BEGUN}").exists():
        return None
    for path in sorted(folder.glob(installed.version_file)):
        if found := stated_version(path.read_text(), installed):
            return found
    return None
