"""Prints what manifests ask of a cluster: `kubectl kustomize OVERLAY | python -m operators.sandbox.sizing`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import yaml

from operators.sandbox.resources import pod
from operators.sandbox.views import Pool

_UNITS = {"": Fraction(1), "m": Fraction(1, 1000)}
_UNITS |= {unit: Fraction(10 ** (3 * n)) for n, unit in enumerate("kMGT", 1)}
_UNITS |= {f"{unit}i": Fraction(2 ** (10 * n)) for n, unit in enumerate("KMGT", 1)}
_GPU = "nvidia.com/gpu"
_ZERO = Fraction(0)


@dataclass(frozen=True)
class Demand:
    """What some equal pods take. CPU in cores, memory and disk in bytes."""

    name: str
    pods: int
    cpu_requests: Fraction
    cpu_limits: Fraction
    memory: Fraction
    """Limits; requests may be lower."""
    disk: Fraction
    gpus: int

    @classmethod
    def of(cls, name: str, pods: int, spec: Mapping[str, Any], overhead: Mapping[str, Any] | None = None) -> Demand:
        """So many pods of one specification; `overhead` is what their runtime class adds to each."""

        def total(kind: str, what: str) -> Fraction:
            each = sum((quantity(c.get("resources", {}).get(kind, {}).get(what, 0)) for c in spec["containers"]), _ZERO)
            return Fraction(pods) * (each + quantity((overhead or {}).get(what, 0)))

        requests, limits = total("requests", "cpu"), total("limits", "cpu")
        memory, disk = total("limits", "memory"), total("limits", "ephemeral-storage")
        return cls(name, pods, requests, limits, memory, disk, int(total("limits", _GPU)))

    def row(self) -> str:
        """One line of the table."""
        gib = [f"{float(n / 2**30):,.1f}" for n in (self.memory, self.disk)]
        cells = [f"{float(self.cpu_requests):,.1f}", f"{float(self.cpu_limits):,.1f}", *gib, str(self.gpus)]
        return f"{self.name:<48}{self.pods:>6}" + "".join(f"{cell:>12}" for cell in cells)


HEAD = f"{'':<48}{'pods':>6}" + "".join(f"{h:>12}" for h in ("CPU asked", "CPU most", "memory GiB", "disk GiB", "GPUs"))


def quantity(text: object) -> Fraction:
    """A Kubernetes quantity as a number. Raises ValueError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(m|[kMGT]|[KMGT]i)?", str(text))
    if found is None:
        raise ValueError(f"{text!r} is no quantity of Kubernetes such as 500m, 2 or 4Gi")
    return Fraction(found[1]) * _UNITS[found[2] or ""]


def demands(resources: Iterable[Mapping[str, Any]]) -> Iterator[Demand]:
    """Pods that always run, those of pools when idle and when full, and those of one run of each job."""
    resources = list(resources)
    classes = {r["metadata"]["name"]: r["overhead"]["podFixed"] for r in resources if "overhead" in r}
    for resource in resources:
        kind, spec = resource["kind"], resource.get("spec", {})
        name = f"{kind} {resource['metadata']['name']}"
        if kind == "Deployment":
            yield Demand.of(name, spec.get("replicas", 1), spec["template"]["spec"])
        elif kind == "CronJob":
            yield Demand.of(f"{name}, a run", 1, spec["jobTemplate"]["spec"]["template"]["spec"])
        elif kind == "ClusterTrainingRuntime":
            nodes = spec["mlPolicy"].get("numNodes", 1)
            for job in spec["template"]["spec"]["replicatedJobs"]:
                yield Demand.of(f"{name}, a job", nodes, job["template"]["spec"]["template"]["spec"])
        elif kind == "SandboxPool":
            made = {**resource["metadata"], "uid": "", "resourceVersion": "0"}
            pool = Pool.parse({**resource, "metadata": made})
            if pool.spec is None:
                raise ValueError(f"{name}: {pool.problem}")
            body = pod(pool, 0, "", None, 0.0)["spec"]
            overhead = classes.get(body.get("runtimeClassName"))
            yield Demand.of(f"{name}, warm", pool.spec.warm, body, overhead)
            yield Demand.of(f"{name}, at most", pool.spec.max, body, overhead)


def main() -> None:
    """Read manifests from standard input and print the table."""
    print(HEAD)
    for demand in demands(d for d in yaml.safe_load_all(sys.stdin) if d):
        print(demand.row())


if __name__ == "__main__":
    main()
