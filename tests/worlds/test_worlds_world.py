"""Worlds: typed errors, search pages, clock, log, faults, fingerprints, snapshots."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from occamy.contracts.task import FieldSpec, WorldSpec
from occamy.worlds.workspace import MemoryWorkspace
from occamy.worlds.world import World, WorldError

TIER = FieldSpec(kind="enum", values=("gold", "silver"))
INT = FieldSpec(kind="int")
SPEC = WorldSpec(
    services={
        "crm": {"tier": TIER, "visits": INT},
        "orders": {"customer": FieldSpec(kind="ref", target="crm"), "qty": INT},
    },
    records={
        "crm": {"A01": {"tier": "gold", "visits": 4}, "A02": {"tier": "silver", "visits": 9}},
        "orders": {f"B0{k}": {"customer": "A01", "qty": k} for k in range(1, 8)},
    },
    files={"memo": "A02"},
    fresh_ids=("F01",),
)


def world(**changes: object) -> World:
    return World(SPEC.model_copy(update=changes), MemoryWorkspace())


def test_get_shows_the_declared_order_as_compact_json() -> None:
    assert world().call("crm_get", '{"id":"A01"}').content == '{"tier":"gold","visits":4}'


def test_search_gives_three_ids_a_page_and_says_when_more_follow() -> None:
    w = world()
    first = w.call("orders_search", {"field": "customer", "value": "A01"})
    assert first.content == '{"ids":["B01","B02","B03"],"next":2}'
    assert w.call("orders_search", {"field": "customer", "value": "A01", "page": 3}).content == '{"ids":["B07"]}'
    assert w.call("orders_search", {"field": "customer", "value": "A01", "page": 4}).content == '{"ids":[]}'


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("crm_get", {"id": "Z99"}, "not_found"),
        ("crm_update", {"id": "Z99", "tier": "gold"}, "not_found"),
        ("file_read", {"path": "absent"}, "not_found"),
        ("crm_delete", {"id": "A01"}, "unknown_tool"),
        ("shop_get", {"id": "A01"}, "unknown_tool"),
        ("crm_get", "{", "invalid_argument"),
        ("crm_get", "[1]", "invalid_argument"),
        ("crm_get", {"id": 1}, "invalid_argument"),
        ("crm_get", {"id": "A01", "extra": 1}, "invalid_argument"),
        ("crm_update", {"id": "A01"}, "invalid_argument"),
        ("crm_update", {"id": "A01", "tier": "bronze"}, "invalid_argument"),
        ("crm_update", {"id": "A01", "visits": 100}, "invalid_argument"),
        ("crm_update", {"id": "A01", "visits": True}, "invalid_argument"),
        ("crm_update", {"id": "A01", "visits": "5"}, "invalid_argument"),
        ("orders_update", {"id": "B01", "customer": "B02"}, "invalid_argument"),
        ("crm_search", {"field": ["tier"], "value": "gold"}, "invalid_argument"),
        ("crm_search", {"field": "tier", "value": "gold", "page": 0}, "invalid_argument"),
        ("file_write", {"path": "../memo", "text": "x"}, "invalid_argument"),
        ("file_write", {"path": "memo", "text": 5}, "invalid_argument"),
        ("file_write", '{"path":"memo","text":"\\ud800"}', "invalid_argument"),
        ("file_write", '{"path":"memo","text":"\ud800"}', "invalid_argument"),
        ("crm_update", '{"id":"A01","visits":NaN}', "invalid_argument"),
        ("crm_get\ud800", {"id": "A01"}, "unknown_tool"),
    ],
)
def test_a_bad_call_is_a_typed_error_and_changes_nothing(name: str, arguments: dict | str, error: str) -> None:
    w = world()
    before = w.fingerprint()
    result = w.call(name, arguments)
    assert (result.content, result.ok, result.error) == (f'{{"error":"{error}"}}', False, error)
    assert w.fingerprint() == before
    w.restore(w.snapshot())
    assert w.events[0].error == error


def test_create_hands_out_fresh_ids_and_answers_conflict_to_a_copy_and_when_none_is_left() -> None:
    w = world(fresh_ids=("F01", "F02"))
    assert w.call("orders_create", {"qty": 50}).content == '{"id":"F01"}'
    assert w.call("orders_get", {"id": "F01"}).content == '{"qty":50}'
    assert w.call("orders_create", {"qty": 50}).error == "conflict"
    assert w.call("orders_create", {"qty": 51}).content == '{"id":"F02"}'
    assert w.call("orders_create", {"qty": 52}).error == "conflict"


def test_every_dispatched_call_takes_a_second_and_is_logged_in_full() -> None:
    w = world()
    w.call("crm_get", '{"id":"A01"}')
    w.call("crm_get", "{broken")
    assert [e.clock for e in w.events] == ["2026-01-05T09:00:00Z", "2026-01-05T09:00:01Z"]
    assert [e.arguments for e in w.events] == [{"id": "A01"}, "{broken"]
    assert [e.response for e in w.events] == ['{"tier":"gold","visits":4}', '{"error":"invalid_argument"}']
    assert w.now() == "2026-01-05T09:00:02Z"


def test_a_scheduled_fault_answers_unavailable_once_and_the_same_call_works_next_time() -> None:
    w = world(faults=(1,))
    assert w.call("crm_update", {"id": "A01", "visits": 5}).content == "ok"
    before = w.fingerprint()
    assert w.call("crm_update", {"id": "A01", "visits": 6}).error == "unavailable"
    assert w.fingerprint() == before
    assert w.call("crm_update", {"id": "A01", "visits": 6}).content == "ok"


def test_files_are_read_written_and_listed() -> None:
    w = world()
    assert w.call("file_read", {"path": "memo"}).content == "A02"
    assert w.call("file_write", {"path": "out/note", "text": "12"}).content == "ok"
    assert w.call("file_list", {}).content == '{"files":["memo","out/note"]}'
    assert w.state()["files"] == {"memo": "A02", "out/note": "12"}


def test_the_fingerprint_depends_on_the_state_and_not_on_the_way_there() -> None:
    a, b = world(), world()
    a.call("crm_update", {"id": "A01", "visits": 5})
    b.call("crm_get", {"id": "A01"})
    b.call("crm_update", {"id": "A01", "visits": 7})
    assert a.fingerprint() != b.fingerprint()
    b.call("crm_update", {"id": "A01", "visits": 5})
    assert a.fingerprint() == b.fingerprint()


CALLS = st.one_of(
    st.builds(lambda k, v: (f"{k}_update", {"id": "A01", "visits": v}), st.just("crm"), st.integers(0, 99)),
    st.builds(lambda v: ("orders_create", {"qty": v}), st.integers(0, 120)),
    st.builds(lambda p, t: ("file_write", {"path": p, "text": t}), st.sampled_from(["memo", "x", "x/y"]), st.text()),
    st.just(("crm_get", {"id": "A02"})),
)


@settings(max_examples=40, deadline=None)
@given(before=st.lists(CALLS, max_size=4), between=st.lists(CALLS, max_size=4), after=st.lists(CALLS, max_size=4))
def test_a_restored_world_goes_on_exactly_as_before(before: list, between: list, after: list) -> None:
    straight, detour = world(faults=(2,)), world(faults=(2,))
    for name, arguments in before:
        straight.call(name, arguments)
        detour.call(name, arguments)
    saved = detour.snapshot()
    for name, arguments in between:
        detour.call(name, arguments)
    detour.restore(saved)
    for name, arguments in after:
        assert straight.call(name, arguments) == detour.call(name, arguments)
    assert straight.snapshot() == detour.snapshot()


@given(name=st.text(max_size=12), arguments=st.text(max_size=20) | st.dictionaries(st.text(max_size=4), st.integers()))
@settings(max_examples=60, deadline=None)
def test_no_call_of_an_agent_raises(name: str, arguments: str | dict) -> None:
    w = world()
    for tool in (name, "crm_update", "crm_search", "file_write", "orders_create"):
        assert json.loads(w.call(tool, arguments).content)["error"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"records": {"crm": {"A01": {"tier": "bronze"}}}}, "'bronze'"),
        ({"records": {"crm": {"A01": {"colour": "gold"}}}}, "'colour'"),
        ({"records": {"orders": {"B01": {"customer": "A09"}}}}, "'A09'"),
        ({"records": {"shop": {}}}, "shop"),
        ({"fresh_ids": ("A01",)}, "A01"),
        ({"clock": "soon"}, "soon"),
        ({"clock": "2026-01-05T09:00:00"}, "no time zone"),
        ({"clock": "9999-12-31T23:59:59Z"}, "9999"),
        ({"services": {"CRM": {"tier": TIER}}, "records": {}}, "CRM"),
        ({"services": {"crm": {"owner": FieldSpec(kind="ref", target="hr")}}, "records": {}}, "hr"),
    ],
)
def test_a_contradictory_specification_is_refused_by_name(changes: dict, named: str) -> None:
    with pytest.raises(WorldError, match=named):
        world(**changes)
