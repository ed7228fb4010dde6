"""Variants of a seed task: reworded, or realised anew with other records. A variant that changes nothing is refused."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Literal

from occamy.contracts.likeness import changed_elements
from occamy.contracts.task import TaskContract
from occamy.synthesis.author import Draft, Slot, SynthesisError, build, draft_seed, draw_faults, realise
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.wordings import WORDINGS


def is_variant(slot: Slot, config: SynthesisConfig, run_seed: int) -> bool:
    """Whether a slot holds a variant of an earlier seed. The first slot of a pool is always a seed."""
    return slot.index > 0 and Random(slot.seed(run_seed) ^ 1).random() < config.variant_share


def write_task(slot: Slot, config: SynthesisConfig, run_seed: int) -> TaskContract:
    """The contract of a slot: a seed task, or a variant of an earlier seed of the same pool and split."""
    if not is_variant(slot, config, run_seed):
        return build(draft_seed(slot, config, run_seed))
    r = Random(slot.seed(run_seed) ^ 2)
    while True:
        origin = replace(slot, index=r.randrange(slot.index))
        if not is_variant(origin, config, run_seed):
            break
    parent = draft_seed(origin, config, run_seed)
    if r.random() < config.presentation_share:
        return finish_variant(build(parent), reword(r, parent, slot, run_seed), "presentation")
    return finish_variant(build(parent), realise_anew(r, parent, slot, config, run_seed), "realisation")


def reword(r: Random, parent: Draft, slot: Slot, run_seed: int) -> Draft:
    """Same records and goals, other wordings wherever a goal kind has others."""
    wordings = []
    for piece, old in zip(parent.pieces, parent.wordings):
        others = [k for k in range(len(WORDINGS[piece.kind][slot.split])) if k != old]
        wordings.append(r.choice(others) if others else old)
    return replace(parent, slot=slot, seed=slot.seed(run_seed), wordings=tuple(wordings))


def realise_anew(r: Random, parent: Draft, slot: Slot, config: SynthesisConfig, run_seed: int) -> Draft:
    """Same capability graph and wordings; other records, initial state and faults."""
    office, pieces = realise(r, slot, parent.kinds, config)
    faults = draw_faults(r, pieces, config.fault_share)
    return replace(parent, slot=slot, seed=slot.seed(run_seed), office=office, pieces=pieces, faults=faults)


def finish_variant(
    parent: TaskContract, draft: Draft, variation: Literal["presentation", "realisation"]
) -> TaskContract:
    """Build a variant with its true changes. Raises SynthesisError when it changes nothing."""
    changed = changed_elements(parent, build(draft))
    if not changed:
        raise SynthesisError(
            f"{draft.slot.task_id}: the {variation} variant of {parent.meta.task_id} changes neither files, backend, "
            f"wording nor grading; give {', '.join(draft.kinds)} another wording or another office"
        )
    return build(draft, variation, parent.meta.task_id, changed)
