"""What can be known before a run starts: every check reports, none stops at the first failure. Takes seconds."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from occamy.contracts.lineage import read_card
from occamy.nano.base import base_checkpoint
from occamy.recipe import Recipe
from occamy.storage.rundir import RunDirectory, RunDirectoryError

_MODULES = {
    "torch": "train",
    "megatron.core": "train",
    "transformers": "train",
    "kfp": "pipeline",
    "mlflow": "ui",
}
"""Needed module -> extra that brings it."""


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, and what is wrong with it and how to fix it, if anything."""

    check: str
    ok: bool
    detail: str


class PreflightError(RuntimeError):
    """The run cannot succeed: lists every finding."""


def inspect(recipe: Recipe, run_dir: Path) -> list[Finding]:
    """Run all checks and return what they found, good and bad."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("packages", _packages),
        ("disk space", lambda: _disk(recipe, run_dir)),
        ("run directory", lambda: _run_directory(run_dir)),
        ("base weights", lambda: _base(recipe, run_dir)),
        ("tracking database", lambda: _tracking(run_dir)),
        ("loopback ports", _ports),
    ]
    findings = []
    for name, check in checks:
        try:
            findings.append(Finding(name, True, check()))
        except (OSError, ValueError, RuntimeError, sqlite3.Error) as e:
            findings.append(Finding(name, False, str(e)))
    return findings


def require(recipe: Recipe, run_dir: Path) -> None:
    """Raise PreflightError listing every failure, if there is any."""
    bad = [f for f in inspect(recipe, run_dir) if not f.ok]
    if bad:
        raise PreflightError("; ".join(f"{f.check}: {f.detail}" for f in bad))


def _packages() -> str:
    missing: dict[str, list[str]] = {}
    for module, extra in _MODULES.items():
        top = module.partition(".")[0]
        if importlib.util.find_spec(top) is None or importlib.util.find_spec(module) is None:
            missing.setdefault(extra, []).append(module)
    if missing:
        names = ", ".join(m for group in missing.values() for m in group)
        raise RuntimeError(f"{names} not installed; run `pip install -c constraints.txt '.[{','.join(missing)}]'`")
    return ", ".join(_MODULES)


def _disk(recipe: Recipe, run_dir: Path) -> str:
    folder = run_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    if free < recipe.disk_gib:
        raise RuntimeError(
            f"{free:.1f} GiB free at {folder}, the recipe wants {recipe.disk_gib:g}; free some, choose another --out, "
            "or lower disk_gib"
        )
    return f"{free:.1f} GiB free at {folder}"


def _run_directory(run_dir: Path) -> str:
    if run_dir.exists() and not run_dir.is_dir():
        raise RunDirectoryError(f"{run_dir}: is a file; choose another --out")
    info = RunDirectory(run_dir).info()
    return f"{run_dir}: " + ("new" if info is None else f"run of recipe {info.recipe!r}, seed {info.seed}")


def base_folder(recipe: Recipe) -> Path:
    """The checkpoint that the recipe starts from, with its files and digests checked.

    Raises FileNotFoundError or ValueError naming the file and the fix.
    """
    return base_checkpoint() if recipe.base == "nano" else base_checkpoint(Path(recipe.base).absolute())


def _base(recipe: Recipe, run_dir: Path) -> str:
    folder = base_folder(recipe)
    card = read_card(folder)
    RunDirectory(run_dir).check_base(card.weights_digest)
    return f"{card.name} {card.weights_digest[:15]} in {folder}"


def _tracking(run_dir: Path) -> str:
    path = run_dir / "mlflow.db"
    if not path.exists():
        return f"{path}: will be made"
    connection = sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=2)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()
        tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'experiments'").fetchone()[0]
    except sqlite3.DatabaseError as e:
        raise RuntimeError(f"{path}: {e}; stop what holds it, or move the file away") from e
    finally:
        connection.close()
    if not tables:
        raise RuntimeError(f"{path}: no MLflow database; move the file away")
    return f"{path}: writable"


def _ports() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        return "loopback sockets work"


def port_free(port: int) -> None:
    """Raise RuntimeError naming the port and the fix when something listens on it."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError as e:
            raise RuntimeError(f"port {port} is taken ({e.strerror}); choose another with --port") from e
