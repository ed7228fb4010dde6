"""What an API server that evaluates rules makes of a custom resource: defaults, schema, CEL. For tests of the CRDs."""

from __future__ import annotations

from typing import Any

import celpy
import celpy.adapter
import jsonschema

ENVIRONMENT = celpy.Environment()


def defaulted(schema: dict[str, Any], value: Any) -> Any:
    """The value with the schema's defaults, as the server stores it; unknown fields are pruned."""
    if schema.get("type") == "object" and isinstance(value, dict):
        if "properties" not in schema:
            return {k: defaulted(schema.get("additionalProperties", {}), v) for k, v in value.items()}
        out = {k: v for k, v in value.items() if k in schema["properties"]}
        for name, child in schema["properties"].items():
            if name not in out and "default" in child:
                out[name] = child["default"]
            if name in out:
                out[name] = defaulted(child, out[name])
        return out
    if schema.get("type") == "array" and isinstance(value, list):
        return [defaulted(schema["items"], item) for item in value]
    return value


def broken_rules(schema: dict[str, Any], value: Any, old: Any = None) -> list[str]:
    """Messages of the CEL rules that a value breaks, at any depth; transition rules only with an old value."""
    found = []
    for rule in schema.get("x-kubernetes-validations", ()):
        if ("oldSelf" in rule["rule"]) == (old is not None):
            program = ENVIRONMENT.program(ENVIRONMENT.compile(rule["rule"]))
            names = {"self": celpy.adapter.json_to_cel(value), "oldSelf": celpy.adapter.json_to_cel(old)}
            if not program.evaluate(names):
                found.append(rule["message"])
    for name, child in schema.get("properties", {}).items():
        if isinstance(value, dict) and name in value:
            found += broken_rules(child, value[name], old.get(name) if old else None)
    for item in value if schema.get("type") == "array" else ():
        found += broken_rules(schema["items"], item)
    return found


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """Whether the server takes a new object's part."""
    stored = defaulted(schema, value)
    try:
        jsonschema.validate(stored, schema)
    except jsonschema.ValidationError:
        return False
    return not broken_rules(schema, stored)
