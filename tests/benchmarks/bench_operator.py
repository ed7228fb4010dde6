"""How fast the sandbox operator gives out pods, and what that costs it: ``make bench-operator``.

Not a test. Claims are made on a real API server, where a process of the benchmark marks pods ready that nothing runs;
the first command is measured on a node with real containers, where this machine can have one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from occamy.sandboxes.kubernetes.backend import KubernetesBackend
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig
from tests.benchmarks.operator_load import Claim, Claims, played_node
from tests.cluster.assets import Assets, MissingAssetsError, find_assets
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import running_control_plane
from tests.cluster.daemons import PATIENCE_S
from tests.cluster.node import running_node_cluster, unusable
from tests.cluster.pod_processes import tenant
from tests.cluster.python_image import python_image
from tests.cluster.sandbox_world import ACCOUNT, OPERATOR_NAMESPACE, World, install

USER = f"system:serviceaccount:{OPERATOR_NAMESPACE}:{ACCOUNT}"
TURNS = {1: 100, 10: 20, 50: 6}
"""Claims at once -> how often."""
POOLS = (10, 100, 500)
"""Warm pods in the pool."""
IDLE_S = 25.0
"""Looked at without claims; one complete list of the operator falls into it."""
REST_S = 3.0
"""Between the readiness of real pods and the claims: what a pod does in its first moments is not the claim's."""
IMAGE = "localhost/sandbox-python:1"
TEMPLATE = {
    "image": IMAGE,
    "resources": {"cpu": "1", "cpuRequest": "10m", "memory": "256Mi", "ephemeralStorage": "64Mi"},
    "workspaceSize": "32Mi",
}


class Operator:
    """What the running operator has used so far."""

    def __init__(self, world: World) -> None:
        assert world.operator is not None
        self.pid, self.cluster = world.operator.process.pid, world.cluster

    def cpu(self) -> float:
        """Seconds of CPU of all its threads."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((t / "schedstat").read_text().split()[0]) for t in tasks) / 1e9

    def memory(self) -> float:
        """Resident MiB."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def calls(self) -> Counter[str]:
        """Requests to the API server by verb and resource, from its audit log."""
        return Counter(f"{use.verb} {use.resource}" for use in self.cluster.uses(USER) if use.resource)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{n}": round(1000 * cuts[n - 1], 1) for n in (50, 95, 99)}


async def at_once(claims: Claims, operator: Operator, launch: str, count: int, turns: int) -> dict[str, Any]:
    """So many claims at once, again when the pool is full again. CPU and calls count what filling it takes as well."""
    warm = max(10, count) if launch == "warm" else 0
    await claims.pool("p", TEMPLATE, warm, 2 * max(10, count))
    done: list[Claim] = []
    walls: list[float] = []
    await claims.settled("p", warm)
    before, used = operator.calls(), operator.cpu()
    for _ in range(turns):
        began = time.monotonic()
        made = await asyncio.gather(*(claims.make("p", "any" if warm else "cold") for _ in range(count)))
        walls.append(time.monotonic() - began)
        done += made
        await claims.release(made)
        await claims.settled("p", warm)
    used = operator.cpu() - used
    calls = operator.calls() - before
    return {
        "launch": launch,
        "concurrent": count,
        "claims": len(done),
        "created_ms": spread([c.created - c.asked for c in done]),
        "accepted_ms": spread([c.accepted - c.asked for c in done]),
        "bound_ms": spread([c.bound - c.asked for c in done]),
        "claims_per_s": round(len(done) / sum(walls), 1),
        "warm_hits": round(sum(c.launch == "warm" for c in done) / len(done), 3),
        "operator_cpu_ms_per_claim": round(1000 * used / len(done), 2),
        "operator_calls_per_claim": round(calls.total() / len(done), 2),
        "operator_rss_mib": round(operator.memory(), 1),
    }


async def without_pause(claims: Claims, operator: Operator, clients: int, each: int) -> dict[str, Any]:
    """Clients that lease and release again and again, from a pool that is filled meanwhile."""
    await claims.pool("p", TEMPLATE, 2 * clients, 10 * clients)
    await claims.settled("p", 2 * clients)

    async def client() -> list[Claim]:
        done = []
        for _ in range(each):
            claim = await claims.make("p", "any")
            await claims.release([claim])
            done.append(claim)
        return done

    began, used = time.monotonic(), operator.cpu()
    done = [claim for made in await asyncio.gather(*(client() for _ in range(clients))) for claim in made]
    wall, used = time.monotonic() - began, operator.cpu() - used
    return {
        "clients": clients,
        "claims": len(done),
        "claims_per_s": round(len(done) / wall, 1),
        "bound_ms": spread([c.bound - c.asked for c in done]),
        "warm_hits": round(sum(c.launch == "warm" for c in done) / len(done), 3),
        "operator_cpu_share": round(used / wall, 2),
    }


async def in_a_pool_of(claims: Claims, operator: Operator, warm: int, turns: int) -> dict[str, Any]:
    """Cost of a claim beside so many warm pods, and of the pods alone. Five claims at once."""
    await claims.pool("p", TEMPLATE, warm, warm + 20)
    await claims.settled("p", warm)
    began, used = time.monotonic(), operator.cpu()
    await asyncio.sleep(IDLE_S)
    idle = (operator.cpu() - used) / (time.monotonic() - began)
    done: list[Claim] = []
    began, used = time.monotonic(), operator.cpu()
    for _ in range(turns):
        made = await asyncio.gather(*(claims.make("p", "warm") for _ in range(5)))
        await claims.release(made)
        done += made
        await claims.settled("p", warm)
    spent = operator.cpu() - used - idle * (time.monotonic() - began)
    return {
        "pods": warm,
        "claims": len(done),
        "bound_ms": spread([c.bound - c.asked for c in done]),
        "operator_cpu_ms_per_claim": round(1000 * spent / len(done), 2),
        "operator_cpu_share_idle": round(idle, 4),
        "operator_rss_mib": round(operator.memory(), 1),
    }


@contextmanager
def operating(cluster: Cluster, folder: Path) -> Iterator[World]:
    """A namespace with a running operator."""
    install(cluster)
    with cluster.namespace("bench") as namespace:
        world = World(cluster, namespace, folder)
        world.start()
        try:
            yield world
        finally:
            assert world.operator is not None
            world.operator.stop(10)


def on_control_plane(assets: Assets, folder: Path, scale: float) -> dict[str, Any]:
    """All that needs no container."""

    async def measure(world: World, operator: Operator) -> dict[str, Any]:
        async with Claims(cluster.admin, world.namespace) as claims:
            with played_node(cluster.admin, claims.pods):
                await at_once(claims, operator, "warm", 10, 3)  # garbage collection takes a while to know new kinds
                rows = [
                    await at_once(claims, operator, launch, count, max(1, round(turns * scale)))
                    for launch in ("warm", "cold")
                    for count, turns in TURNS.items()
                ]
                busy = await without_pause(claims, operator, 10, max(2, round(20 * scale)))
                sizes = [await in_a_pool_of(claims, operator, n, max(2, round(30 * scale))) for n in POOLS]
        first, last = (row["operator_cpu_ms_per_claim"] for row in (sizes[0], sizes[-1]))
        return {
            "pods": "marked Running and Ready by the benchmark as soon as they are there; no container runs",
            "at once": rows,
            "without pause": busy,
            "pool size": sizes,
            f"cpu per claim, {POOLS[-1]} / {POOLS[0]} pods": round(last / first, 2),
        }

    with running_control_plane(assets, folder) as plane:
        cluster = Cluster(plane, folder)
        with operating(cluster, folder) as world:
            return asyncio.run(measure(world, Operator(world)))


async def first_command(
    config: KubernetesSandboxConfig, world: World, launch: Literal["warm", "cold"], count: int, turns: int
) -> dict[str, Any]:
    """From asking for a lease to the output of its first command, through the library's own backend."""
    leased: list[float] = []
    answered: list[float] = []
    backend = KubernetesBackend(config.model_copy(update={"launch": launch}))

    async def episode(measured: bool) -> None:
        began = time.monotonic()
        sandbox = await backend.lease("p", "bench", 600.0)
        bound = time.monotonic()
        assert (await sandbox.exec(["echo", "1"])).stdout == b"1\n"
        if measured:
            leased.append(bound - began)
            answered.append(time.monotonic() - began)
        await sandbox.release()

    async def settled() -> None:
        """So many warm pods, and none of the turn before."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                status = (world.read("sandboxpools", "p") or {}).get("status") or {}
                if status.get("ready") == status.get("total") == warm:
                    return
                await asyncio.sleep(0.2)

    warm = count if launch == "warm" else 0
    world.patch("sandboxpools", "p", {"spec": {"warm": warm}})
    for turn in range(turns + 1):  # the first opens the backend's watch
        await settled()
        await asyncio.sleep(REST_S)
        await asyncio.gather(*(episode(turn > 0) for _ in range(count if turn else 1)))
    await backend.close()
    return {
        "launch": launch,
        "concurrent": count,
        "claims": len(leased),
        "leased_ms": spread(leased),
        "first_exec_returned_ms": spread(answered),
    }


def on_node(assets: Assets, folder: Path, scale: float, pods: int) -> dict[str, Any]:
    """What needs containers."""
    with running_node_cluster(assets, folder) as node:
        cluster = Cluster(node, folder)
        node.load_image(str(python_image(assets.program("busybox"), folder / "image.tar", IMAGE, {})))
        with operating(cluster, folder) as world:
            config = KubernetesSandboxConfig(
                namespace=world.namespace, kubeconfig=tenant(cluster, world.namespace), route="agent"
            )
            world.pool(template=TEMPLATE, warm=0, max=2 * pods, network={"profile": "none"})
            rows = [
                asyncio.run(first_command(config, world, launch, count, max(2, round(turns * scale))))
                for launch, count, turns in (("warm", 1, 20), ("warm", pods, 4), ("cold", 1, 10), ("cold", pods, 3))
            ]
    return {"pods": "real containers on this machine", "at once": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of claims")
    parser.add_argument("--pods", type=int, default=8, help="real pods at once")
    parser.add_argument("--write", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    try:
        assets = find_assets()
    except MissingAssetsError as problem:
        parser.error(str(problem))
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load average before": round(os.getloadavg()[0], 1),
        "kubernetes": f"1.{assets.minor()}; API server, etcd, controllers, operator and clients on this machine",
    }
    with tempfile.TemporaryDirectory() as folder:
        result["api server"] = on_control_plane(assets, Path(folder) / "plane", args.scale)
        if reason := unusable():
            result["node"] = {"left out": f"first exec returned, warm and cold: {reason}"}
        else:
            result["node"] = on_node(assets, Path(folder) / "node", args.scale, args.pods)
    show(result)
    if args.write is not None:
        args.write.write_text(json.dumps(result, indent=2) + "\n")


def show(result: dict[str, Any]) -> None:
    """Print one line a row."""
    print(result["machine"], "· load average", result["load average before"], "·", result["kubernetes"])
    for place in ("api server", "node"):
        for title, found in result[place].items():
            rows = found if isinstance(found, list) else [found]
            for row in rows:
                print(f"{place}, {title}: {words(row)}")


def words(row: Any) -> str:
    """A row of figures on one line."""
    if not isinstance(row, dict):
        return str(row)
    return "  ".join(
        f"{name} {'/'.join(map(str, v.values())) if isinstance(v, dict) else v}" for name, v in row.items()
    )


if __name__ == "__main__":
    main()
