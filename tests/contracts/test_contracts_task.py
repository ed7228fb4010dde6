"""Task contracts refuse unknown keys and half-made fields, and are identified by content."""

import pytest
from pydantic import ValidationError

from occamy.contracts.task import Budget, FieldEquals, FieldSpec, Grading, Metadata, TaskContract, WorldSpec


def _contract(request: str = "set tier of crm A01 to gold") -> TaskContract:
    return TaskContract(
        request=request,
        world=WorldSpec(
            services={"crm": {"tier": FieldSpec(kind="enum", values=("gold", "silver"))}},
            records={"crm": {"A01": {"tier": "silver"}}},
        ),
        tools=("crm_get", "crm_update"),
        grading=Grading(goals=(FieldEquals(service="crm", id="A01", field="tier", value="gold"),)),
        meta=Metadata(
            task_id="t",
            pool="short",
            split="train",
            route="environment_first",
            capabilities=("act",),
            templates=("set/1",),
            seed=1,
            budget=Budget(turns=6, tool_calls=6, tokens=300),
        ),
    )


def test_equal_contracts_have_equal_digests_and_survive_json() -> None:
    contract = _contract()
    again = TaskContract.model_validate_json(contract.model_dump_json())
    assert again == contract and again.digest() == contract.digest() != _contract("other").digest()


def test_unknown_keys_are_refused() -> None:
    data = _contract().model_dump(mode="json")
    data["grading"]["secret"] = 1
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        TaskContract.model_validate(data)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "enum"}, "only enum fields take values"),
        ({"kind": "int", "values": ["a"]}, "only enum fields take values"),
        ({"kind": "ref"}, "only ref fields take a target"),
        ({"kind": "int", "target": "crm"}, "only ref fields take a target"),
    ],
)
def test_half_made_fields_are_refused(spec: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FieldSpec.model_validate(spec)
