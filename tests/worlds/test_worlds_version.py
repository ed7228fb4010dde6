"""What calls answer and change is part of a world's version: recorded episodes are replayed against it."""

from __future__ import annotations

from occamy.contracts.record import digest
from occamy.contracts.task import FieldSpec, WorldSpec
from occamy.worlds.workspace import MemoryWorkspace
from occamy.worlds.world import WORLD_VERSION, World

SPEC = WorldSpec(
    services={
        "crm": {"tier": FieldSpec(kind="enum", values=("gold", "basic")), "visits": FieldSpec(kind="int")},
        "orders": {"customer": FieldSpec(kind="ref", target="crm")},
    },
    records={
        "crm": {f"A{i:02d}": {"tier": "gold" if i % 2 else "basic", "visits": i} for i in range(9)},
        "orders": {"B01": {"customer": "A01"}},
    },
    files={"brief": "55"},
    fresh_ids=("F01",),
    faults=(2,),
)
CALLS = [
    ("crm_get", {"id": "A03"}), ("crm_get", {"id": "Z99"}), ("crm_get", {"id": "A03"}),
    ("crm_search", {"field": "tier", "value": "gold"}), ("crm_search", {"field": "tier", "value": "gold", "page": 2}),
    ("crm_update", {"id": "A03", "visits": 7}), ("crm_update", {"id": "A03", "visits": 700}),
    ("orders_create", {"customer": "A03"}), ("orders_create", {"customer": "A03"}),
    ("orders_create", {"customer": "A77"}), ("file_read", {"path": "brief"}), ("file_read", {"path": "../x"}),
    ("file_write", {"path": "notes/a", "text": "ä"}), ("file_write", {"path": "notes", "text": "x"}),
    ("file_list", {}), ("crm_delete", {}), ("crm_get", "not json"),
]  # fmt: skip


def test_a_change_of_what_calls_do_needs_a_new_world_version() -> None:
    world = World(SPEC, MemoryWorkspace())
    for name, arguments in CALLS:
        world.call(name, arguments)
    said = digest([[e.clock, e.response, e.ok, e.error, e.fingerprint] for e in world.events])
    assert WORLD_VERSION == 1
    assert said == "sha256:a310108775ae5cee4aad2182729ea153f7dc2b21f14ddf4eb068e1c065aa31b3"
    assert world.fingerprint() == "sha256:cbe797a6920d811f33dd5791075207de65a51d0c0d46a8bbfac1c5123b1dba70"


def test_the_change_print_is_a_function_of_the_state() -> None:
    world = World(SPEC, MemoryWorkspace())
    assert world.change_print() == "0" * 32
    world.call("crm_update", {"id": "A03", "visits": 7})
    once = world.change_print()
    world.call("file_write", {"path": "brief", "text": "56"})
    assert len({once, world.change_print(), "0" * 32}) == 3
    saved = world.snapshot()
    world.call("crm_update", {"id": "A03", "visits": 9})  # the third call: the scheduled fault, it changes nothing
    assert world.events[-1].fingerprint == world.events[-2].fingerprint == world.change_print()
    world.call("file_write", {"path": "brief", "text": "55"})
    assert world.change_print() == once
    other = World(SPEC, MemoryWorkspace())
    other.restore(saved)
    other.call("crm_get", {"id": "A03"})
    other.call("file_write", {"path": "brief", "text": "55"})
    assert other.change_print() == once
    world.call("crm_update", {"id": "A03", "visits": 3})
    assert world.change_print() == "0" * 32
