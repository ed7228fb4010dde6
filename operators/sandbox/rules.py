"""Rules between fields, each once as CEL for API servers that evaluate it and once as Python for the operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict, JsonValue, model_validator
from pydantic.alias_generators import to_camel

from occamy.contracts.record import Record


@dataclass(frozen=True)
class Rule:
    """What must hold of one object."""

    cel: str
    """Expression over `self`; servers before 1.25 ignore it."""
    message: str
    holds: Callable[[Any], bool]
    """The same rule on the model."""

    def as_schema(self) -> dict[str, str]:
        """The rule as an entry of x-kubernetes-validations."""
        return {"rule": self.cel, "message": self.message}


def frozen(field: str, *, optional: bool = False) -> dict[str, str]:
    """A transition rule: `field` keeps its value. The operator enforces it by the digest that it accepted."""
    same = f"self.{field} == oldSelf.{field}"
    if optional:
        same = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || {same})"
    return {"rule": same, "message": f"{field} cannot be changed"}


class Resource(Record):
    """A part of a custom resource: camelCase on the wire, unknown keys refused, rules checked when it is made."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True, serialize_by_alias=True
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    transitions: ClassVar[tuple[dict[str, str], ...]] = ()

    @model_validator(mode="after")
    def _keeps_rules(self) -> Resource:
        for rule in self.rules:
            if not rule.holds(self):
                raise ValueError(rule.message)
        return self

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        validations: list[JsonValue] = [{**each} for each in (*(r.as_schema() for r in cls.rules), *cls.transitions)]
        if validations:
            cls.model_config["json_schema_extra"] = {"x-kubernetes-validations": validations}

    def wire(self) -> dict[str, Any]:
        """The JSON form that the API server takes, without absent values."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
