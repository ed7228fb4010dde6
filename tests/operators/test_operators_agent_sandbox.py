"""Backend agent-sandbox: what is written fits that project's schemas to the letter, and always ends by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from made_sandboxes import NOW, lease, pool

from operators.sandbox.agent_sandbox import claim, refused, template, warm_pool
from operators.sandbox.hardening import violations
from operators.sandbox.models import LeaseSpec

DATA = Path(__file__).parent / "data" / "agent_sandbox_v1beta1.yaml"


def schemas() -> dict[str, dict[str, Any]]:
    return {
        crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        for crd in yaml.safe_load_all(DATA.read_text())
    }


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without room for a field that the server would prune in silence."""
    out = {k: strict(v) if isinstance(v, dict) and k != "properties" else v for k, v in schema.items()}
    if "properties" in schema:
        out["properties"] = {k: strict(v) for k, v in schema["properties"].items()}
        out["additionalProperties"] = False
    return out


CURRENT = pool(warm=3, backend="agent-sandbox", template={"image": "sandbox:1", "command": ["sleep", "infinity"]})


@pytest.mark.parametrize(
    "made",
    [template(CURRENT), warm_pool(CURRENT, 3), claim(lease()), claim(lease(overrides={"env": [{"name": "A"}]}))],
    ids=lambda made: made["kind"],
)
def test_what_is_written_fits_the_schema_and_nothing_would_be_pruned(made: dict[str, Any]) -> None:
    assert made["apiVersion"] == "extensions.agents.x-k8s.io/v1beta1"
    jsonschema.validate(made["spec"], strict(schemas()[made["kind"]]))
    assert made["metadata"]["ownerReferences"][0]["uid"]


def test_a_claim_ends_at_the_deadline_of_its_lease_and_is_deleted_then() -> None:
    lifecycle = claim(lease())["spec"]["lifecycle"]
    assert lifecycle == {"shutdownTime": "2027-01-15T08:09:50Z", "shutdownPolicy": "Delete"}
    assert NOW + 590 == 1_800_000_590.0


def test_the_template_is_as_hardened_and_as_closed_as_a_pod_of_ours() -> None:
    spec = template(CURRENT)["spec"]
    assert violations(spec["podTemplate"]["spec"]) == []
    assert spec["networkPolicyManagement"] == "Managed"
    assert spec["networkPolicy"]["ingress"] == []
    (only,) = spec["networkPolicy"]["egress"]
    assert only["ports"] == [{"protocol": "TCP", "port": 8080}]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"launch": "cold"}, "LaunchRefused"),
        ({"overrides": {"resources": {"cpu": "2"}}}, "OverrideRefused"),
        ({"overrides": {"env": [{"name": "A"}]}}, None),
        ({}, None),
    ],
)
def test_what_that_interface_cannot_express_is_refused(spec: dict[str, Any], reason: str | None) -> None:
    wanted = LeaseSpec.model_validate({"pool": "p", "owner": {"run": "r"}, "ttlSeconds": 60} | spec)
    said = refused(wanted)
    assert (said[0] if said else None) == reason
