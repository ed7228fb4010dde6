"""What manifests ask of a cluster, added up."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import pytest
import yaml

from operators.sandbox import sizing
from operators.sandbox.sizing import Demand, demands, quantity

GIB = 2**30
POOL: dict[str, Any] = {
    "kind": "SandboxPool",
    "metadata": {"name": "p", "namespace": "n"},
    "spec": {
        "warm": 2,
        "max": 5,
        "template": {
            "image": "sandbox:1",
            "isolation": "gvisor",
            "runtimeClassName": "strong",
            "resources": {"cpu": "2", "memory": "1Gi", "ephemeralStorage": "4Gi", "cpuRequest": "500m"},
        },
        "network": {"profile": "none"},
    },
}
CLASS = {
    "kind": "RuntimeClass",
    "metadata": {"name": "strong"},
    "overhead": {"podFixed": {"cpu": "100m", "memory": "512Mi"}},
}


@pytest.mark.parametrize(
    ("text", "number"),
    [("2", 2), (2, 2), ("500m", Fraction(1, 2)), ("1.5Gi", 3 * 2**29), ("1Ti", 2**40), ("3k", 3000), ("0", 0)],
)
def test_a_quantity_is_a_number(text: object, number: Fraction) -> None:
    assert quantity(text) == number


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "-1", "1e3", "1Xi"])
def test_what_is_no_quantity_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        quantity(text)


def test_a_pool_is_counted_idle_and_full_with_what_its_runtime_adds() -> None:
    warm, most = demands([POOL, CLASS])
    assert warm == Demand("SandboxPool p, warm", 2, Fraction(6, 5), Fraction(21, 5), 3 * GIB, 8 * GIB, 0)
    assert (most.pods, most.cpu_limits, most.memory) == (5, Fraction(21, 2), Fraction(15, 2) * GIB)


def test_replicas_and_gpus_are_multiplied() -> None:
    container = {"resources": {"requests": {"cpu": "8"}, "limits": {"cpu": "16", "memory": "1Gi", "nvidia.com/gpu": 1}}}
    spec = {"replicas": 3, "template": {"spec": {"containers": [container]}}}
    (found,) = demands([{"kind": "Deployment", "metadata": {"name": "engine"}, "spec": spec}])
    assert found == Demand("Deployment engine", 3, Fraction(24), Fraction(48), Fraction(3 * GIB), Fraction(0), 3)


def test_a_pool_that_breaks_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="warm may not exceed max"):
        list(demands([{**POOL, "spec": {**POOL["spec"], "warm": 9}}]))


def test_the_table_is_printed_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(yaml.safe_dump_all([POOL, CLASS])))
    sizing.main()
    head, warm, most = capsys.readouterr().out.splitlines()
    assert head.split() == ["pods", "CPU", "asked", "CPU", "most", "memory", "GiB", "disk", "GiB", "GPUs"]
    assert warm.split() == ["SandboxPool", "p,", "warm", "2", "1.2", "4.2", "3.0", "8.0", "0"]
    assert most.split() == ["SandboxPool", "p,", "at", "most", "5", "3.0", "10.5", "7.5", "20.0", "0"]
