"""Writes a folder of raw task packages and seals it. A killed run resumes; the result is the same to the byte."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

from occamy.contracts.manifest import NAME, Counts, Manifest, SealError, seal, verify
from occamy.contracts.release import contract_bytes, contract_path
from occamy.contracts.task import Pool, Split, TaskContract
from occamy.synthesis.author import Slot
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.variants import write_task

KIND = "tasks"

Progress = Callable[[int, int, str], None]
"""Called as (done, total, figure)."""


def synthesise(config: SynthesisConfig, out: Path, seed: int, on_progress: Progress | None = None) -> Manifest:
    """Write ``tasks/<id>/contract.json`` for every slot of `config` under `out`, and the manifest.

    A folder already sealed for the same configuration and seed is verified and returned as it is. Raises SealError
    when the folder was sealed for others, or was altered.
    """
    inputs = {"config_digest": config.digest(), "seed": seed}
    if (out / NAME).is_file():
        manifest = verify(out, KIND)
        if {key: manifest.facts.get(key) for key in inputs} != inputs:
            raise SealError(
                f"{out}: sealed for another configuration or seed; choose another folder or remove this one"
            )
        return manifest
    slots = list(_slots(config))
    _remove_strangers(out, {slot.task_id for slot in slots})
    tally: Counter[str] = Counter()
    variants = 0
    for done, slot in enumerate(slots, start=1):
        contract = write_task(slot, config, seed)
        _write(out, contract)
        tally.update(_coverage(contract))
        variants += contract.meta.parent is not None
        if on_progress:
            on_progress(done, len(slots), f"{variants} variants")
    facts = {**inputs, "coverage": dict(sorted(tally.items()))}
    return seal(out, KIND, counts={"task_packages": Counts(raw=len(slots))}, facts=facts)


def _slots(config: SynthesisConfig) -> Iterator[Slot]:
    for split in get_args(Split):
        for pool in get_args(Pool):
            for index in range(getattr(getattr(config, split), pool)):
                yield Slot(split, pool, index)


def _write(out: Path, contract: TaskContract) -> None:
    """Write unless the same bytes lie there. A file that a kill cut short differs, so a resumed run mends it."""
    path, data = contract_path(out, contract.meta.task_id), contract_bytes(contract)
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _remove_strangers(out: Path, expected: set[str]) -> None:
    """Remove packages that an unfinished run of another configuration left behind."""
    folder = out / "tasks"
    for package in sorted(folder.iterdir()) if folder.is_dir() else []:
        if package.name not in expected:
            shutil.rmtree(package)


def _coverage(contract: TaskContract) -> list[str]:
    meta = contract.meta
    place = f"{meta.split} {meta.pool}"
    changes = [f"{meta.variation} changes {element}" for element in meta.changed]
    nodes = [f"{place} {node}" for node in dict.fromkeys(meta.capabilities)]
    return [f"route {meta.route}", f"variation {meta.variation}", *changes, *nodes]
