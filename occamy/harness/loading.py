"""Finds a harness by name or file and makes it ready to run."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import yaml

from occamy.harness.agent import ComposedHarness
from occamy.harness.assignment import Harness
from occamy.harness.compose import CompositionError, nearest, resolve


def load(source: str | Path) -> Harness:
    """Resolve a harness by the name of a shipped one (``react``) or the path of a YAML file.

    Raises CompositionError for an unknown name, part, key or value, naming the nearest known one.
    """
    folder = resources.files("occamy.harness").joinpath("compositions")
    shipped = {p.name.removesuffix(".yaml"): p for p in folder.iterdir() if p.name.endswith(".yaml")}
    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise CompositionError(
                f"harness {source}: no such file; give a composition file or one of {sorted(shipped)}"
            )
        text = path.read_text()
    elif str(source) in shipped:
        text = shipped[str(source)].read_text()
    else:
        raise CompositionError(f"harness {str(source)!r} is unknown{nearest(str(source), shipped)}")
    return ComposedHarness(resolve(yaml.safe_load(text), str(source)))
