"""One trainer process: ``python -m occamy.training.worker SPEC.json``, in the environment that torchrun gives.

SPEC.json names its algorithm; the algorithm's module reads the rest.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from occamy.training.launch import ask_to_die_with_parent

TRAINERS = {"sft": "occamy.training.sft_loop", "hdpo": "occamy.training.rl_loop", "sao": "occamy.training.rl_loop"}
"""Algorithm -> module with ``train(spec: dict, place: Place) -> None``. Imported after the device is prepared."""


def main(spec_path: Path) -> None:
    """Train as SPEC says. Raises ValueError for an unknown algorithm."""
    ask_to_die_with_parent()
    spec = json.loads(spec_path.read_text())
    algorithm = spec.get("algorithm")
    if algorithm not in TRAINERS:
        raise ValueError(f"{spec_path}: algorithm {algorithm!r} is unknown; use one of {', '.join(TRAINERS)}")
    from occamy.training.device import leave, prepare

    place = prepare(threads=spec.get("config", {}).get("threads", 1))
    import_module(TRAINERS[algorithm]).train(spec, place)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
