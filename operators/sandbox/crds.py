"""Writes the CRDs from the models: `python -m operators.sandbox.crds > manifests/crds/sandbox.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from operators.sandbox import models
from operators.sandbox.rules import Resource

_DROPPED = {"title", "additionalProperties", "$defs"}


@dataclass(frozen=True)
class Kind:
    """One custom resource."""

    name: str
    short: str
    spec: type[Resource]
    status: type[Resource]
    columns: tuple[tuple[str, str, str], ...]
    """Name, type and JSON path of what `kubectl get` shows."""
    scale: Mapping[str, str] = field(default_factory=dict)

    @property
    def plural(self) -> str:
        """Name in URLs."""
        return self.name.lower() + "s"


AGE = ("Age", "date", ".metadata.creationTimestamp")
POOL = Kind(
    "SandboxPool",
    "sbp",
    models.PoolSpec,
    models.PoolStatus,
    (
        ("Ready", "integer", ".status.ready"),
        ("Warm", "integer", ".spec.warm"),
        ("Leased", "integer", ".status.leased"),
        ("Max", "integer", ".spec.max"),
        ("Reason", "string", ".status.reason"),
        AGE,
    ),
    {
        "specReplicasPath": ".spec.warm",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    },
)
LEASE = Kind(
    "SandboxLease",
    "sbl",
    models.LeaseSpec,
    models.LeaseStatus,
    (
        ("Phase", "string", ".status.phase"),
        ("Pool", "string", ".spec.pool"),
        ("Pod", "string", ".status.pod"),
        ("Expires", "string", ".status.expires"),
        ("Owner", "string", ".spec.owner.run"),
        ("Reason", "string", ".status.reason"),
        AGE,
    ),
)
SNAPSHOT = Kind(
    "SandboxSnapshot",
    "sbs",
    models.SnapshotSpec,
    models.SnapshotStatus,
    (("Lease", "string", ".spec.lease"), ("Phase", "string", ".status.phase"), ("URI", "string", ".spec.uri"), AGE),
)
KINDS = (POOL, LEASE, SNAPSHOT)


def structural(model: type[Resource]) -> dict[str, Any]:
    """The model's JSON schema as a structural schema of apiextensions v1: nothing by reference, no null, no title.

    An empty text is no default here: API server 1.20 takes it for null.
    Raises ValueError for a union, which such a schema cannot express.
    """
    schema = model.model_json_schema(by_alias=True)
    return _inline(schema, schema.get("$defs", {}))


def _inline(node: dict[str, Any], defs: Mapping[str, Any]) -> dict[str, Any]:
    if "$ref" in node:
        node = {**defs[node["$ref"].rpartition("/")[2]], **{k: v for k, v in node.items() if k != "$ref"}}
        return _inline(node, defs)
    if "anyOf" in node:
        choices = [choice for choice in node["anyOf"] if choice.get("type") != "null"]
        if len(choices) != 1:
            raise ValueError(f"a union of {len(choices)} types has no structural schema: {node}")
        rest = {k: v for k, v in node.items() if k not in ("anyOf", "default")}
        return _inline({**choices[0], **rest}, defs)
    out = {k: v for k, v in node.items() if k not in _DROPPED and not (k == "default" and v in (None, ""))}
    if "properties" in node:
        out["properties"] = {name: _inline(child, defs) for name, child in node["properties"].items()}
        if isinstance(node.get("default"), dict):
            out["default"] = {}  # each field below brings its own
    elif isinstance(node.get("additionalProperties"), dict):
        out["additionalProperties"] = _inline(node["additionalProperties"], defs)
    if "items" in node:
        out["items"] = _inline(node["items"], defs)
    return out


def crd(kind: Kind) -> dict[str, Any]:
    """The CustomResourceDefinition of one kind."""
    subresources: dict[str, Any] = {"status": {}}
    if kind.scale:
        subresources["scale"] = dict(kind.scale)
    schema = {
        "type": "object",
        "description": (kind.spec.__doc__ or "").strip(),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(kind.spec),
            "status": structural(kind.status),
        },
    }
    if kind is POOL:
        schema["properties"]["metadata"] = {  # type: ignore[index]
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 50}},  # names of its pods are labels as well
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{models.GROUP}", "labels": {"app.kubernetes.io/part-of": "occamy"}},
        "spec": {
            "group": models.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.name,
                "listKind": kind.name + "List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short],
                "categories": ["occamy"],
            },
            "versions": [
                {
                    "name": models.VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": subresources,
                    "additionalPrinterColumns": [
                        {"name": name, "type": type_, "jsonPath": path} for name, type_, path in kind.columns
                    ],
                }
            ],
        },
    }


def render() -> str:
    """All CRDs as one YAML stream."""
    head = "# Written by `python -m operators.sandbox.crds`; change the models, not this file.\n"
    return head + yaml.safe_dump_all([crd(kind) for kind in KINDS], sort_keys=False, width=110)


if __name__ == "__main__":
    print(render(), end="")
