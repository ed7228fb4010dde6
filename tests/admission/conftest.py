"""A hand-written task that passes every gate, and a folder of synthesised raw tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from occamy.contracts.likeness import task_literals
from occamy.contracts.task import (
    Budget,
    FieldEquals,
    FieldSpec,
    Grading,
    Metadata,
    TaskContract,
    ToolCall,
    WorldSpec,
)
from occamy.synthesis.config import PoolCounts, SynthesisConfig
from occamy.synthesis.generate import synthesise
from occamy.worlds.tools import tool_names

WORLD = WorldSpec(
    services={
        "crm": {"tier": FieldSpec(kind="enum", values=("gold", "silver", "bronze")), "visits": FieldSpec(kind="int")},
        "orders": {"customer": FieldSpec(kind="ref", target="crm"), "qty": FieldSpec(kind="int")},
    },
    records={
        "crm": {
            "A01": {"tier": "gold", "visits": 4},
            "A02": {"tier": "gold", "visits": 9},
            "A03": {"tier": "silver", "visits": 20},
        },
        "orders": {"B01": {"customer": "A02", "qty": 31}, "B02": {"customer": "A01", "qty": 12}},
    },
    fresh_ids=("F01", "F02"),
)


@pytest.fixture
def good() -> TaskContract:
    """Set a named field, and copy a number that has to be looked up."""
    task = TaskContract(
        request="set tier of crm A01 to silver ; copy qty of orders B01 to visits of crm A02",
        world=WORLD,
        tools=tool_names(WORLD),
        grading=Grading(
            goals=(
                FieldEquals(service="crm", id="A01", field="tier", value="silver"),
                FieldEquals(service="crm", id="A02", field="visits", value=31, weight=3.0),
            ),
            reference=(
                ToolCall(name="crm_update", arguments={"id": "A01", "tier": "silver"}),
                ToolCall(name="orders_get", arguments={"id": "B01"}),
                ToolCall(name="crm_update", arguments={"id": "A02", "visits": 31}),
            ),
        ),
        meta=Metadata(
            task_id="train-long-90000",
            pool="long",
            split="train",
            route="environment_first",
            capabilities=("act", "reconcile", "act"),
            templates=("set.train.0", "copy.train.0"),
            seed=0,
            budget=Budget(turns=10, tool_calls=10, tokens=400),
        ),
    )
    return task.model_copy(update={"meta": task.meta.model_copy(update={"literals": task_literals(task)})})


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Fifty sealed raw tasks."""
    config = SynthesisConfig(
        train=PoolCounts(long=10, short=24), validation=PoolCounts(long=4, short=4), test=PoolCounts(long=4, short=4)
    )
    synthesise(config, tmp_path / "raw", 2)
    return tmp_path / "raw"
