"""What ``bench_operator`` puts on a cluster: leases made and heard of as a rollout does, and a node played by a process
of its own, which marks every pod ready as soon as it is there."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from occamy.sandboxes.kubernetes.api import Api, ApiError, find_credentials

GROUP = "/apis/occamy.dev/v1alpha1"
SPAWN = multiprocessing.get_context("spawn")
_PATIENCE_S = 300.0
_LOOKS = 5
_numbers = itertools.count()


@dataclass
class Claim:
    """One lease, with the moments (seconds of the monotonic clock) at which its maker heard of it."""

    name: str
    asked: float
    created: float = 0.0
    """The API server has it."""
    accepted: float = 0.0
    """The operator has written that it takes it on; together with `bound` for a warm pod."""
    bound: float = 0.0
    launch: str = ""
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Claims:
    """Makes leases in one namespace and follows them by one watch."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self.api = Api(find_credentials(kubeconfig, None), 60)
        self.root = f"{GROUP}/namespaces/{namespace}"
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self._open: dict[str, Claim] = {}
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Claims:
        version = (await self.api.call("GET", f"{self.root}/sandboxleases"))["metadata"]["resourceVersion"]
        self._watching = asyncio.create_task(self._watch(version))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watching is not None
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self.api.close()

    async def _watch(self, version: str) -> None:
        while True:
            async for event in self.api.watch(f"{self.root}/sandboxleases", "", version):
                now, lease = time.monotonic(), event["object"]
                version = lease["metadata"]["resourceVersion"]
                claim, status = self._open.get(lease["metadata"].get("name", "")), lease.get("status") or {}
                if claim is None:
                    continue
                if status.get("accepted") and not claim.accepted:
                    claim.accepted = now
                if status.get("phase") == "Bound" and not claim.bound:
                    claim.bound, claim.launch = now, status["launch"]
                    claim.done.set()

    async def make(self, pool: str, launch: str) -> Claim:
        """A lease, as soon as it is bound. Raises TimeoutError when it is not."""
        claim = Claim(f"claim-{next(_numbers)}", time.monotonic())
        self._open[claim.name] = claim
        spec = {"pool": pool, "owner": {"run": "bench"}, "ttlSeconds": 3600, "launch": launch}
        body = {"apiVersion": "occamy.dev/v1alpha1", "kind": "SandboxLease"}
        await self.api.call(
            "POST", f"{self.root}/sandboxleases", body | {"metadata": {"name": claim.name}, "spec": spec}
        )
        claim.created = time.monotonic()
        async with asyncio.timeout(_PATIENCE_S):
            await claim.done.wait()
        return claim

    async def release(self, claims: Sequence[Claim]) -> None:
        """Delete leases, and with them their pods."""
        for claim in claims:
            await self.api.call("DELETE", f"{self.root}/sandboxleases/{claim.name}")
            del self._open[claim.name]

    async def pool(self, name: str, template: dict[str, Any], warm: int, most: int) -> None:
        """Make a pool, or bring it to these numbers."""
        spec = {"template": template, "network": {"profile": "none"}, "warm": warm, "max": most, "batch": 50}
        body = {"apiVersion": "occamy.dev/v1alpha1", "kind": "SandboxPool", "metadata": {"name": name}, "spec": spec}
        try:
            await self.api.call("POST", f"{self.root}/sandboxpools", body)
        except ApiError as e:
            if e.status != 409:
                raise
            await self.api.call("PATCH", f"{self.root}/sandboxpools/{name}", {"spec": {"warm": warm, "max": most}})

    async def settled(self, pool: str, warm: int) -> None:
        """Wait until so many warm pods serve, nothing else is left of the pool, and the operator has had time to see
        that: for a moment after, a pool's status is still that of before the claims. Raises TimeoutError."""
        async with asyncio.timeout(_PATIENCE_S):
            for _ in range(_LOOKS):
                while not await self._full(pool, warm):
                    await asyncio.sleep(0.1)
                await asyncio.sleep(0.1)

    async def _full(self, pool: str, warm: int) -> bool:
        status = (await self.api.call("GET", f"{self.root}/sandboxpools/{pool}")).get("status") or {}
        if not status.get("ready") == warm == status.get("total"):
            return False
        pods = [pod["metadata"] for pod in (await self.api.call("GET", self.pods))["items"]]
        free = [pod for pod in pods if "deletionTimestamp" not in pod and "occamy.dev/lease-uid" not in pod["labels"]]
        return len(free) == len(pods) == warm


def play_node(kubeconfig: Path, pods: str) -> None:
    """Child process: mark each pod of a namespace ready, at once and without running it."""

    async def serve(api: Api, name: str, uid: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("PodScheduled", "Ready")]
        status = {"phase": "Running", "podIP": "10.1.2.3", "startTime": now, "conditions": conditions}
        try:
            await api.call("PATCH", f"{pods}/{name}/status", {"metadata": {"uid": uid}, "status": status})
        except ApiError as e:
            if e.status not in (404, 409):  # deleted, or replaced, before it served
                raise

    async def run() -> None:
        api, tasks = Api(find_credentials(kubeconfig, None), 60), set[asyncio.Task[None]]()
        version = "0"  # tells of the pods that are there already as well
        while True:
            async for event in api.watch(pods, "", version):
                meta = event["object"]["metadata"]
                version = meta["resourceVersion"]
                if event["type"] == "ADDED":
                    task = asyncio.create_task(serve(api, meta["name"], meta["uid"]))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)

    asyncio.run(run())


@contextmanager
def played_node(kubeconfig: Path, pods: str) -> Iterator[None]:
    """That process for the length of the block; ended by its pid."""
    child = SPAWN.Process(target=play_node, args=(kubeconfig, pods), daemon=True)
    child.start()
    try:
        yield
    finally:
        child.kill()
        child.join()
