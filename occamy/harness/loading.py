"""Finds a harness by name or file and makes it ready to run: a composition, or the adapter of an agent program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from occamy.harness.adapters.declaration import Adapter
from occamy.harness.adapters.launch import AdapterHarness
from occamy.harness.agent import ComposedHarness
from occamy.harness.assignment import Harness
from occamy.harness.compose import CompositionError, nearest, resolve

_HERE = Path(__file__).parent
_FOLDERS = (_HERE / "compositions", _HERE / "adapters")


def load(source: str | Path) -> Harness:
    """Resolve a harness by the name of a shipped one (``react``, ``hermes``) or the path of a YAML file.

    Raises CompositionError for an unknown name, part, key or value, naming the nearest known one, and ProgramMissing
    for an agent program that is not installed.
    """
    path, data = _read(source)
    if isinstance(data, dict) and "launch" in data:
        return AdapterHarness(_adapter(path, data), path.parent.resolve())
    return ComposedHarness(resolve(data, str(source)))


def load_adapter(source: str | Path) -> tuple[Adapter, Path]:
    """An adapter's declaration with the folder that it lies in, whether its program is installed or not.

    Raises CompositionError for an unknown name or a declaration that does not hold, and for a composition.
    """
    path, data = _read(source)
    if not isinstance(data, dict) or "launch" not in data:
        raise CompositionError(f"harness {source}: a composition, which needs no program")
    return _adapter(path, data), path.parent.resolve()


def load_composition(source: str | Path) -> ComposedHarness:
    """A composition by name or file; for the name of an adapter, the composition that stands in for its program.

    Raises CompositionError for what is none.
    """
    stand_in = _HERE / "adapters" / "stand_ins" / f"{source}.yaml"
    path, data = (stand_in, yaml.safe_load(stand_in.read_text())) if stand_in.is_file() else _read(source)
    return ComposedHarness(resolve(data, path.name))


def names() -> list[str]:
    """Names of the shipped harnesses."""
    return sorted(_shipped())


def _adapter(path: Path, data: dict[str, Any]) -> Adapter:
    try:
        return Adapter.model_validate(data)
    except ValidationError as e:
        faults = (f"{'.'.join(str(x) for x in x['loc'])}: {x['msg']} (got {x.get('input')!r})" for x in e.errors())
        raise CompositionError(f"{path}: " + "; ".join(faults)) from e


def _read(source: str | Path) -> tuple[Path, Any]:
    shipped, path = _shipped(), Path(source)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise CompositionError(f"harness {source}: no such file; give a YAML file or one of {sorted(shipped)}")
    elif str(source) in shipped:
        path = shipped[str(source)]
    else:
        raise CompositionError(f"harness {str(source)!r} is unknown{nearest(str(source), shipped)}")
    try:
        return path, yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise CompositionError(f"{path}: no YAML: {e}") from e


def _shipped() -> dict[str, Path]:
    return {path.stem: path for folder in _FOLDERS for path in folder.glob("*.yaml")}
