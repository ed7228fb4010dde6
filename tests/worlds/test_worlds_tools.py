"""Tool schemas and declared effects."""

from __future__ import annotations

import pytest

from occamy.contracts.task import FieldSpec, WorldSpec
from occamy.worlds.tools import arguments_fit, is_write, tool_effects, tool_names, tool_schemas

SPEC = WorldSpec(
    services={
        "crm": {"tier": FieldSpec(kind="enum", values=("gold", "silver"))},
        "orders": {"customer": FieldSpec(kind="ref", target="crm"), "qty": FieldSpec(kind="int")},
    },
    records={},
)


def test_names_go_service_by_service_then_files() -> None:
    assert tool_names(SPEC)[:5] == ("crm_get", "crm_search", "crm_update", "crm_create", "orders_get")
    assert tool_names(SPEC)[-3:] == ("file_read", "file_write", "file_list")


def test_the_update_schema_types_every_field() -> None:
    (schema,) = tool_schemas(SPEC, ["orders_update"])
    assert schema["function"]["name"] == "orders_update"
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "customer": {"type": "string", "x-ref": "crm"},
            "qty": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "additionalProperties": False,
        "required": ["id"],
        "minProperties": 2,
    }


def test_an_enum_field_lists_its_words() -> None:
    (schema,) = tool_schemas(SPEC, ["crm_create"])
    assert schema["function"]["parameters"]["properties"] == {"tier": {"type": "string", "enum": ["gold", "silver"]}}


def test_a_tool_that_the_world_lacks_is_named() -> None:
    with pytest.raises(KeyError, match="crm_delete"):
        tool_schemas(SPEC, ["crm_delete"])


def test_effects_say_what_is_read_and_written() -> None:
    update = tool_effects(SPEC, "orders_update")
    assert (update.reads, update.writes) == (("crm",), ("orders",))
    assert "not_found" in update.errors
    assert tool_effects(SPEC, "file_list").writes == ()
    assert tool_effects(SPEC, "file_write").writes == ("files",)


def test_every_tool_that_declares_a_write_is_a_write_by_name() -> None:
    assert {n for n in tool_names(SPEC) if tool_effects(SPEC, n).writes} == {n for n in tool_names(SPEC) if is_write(n)}


def test_arguments_must_have_the_schema_s_shape() -> None:
    assert arguments_fit(SPEC, "orders_search", {"field": "qty", "value": 5, "page": 2})
    assert not arguments_fit(SPEC, "orders_search", {"field": "qty", "value": "5"})
    assert not arguments_fit(SPEC, "orders_create", {})
    assert not arguments_fit(SPEC, "file_list", {"path": "x"})
