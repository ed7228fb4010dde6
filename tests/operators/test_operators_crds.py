"""The CRDs are those of the models, valid for old and new API servers, and refuse exactly what the operator refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_sandboxes import SPEC
from server_rules import accepts, broken_rules, defaulted

from operators.sandbox.crds import KINDS, LEASE, POOL, SNAPSHOT, Kind, crd, render, structural
from operators.sandbox.models import LeaseSpec, PoolSpec
from operators.sandbox.views import parse_spec

FOLDER = Path(__file__).parents[2] / "manifests" / "crds"
LEASE_SPEC: dict[str, Any] = {"pool": "p", "owner": {"run": "r"}, "ttlSeconds": 600}
SNAPSHOT_SPEC = {"lease": "l", "leaseUid": "u", "uri": "s3://b/k", "fingerprint": "sha256:" + "0" * 64}


def test_the_manifest_is_what_the_models_say() -> None:
    assert (FOLDER / "sandbox.yaml").read_text() == render(), (
        "run python -m operators.sandbox.crds > manifests/crds/sandbox.yaml"
    )


def nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for child in schema.get("properties", {}).values():
        yield from nodes(child)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from nodes(schema[name])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_schemas_are_structural(kind: Kind) -> None:
    """The rules of apiextensions v1 that a generator breaks most easily."""
    for model in (kind.spec, kind.status):
        for node in nodes(structural(model)):
            assert "type" in node, node
            assert not set(node) & {"$ref", "$defs", "anyOf", "oneOf", "allOf", "const", "title", "nullable"}, node
            assert not ("properties" in node and "additionalProperties" in node), node
            assert node.get("default", "") is not None, node
            if node["type"] == "array":
                assert "items" in node and "maxItems" in node, node  # CEL's cost is counted with it


def test_columns_scale_and_status_are_there() -> None:
    version = crd(POOL)["spec"]["versions"][0]
    assert [c["name"] for c in version["additionalPrinterColumns"]][:3] == ["Ready", "Warm", "Leased"]
    assert version["subresources"]["scale"]["specReplicasPath"] == ".spec.warm"
    columns = [c["name"] for c in crd(LEASE)["spec"]["versions"][0]["additionalPrinterColumns"]]
    assert columns[:5] == ["Phase", "Pool", "Pod", "Expires", "Owner"]
    assert all("status" in crd(kind)["spec"]["versions"][0]["subresources"] for kind in KINDS)


def test_defaults_of_the_schema_are_those_of_the_model() -> None:
    stored = defaulted(structural(PoolSpec), SPEC)
    assert PoolSpec.model_validate(stored) == PoolSpec.model_validate(SPEC)
    assert stored["template"]["resources"] == {"cpu": "1", "memory": "2Gi", "ephemeralStorage": "4Gi"}
    assert stored["network"]["profile"] == "proxy-only" and stored["maxLeaseSeconds"] == 14400


def changed(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    out = copy.deepcopy(spec)
    *folders, last = path.split(".")
    at = out
    for folder in folders:
        at = at.setdefault(folder, {})
    if value is None:
        at.pop(last, None)
    else:
        at[last] = value
    return out


CIDR = {"cidr": "10.1.0.0/16", "ports": [443]}
CASES: list[tuple[Kind, dict[str, Any], str, Any, bool]] = [
    (POOL, SPEC, "warm", 10, True),
    (POOL, SPEC, "warm", 11, False),
    (POOL, SPEC, "warm", -1, False),
    (POOL, SPEC, "max", 0, False),
    (POOL, SPEC, "template.image", "registry:5000/a/sandbox:1.2", True),
    (POOL, SPEC, "template.image", "sandbox@sha256:" + "a" * 64, True),
    (POOL, SPEC, "template.image", "sandbox:latest", False),
    (POOL, SPEC, "template.image", "sandbox", False),
    (POOL, SPEC, "template.image", "registry:5000/sandbox", False),
    (POOL, SPEC, "template.image", "sandbox@sha256:abc", False),
    (POOL, SPEC, "template.isolation", "gvisor", False),
    (POOL, SPEC, "template", {"image": "s:1", "isolation": "gvisor", "runtimeClassName": "gvisor"}, True),
    (POOL, SPEC, "template.isolation", "none", False),
    (POOL, SPEC, "template.user", 0, False),
    (POOL, SPEC, "template.resources.memory", "lots", False),
    (POOL, SPEC, "template.volumes", [{"name": "cache", "mountPath": "/cache", "size": "1Gi"}], True),
    (POOL, SPEC, "template.volumes", [{"name": "cache", "mountPath": "cache", "size": "1Gi"}], False),
    (POOL, SPEC, "network", {"profile": "none"}, True),
    (POOL, SPEC, "network", {"profile": "proxy-only"}, False),
    (POOL, SPEC, "network.profile", "none", False),
    (POOL, SPEC, "network.profile", "allow-list", False),
    (POOL, SPEC, "network.allow", [CIDR], False),
    (POOL, SPEC, "network", {"profile": "allow-list", "allow": [CIDR]}, True),
    (POOL, SPEC, "network", {"profile": "allow-list", "allow": [{**CIDR, "ports": [53]}]}, False),
    (POOL, SPEC, "network", {"profile": "allow-list", "allow": [{**CIDR, "ports": []}]}, False),
    (POOL, SPEC, "network", {"profile": "allow-list", "allow": [{**CIDR, "cidr": "0.0.0.0/0"}]}, False),
    (POOL, SPEC, "network", {"profile": "allow-list", "allow": [{**CIDR, "cidr": "168.0.0.0/7"}]}, False),
    (POOL, SPEC, "network", {"profile": "allow-list", "allow": [{**CIDR, "cidr": "169.254.0.0/16"}]}, False),
    (POOL, SPEC, "network", {"profile": "allow-list", "allow": [{**CIDR, "podLabels": {"a": "b"}}]}, False),
    (POOL, SPEC, "network", {"profile": "allow-list", "allow": [{"podLabels": {}, "ports": [1]}]}, False),
    (POOL, SPEC, "network.clients", [{"podLabels": {"a": "b"}, "namespaceLabels": {"c": "d"}}], True),
    (POOL, SPEC, "network.clients", [{"namespaceLabels": {"c": "d"}}], False),
    (POOL, SPEC, "backend", "agent-sandbox", False),
    (POOL, changed(SPEC, "template.command", ["sleep", "1"]), "backend", "agent-sandbox", True),
    (POOL, changed(SPEC, "network.clients", [{"podLabels": {"a": "b"}}]), "backend", "agent-sandbox", False),
    (LEASE, LEASE_SPEC, "ttlSeconds", None, False),
    (LEASE, LEASE_SPEC, "ttlSeconds", 86401, False),
    (LEASE, LEASE_SPEC, "owner", {}, False),
    (LEASE, LEASE_SPEC, "launch", "hot", False),
    (LEASE, LEASE_SPEC, "overrides", {"env": [{"name": "A", "value": "b"}]}, True),
    (LEASE, LEASE_SPEC, "overrides", {"env": [{"name": "1A"}]}, False),
    (LEASE, changed(LEASE_SPEC, "overrides", {}), "launch", "warm", False),
    (LEASE, LEASE_SPEC, "renewed", "2027-01-01T00:00:00Z", False),
    (LEASE, changed(LEASE_SPEC, "heartbeatSeconds", 30), "renewed", "2027-01-01T00:00:00Z", True),
    (SNAPSHOT, SNAPSHOT_SPEC, "uri", "s3://b/k", True),
    (SNAPSHOT, SNAPSHOT_SPEC, "uri", "ftp://b/k", False),
    (SNAPSHOT, SNAPSHOT_SPEC, "fingerprint", "sha256:0", False),
]


@pytest.mark.parametrize(("kind", "spec", "path", "value", "good"), CASES)
def test_server_and_operator_refuse_the_same(
    kind: Kind, spec: dict[str, Any], path: str, value: Any, good: bool
) -> None:
    wanted = changed(spec, path, value)
    parsed, problem = parse_spec(kind.spec, wanted)
    assert (parsed is not None) == good, problem
    assert accepts(structural(kind.spec), wanted) == good


def test_an_unknown_key_is_refused_by_name() -> None:
    _, problem = parse_spec(PoolSpec, changed(SPEC, "template.privileged", True))
    assert problem.startswith("template.privileged")


@pytest.mark.parametrize(
    ("path", "value", "allowed"),
    [
        ("pool", "other", False),
        ("ttlSeconds", 601, False),
        ("owner.run", "x", False),
        ("overrides", {"env": []}, False),
        ("released", True, True),
    ],
)
def test_what_a_lease_may_change(path: str, value: Any, allowed: bool) -> None:
    schema = structural(LEASE.spec)
    old = defaulted(schema, LEASE_SPEC)
    assert (broken_rules(schema, defaulted(schema, changed(LEASE_SPEC, path, value)), old) == []) == allowed


def test_a_quoted_rule_of_every_model_is_evaluated_by_some_case() -> None:
    """No rule is written that no case above breaks."""
    broken = {m for kind, spec, path, value, _ in CASES for m in _broken(kind, changed(spec, path, value))}
    written = {
        rule["message"]
        for kind in KINDS
        for node in nodes(structural(kind.spec))
        for rule in node.get("x-kubernetes-validations", ())
        if "oldSelf" not in rule["rule"]
    }
    assert written - broken == set()


def _broken(kind: Kind, spec: dict[str, Any]) -> list[str]:
    try:
        return broken_rules(structural(kind.spec), defaulted(structural(kind.spec), spec))
    except KeyError:
        return []


def test_the_manifest_is_plain_yaml() -> None:
    documents = list(yaml.safe_load_all((FOLDER / "sandbox.yaml").read_text()))
    assert [d["metadata"]["name"] for d in documents] == [
        "sandboxpools.occamy.dev",
        "sandboxleases.occamy.dev",
        "sandboxsnapshots.occamy.dev",
    ]


@pytest.mark.parametrize(
    ("said", "good"),
    [
        ("2027-01-01T00:00:00Z", True),
        ("2027-01-01T00:00:00.123456789+01:00", True),
        ("2027-01-01T00:00:00+99:99", False),
        ("0000-01-01T00:00:00Z", False),
        ("2027-01-01T00:00:00x5Z", False),
        ("2027-01-01T00:00:00", False),
    ],
)
def test_a_renewal_is_a_moment_that_there_is(said: str, good: bool) -> None:
    """API servers check little more than the pattern of a date-time."""
    spec, problem = parse_spec(LeaseSpec, {**LEASE_SPEC, "heartbeatSeconds": 30, "renewed": said})
    assert (spec is not None) == good and ("renewed" in problem) != good
