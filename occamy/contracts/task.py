"""The task contract C = (Q, W, T, G, M): what an agent is asked, where it acts, with what, and how it is judged."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from occamy.contracts.record import Record

Scalar = int | str
Pool = Literal["long", "short"]
Split = Literal["train", "validation", "test"]


class FieldSpec(Record):
    """One typed field of a service's records."""

    kind: Literal["enum", "int", "ref"]
    """enum: one of `values`; int: a whole number 0..99; ref: the id of a record in service `target`."""
    values: tuple[str, ...] = ()
    """Allowed words, for enum fields only."""
    target: str | None = None
    """Service that a ref field points into, for ref fields only."""

    @model_validator(mode="after")
    def _complete(self) -> FieldSpec:
        if (self.kind == "enum") != bool(self.values):
            raise ValueError(f"field of kind {self.kind!r} has values {self.values!r}; only enum fields take values")
        if (self.kind == "ref") != (self.target is not None):
            raise ValueError(f"field of kind {self.kind!r} has target {self.target!r}; only ref fields take a target")
        return self


class WorldSpec(Record):
    """W: the initial state of a world. Records are ``service -> id -> field -> value``."""

    services: dict[str, dict[str, FieldSpec]]
    """Schema: service name -> field name -> type, in display order."""
    records: dict[str, dict[str, dict[str, Scalar]]]
    """Initial rows of each service."""
    files: dict[str, str] = Field(default_factory=dict)
    """Initial workspace files: relative path -> text."""
    fresh_ids: tuple[str, ...] = ()
    """Ids handed out, in order, by create calls (any service)."""
    clock: str = "2026-01-05T09:00:00Z"
    """Start of the deterministic clock; every dispatched call advances it by one second."""
    faults: tuple[int, ...] = ()
    """Ordinals (0-based, counted over dispatched calls) that answer `unavailable` once and change nothing."""


class ToolCall(Record):
    """One call of a named tool."""

    name: str
    """``<service>_<verb>`` with verb get, search, create, update; or file_read, file_write, file_list."""
    arguments: dict[str, Scalar]


class FieldEquals(Record):
    """Goal: a record's field holds a value at the end."""

    kind: Literal["field_equals"] = "field_equals"
    service: str
    id: str
    field: str
    value: Scalar
    weight: float = 1.0


class RecordCreated(Record):
    """Goal: a new record with exactly these fields exists at the end."""

    kind: Literal["record_created"] = "record_created"
    service: str
    fields: dict[str, Scalar]
    weight: float = 1.0


class FileEquals(Record):
    """Goal: a workspace file holds exactly this text (surrounding whitespace ignored)."""

    kind: Literal["file_equals"] = "file_equals"
    path: str
    text: str
    weight: float = 1.0


class CallLogged(Record):
    """Evidence: the event log holds this call with success (after the last write, if asked)."""

    kind: Literal["call_logged"] = "call_logged"
    call: ToolCall
    after_last_write: bool = False
    weight: float = 1.0


Goal = Annotated[FieldEquals | RecordCreated | FileEquals | CallLogged, Field(discriminator="kind")]


class Grading(Record):
    """G: private. Partial credit is the weighted share of goals met; a forbidden effect zeroes it."""

    goals: tuple[Goal, ...] = Field(min_length=1)
    pass_threshold: float = 1.0
    """An episode succeeds when it completed and its score is at least this."""
    allow_other_changes: bool = False
    """False: any change of state that no goal asks for is a forbidden effect."""
    reference: tuple[ToolCall, ...] = ()
    """Gold path: calls through the public interface only, without retries for scheduled faults."""
    answer: str = "done"
    """Final message of the gold path."""


class Budget(Record):
    """Execution budget of one episode."""

    turns: int
    """Policy turns, summary turns included."""
    tool_calls: int
    tokens: int
    """Sampled tokens over all turns."""
    wall_seconds: float = 120.0


class Metadata(Record):
    """M: identity, provenance and budgets."""

    task_id: str
    schema_version: int = 1
    pool: Pool
    split: Split
    route: Literal["environment_first", "capability_first"]
    variation: Literal["seed", "presentation", "realisation"] = "seed"
    parent: str | None = None
    """Task id that this variant was made from."""
    changed: tuple[Literal["files", "backend", "wording", "grading"], ...] = ()
    """Elements that truly differ from the parent."""
    capabilities: tuple[str, ...]
    """Nodes of the capability graph in order, e.g. ("locate", "decide", "act")."""
    templates: tuple[str, ...]
    """Ids of the wordings used, one per goal."""
    literals: tuple[Scalar, ...] = ()
    """Entity ids and stored or target values that the task uses; what contamination checks compare."""
    seed: int
    budget: Budget


class TaskContract(Record):
    """One versioned, executable task. ``contract.digest()`` identifies it everywhere."""

    request: str
    """Q: what the user asks, in public."""
    world: WorldSpec
    tools: tuple[str, ...]
    """T: names of the tools offered; their JSON schemas and effects follow from the world's schema."""
    grading: Grading
    meta: Metadata
