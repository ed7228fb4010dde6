"""The office environment: customers, orders and ledger, with an initial state drawn from a split's words."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from occamy.contracts.task import FieldSpec, Scalar, Split
from occamy.synthesis.wordings import ENUM_VALUES, FILE_NAMES, entity_ids, numbers

FRESH_IDS = 4
"""Ids kept back for create calls."""


def office_schema(split: Split) -> dict[str, dict[str, FieldSpec]]:
    """Services and fields; each of the four enum fields has four words of the split."""
    words = ENUM_VALUES[split]
    enums = [FieldSpec(kind="enum", values=words[k : k + 4]) for k in range(0, 16, 4)]
    whole = FieldSpec(kind="int")
    return {
        "crm": {"tier": enums[0], "status": enums[1], "visits": whole},
        "orders": {"customer": FieldSpec(kind="ref", target="crm"), "state": enums[2], "qty": whole},
        "ledger": {"order": FieldSpec(kind="ref", target="orders"), "amount": whole, "flag": enums[3]},
    }


@dataclass
class Office:
    """An initial state under construction, and what the goals drawn so far already claim of it."""

    split: Split
    schema: dict[str, dict[str, FieldSpec]]
    records: dict[str, dict[str, dict[str, Scalar]]]
    fresh_ids: tuple[str, ...]
    file_names: list[str]
    """Names that no goal uses yet."""
    files: dict[str, str] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)
    """Ids that a goal reads or writes: goals of one task never share a record."""
    searched: set[tuple[str, str, Scalar]] = field(default_factory=set)
    """(service, field, value) of searches: no goal may write such a value and make the search ambiguous."""
    written: set[tuple[str, str, Scalar]] = field(default_factory=set)
    """(service, field, value) of writes."""

    def free(self, service: str) -> list[str]:
        """Ids of a service that no goal claims."""
        return [key for key in self.records[service] if key not in self.claimed]

    def names(self, service: str, *kinds: str) -> list[str]:
        """Fields of a service that have one of these kinds."""
        return [name for name, spec in self.schema[service].items() if spec.kind in kinds]

    def new_values(self, service: str, name: str, *avoid: Scalar) -> list[Scalar]:
        """Values that a goal may give a field: numbers are new to the field, so that searches stay unambiguous."""
        spec = self.schema[service][name]
        if spec.kind == "enum":
            return [v for v in spec.values if v not in avoid]
        if spec.kind == "ref":
            return [v for v in self.records[str(spec.target)] if v not in avoid]
        stored = {row[name] for row in self.records[service].values()}
        taken = stored | {v for s, f, v in self.searched | self.written if (s, f) == (service, name)}
        return [v for v in numbers(self.split) if v not in taken and v not in avoid]


def draw_office(r: Random, split: Split, records_per_service: int) -> Office:
    """Draw an initial state. Numbers and references of a field are distinct, so a search for one finds one record."""
    schema = office_schema(split)
    n = records_per_service
    ids = r.sample(entity_ids(split), n * len(schema) + FRESH_IDS)
    keys = {service: ids[k * n : (k + 1) * n] for k, service in enumerate(schema)}
    records: dict[str, dict[str, dict[str, Scalar]]] = {s: {key: {} for key in keys[s]} for s in schema}
    for service, fields in schema.items():
        for name, spec in fields.items():
            values: list[Scalar]
            if spec.kind == "int":
                values = list(r.sample(numbers(split), n))
            elif spec.kind == "ref":
                values = list(r.sample(keys[str(spec.target)], n))
            else:
                values = list(r.choices(spec.values, k=n))
            for row, value in zip(records[service].values(), values, strict=True):
                row[name] = value
    names = list(FILE_NAMES[split])
    r.shuffle(names)
    return Office(split, schema, records, tuple(ids[-FRESH_IDS:]), names)
