"""Custom resource definitions of kinds that are not ours, for an API server that shall take our resources of them.

Kubeflow Trainer's are made from the models of the package kubeflow-trainer-api (Apache-2.0), which are generated from
its Go types. The ServiceMonitor's is made from service_monitor.json, our own words for the few fields that we use.
"""

from __future__ import annotations

import json
from typing import Any

from .rendering import Resource
from .validation import SERVICE_MONITOR, trainer

_KEPT = ("type", "required", "enum", "pattern", "minItems")
_EITHER = {"type": "string"}
"""For a number or a string. Ours are strings, and API server 1.20 overlooks unknown fields in a kind that has both."""


def definitions() -> list[Resource]:
    """ServiceMonitor and ClusterTrainingRuntime, as closed as an API server takes schemas."""
    runtime = trainer.TrainerV1alpha1ClusterTrainingRuntime.model_json_schema()
    monitor = json.loads(SERVICE_MONITOR.read_text())
    return [
        _definition("monitoring.coreos.com", "v1", "ServiceMonitor", "Namespaced", monitor),
        _definition("trainer.kubeflow.org", "v1alpha1", "ClusterTrainingRuntime", "Cluster", runtime),
    ]


def _definition(group: str, version: str, kind: str, scope: str, schema: dict[str, Any]) -> Resource:
    plural = f"{kind.lower()}s"
    top = structural(schema, schema.get("$defs", {}))
    top["properties"]["metadata"] = {"type": "object"}  # the API server has its own schema for it
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": top}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [served],
        },
    }


def structural(schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema as an API server wants it: no references, no unions, every part of one type."""
    if reference := schema.get("$ref"):
        return structural(defs[reference.rpartition("/")[2]], defs)
    if some := [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]:
        return structural(some[0], defs) if len(some) == 1 else dict(_EITHER)
    inner = schema.get("properties", {})
    if "actual_instance" in inner:  # how these models write a number or a string
        return dict(_EITHER)
    out = {key: schema[key] for key in _KEPT if key in schema}
    if "const" in schema:
        out["enum"] = [schema["const"]]
    out.setdefault("type", "string" if "enum" in out else "object")
    if inner:
        out["properties"] = {name: structural(part, defs) for name, part in inner.items()}
    elif "items" in schema:
        out["items"] = structural(schema["items"], defs)
    elif isinstance(values := schema.get("additionalProperties"), dict):
        out["additionalProperties"] = structural(values, defs)
    return out
