"""The programmatic author: a task is a pure function of its slot, the configuration and one seed.

Two routes. Environment-first draws an office, then goals that it can carry. Capability-first freezes a capability
graph, then looks for an office with records that can carry it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from occamy.contracts.likeness import CLAUSE, task_literals
from occamy.contracts.task import Budget, Grading, Metadata, Pool, Split, TaskContract, WorldSpec
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.goals import CAPABILITIES, Piece, draw_piece
from occamy.synthesis.office import Office, draw_office
from occamy.synthesis.wordings import WORDINGS, GoalKind
from occamy.worlds.tools import tool_names

Route = Literal["environment_first", "capability_first"]

MIX: dict[Pool, dict[GoalKind, float]] = {
    "short": {"set": 2, "mark": 1, "create": 2, "search": 2, "cross": 2, "report": 1.5, "memo": 1.5},
    "long": {"cond": 2, "cross": 2, "copy": 2, "add": 2, "chain": 2, "set": 1.5, "report": 1, "memo": 1},
}
"""Weights of goal kinds in environment-first tasks (our choice)."""

GOAL_COUNTS: dict[Pool, tuple[int, ...]] = {"short": (1,), "long": (2, 3, 3)}
CALL_RANGE: dict[Pool, tuple[int, int]] = {"short": (1, 2), "long": (4, 8)}
"""Fewest and most gold calls of a task, faults not counted."""

GRAPHS: dict[Pool, dict[tuple[str, ...], float]] = {
    "short": {("locate", "act"): 4, ("resolve", "act"): 3, ("recall", "act"): 3, ("act", "verify"): 1},
    "long": {
        ("locate", "resolve", "act", "compute", "act"): 2,
        ("locate", "resolve", "act", "decide", "act"): 2,
        ("resolve", "resolve", "act", "inspect", "report"): 1,
        ("recall", "act", "reconcile", "act", "act"): 1,
        ("reconcile", "act", "decide", "act", "compute", "act"): 1,
    },
}
"""Capability graphs (chains of nodes) that capability-first tasks freeze, with weights (our choice)."""

OFFICES = 50
"""Initial states to try before a list of goal kinds counts as impossible."""
DRAWS = 25
"""Draws of one goal in one office before it counts as not fitting."""
SPARE_TURNS = 4
"""Turns beyond twice the gold calls that a budget allows (our choice)."""
TOKENS_PER_TURN = 40
"""Sampled tokens per turn that a budget allows (our choice)."""


class SynthesisError(ValueError):
    """A task that cannot be written: names the goal kinds or the variant, and the fix."""


@dataclass(frozen=True)
class Slot:
    """The place of a task in a data set."""

    split: Split
    pool: Pool
    index: int

    @property
    def task_id(self) -> str:
        """Stable id such as ``train-long-00017``."""
        return f"{self.split}-{self.pool}-{self.index:05d}"

    def seed(self, run_seed: int) -> int:
        """The task's own seed in 0..2^31-1."""
        text = f"{run_seed}/{self.task_id}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True)
class Draft:
    """A task before it becomes a contract."""

    slot: Slot
    seed: int
    route: Route
    office: Office
    pieces: tuple[Piece, ...]
    wordings: tuple[int, ...]
    """Index of the wording of each piece among its kind's wordings of the split."""
    faults: tuple[int, ...]

    @property
    def kinds(self) -> tuple[GoalKind, ...]:
        """Goal kinds in order."""
        return tuple(piece.kind for piece in self.pieces)


def draft_seed(slot: Slot, config: SynthesisConfig, run_seed: int) -> Draft:
    """Draft the seed task of a slot by one of the two routes."""
    seed = slot.seed(run_seed)
    r = Random(seed)
    if r.random() < config.capability_first_share:
        graphs = GRAPHS[slot.pool]
        graph = r.choices(list(graphs), list(graphs.values()))[0]
        office, pieces = realise(r, slot, r.choice(carriers(graph)), config)
        route: Route = "capability_first"
    else:
        office, pieces = _from_environment(r, slot, config)
        route = "environment_first"
    wordings = tuple(r.randrange(len(WORDINGS[p.kind][slot.split])) for p in pieces)
    return Draft(slot, seed, route, office, pieces, wordings, draw_faults(r, pieces, config.fault_share))


def carriers(graph: Sequence[str]) -> list[tuple[GoalKind, ...]]:
    """All lists of goal kinds whose capabilities, one after the other, spell the graph."""
    if not graph:
        return [()]
    found: list[tuple[GoalKind, ...]] = []
    for kind, nodes in CAPABILITIES.items():
        if tuple(graph[: len(nodes)]) == nodes:
            found += [(kind, *rest) for rest in carriers(graph[len(nodes) :])]
    return found


def realise(
    r: Random, slot: Slot, kinds: Sequence[GoalKind], config: SynthesisConfig
) -> tuple[Office, tuple[Piece, ...]]:
    """Find an office with records that carry all goal kinds in order. Raises SynthesisError when none turns up."""
    for _ in range(OFFICES):
        office = draw_office(r, slot.split, config.records_per_service)
        pieces = [piece for kind in kinds if (piece := _draw(kind, r, office))]
        if len(pieces) == len(kinds):
            return office, tuple(pieces)
    raise SynthesisError(
        f"{slot.task_id}: no office of {config.records_per_service} records per service carries goals "
        f"{', '.join(kinds)}; raise records_per_service"
    )


def draw_faults(r: Random, pieces: Sequence[Piece], share: float) -> tuple[int, ...]:
    """With probability `share`, one gold call that answers `unavailable` the first time."""
    calls = sum(len(piece.calls) for piece in pieces)
    return (r.randrange(calls),) if r.random() < share else ()


def build(
    draft: Draft,
    variation: Literal["seed", "presentation", "realisation"] = "seed",
    parent: str | None = None,
    changed: tuple[Literal["files", "backend", "wording", "grading"], ...] = (),
) -> TaskContract:
    """Turn a draft into a contract."""
    slot, office = draft.slot, draft.office
    texts = [WORDINGS[p.kind][slot.split][k].format(**p.slots) for p, k in zip(draft.pieces, draft.wordings)]
    world = WorldSpec(
        services=office.schema,
        records=office.records,
        files=dict(sorted(office.files.items())),
        fresh_ids=office.fresh_ids,
        faults=draft.faults,
    )
    calls = tuple(call for piece in draft.pieces for call in piece.calls)
    turns = 2 * len(calls) + SPARE_TURNS
    nodes = tuple(node for piece in draft.pieces for node in CAPABILITIES[piece.kind])
    meta = Metadata(
        task_id=slot.task_id,
        pool=slot.pool,
        split=slot.split,
        route=draft.route,
        variation=variation,
        parent=parent,
        changed=changed,
        capabilities=nodes + (("recover",) if draft.faults else ()),
        templates=tuple(f"{p.kind}.{slot.split}.{k}" for p, k in zip(draft.pieces, draft.wordings)),
        seed=draft.seed,
        budget=Budget(turns=turns, tool_calls=turns, tokens=TOKENS_PER_TURN * turns),
    )
    grading = Grading(goals=tuple(goal for piece in draft.pieces for goal in piece.goals), reference=calls)
    bare = TaskContract(request=CLAUSE.join(texts), world=world, tools=tool_names(world), grading=grading, meta=meta)
    return bare.model_copy(update={"meta": meta.model_copy(update={"literals": task_literals(bare)})})


def _from_environment(r: Random, slot: Slot, config: SynthesisConfig) -> tuple[Office, tuple[Piece, ...]]:
    mix = MIX[slot.pool]
    fewest, most = CALL_RANGE[slot.pool]
    while True:
        wanted = r.choice(GOAL_COUNTS[slot.pool])
        office = draw_office(r, slot.split, config.records_per_service)
        kinds = r.choices(list(mix), list(mix.values()), k=wanted)
        pieces = tuple(piece for kind in kinds if (piece := _draw(kind, r, office)))
        if len(pieces) == wanted and fewest <= sum(len(piece.calls) for piece in pieces) <= most:
            return office, pieces


def _draw(kind: GoalKind, r: Random, office: Office) -> Piece | None:
    for _ in range(DRAWS):
        piece = draw_piece(kind, r, office)
        if piece is not None:
            return piece
    return None
