"""Faults of a cluster under a lease: each is a typed outcome in bounded time, and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from occamy.contracts.episode import Outcome
from occamy.sandboxes.kubernetes import leases as leases_module
from occamy.sandboxes.kubernetes.backend import KubernetesBackend, KubernetesSandbox
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig
from occamy.sandboxes.protocol import (
    Isolation,
    IsolationRefused,
    LeaseLost,
    SandboxDied,
    SandboxError,
)

from .cluster import Cluster, eventually
from .daemons import PATIENCE_S
from .pod_processes import PATIENT, Node, node_of_processes, tenant
from .sandbox_world import World, call, install

Body = Callable[[KubernetesBackend], Awaitable[None]]


@pytest.fixture(scope="module")
def node(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A namespace with an operator, a pool of warm pods, and their agents."""
    folder = tmp_path_factory.mktemp("faults")
    install(cluster)
    with cluster.namespace("faults") as namespace:
        world = World(cluster, namespace, folder)
        world.start()
        with node_of_processes(world, folder / "node") as started:
            world.pool("pool", warm=1, max=6, maxLeaseSeconds=900)
            world.ready("pool", 1)
            yield started
        assert world.operator is not None
        world.operator.stop(10)


@pytest.fixture(scope="module")
def settings(node: Node) -> KubernetesSandboxConfig:
    """A tenant's settings."""
    kubeconfig = tenant(node.world.cluster, node.world.namespace)
    return KubernetesSandboxConfig(namespace=node.world.namespace, kubeconfig=kubeconfig, route="agent", **PATIENT)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator has all the time it needs to say why an agent is gone."""
    monkeypatch.setattr(leases_module, "_REASON_S", PATIENCE_S)


def within(settings: KubernetesSandboxConfig, body: Body, **changes: Any) -> None:
    """Run a body with a backend of its own."""

    async def run() -> None:
        backend = KubernetesBackend(settings.model_copy(update=changes))
        try:
            await body(backend)
        finally:
            await backend.close()

    asyncio.run(run())


async def busy(sandbox: KubernetesSandbox) -> asyncio.Task[Any]:
    """A command that runs for long, and has begun."""
    running = asyncio.create_task(sandbox.exec(["sh", "-c", "echo x > up; sleep 600"], timeout_s=600.0))
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await asyncio.sleep(0.02)
            try:
                if await sandbox.read("up"):
                    return running
            except FileNotFoundError:
                continue


def leases(node: Node) -> list[dict[str, Any]]:
    return node.world.list("sandboxleases")


def test_holders_tell_how_soon_their_pods_served(node: Node, settings: KubernetesSandboxConfig) -> None:
    def told() -> float:
        mine = f'namespace="{node.world.namespace}"'
        lines = [line for line in (node.world.get("/metrics") or "").splitlines() if mine in line]
        return sum(float(line.split()[-1]) for line in lines if "first_exec_seconds_count{" in line)

    async def body(backend: KubernetesBackend) -> None:
        before = await asyncio.to_thread(told)
        first, second = [await backend.lease("pool", name, 600.0) for name in ("e1", "e2")]
        await asyncio.to_thread(eventually, lambda: told() == before + 2)
        changed = {"metadata": {"annotations": {"occamy.dev/first-exec-seconds": "0.5"}}}
        for lease in leases(node):
            await asyncio.to_thread(node.world.patch, "sandboxleases", lease["metadata"]["name"], changed)
        third = await backend.lease("pool", "e3", 600.0)
        await asyncio.to_thread(eventually, lambda: told() == before + 3)  # nobody is counted twice
        for sandbox in (first, second, third):
            await sandbox.release()

    within(settings, body)


@pytest.mark.usefixtures("told")
def test_a_pod_that_is_deleted_ends_the_command_and_the_lease(node: Node, settings: KubernetesSandboxConfig) -> None:
    async def body(backend: KubernetesBackend) -> None:
        sandbox = await backend.lease("pool", "owner", 600.0)
        running = await busy(sandbox)
        await asyncio.to_thread(node.world.delete, "pods", sandbox.pod)
        with pytest.raises(SandboxDied, match=f"has lost its pod \\(PodLost: pod {sandbox.pod} is gone") as caught:
            await asyncio.wait_for(running, PATIENCE_S)
        assert caught.value.outcome is Outcome.infra_failed
        with pytest.raises(SandboxDied, match="has lost its pod"):
            await sandbox.freeze()
        await sandbox.release()

    within(settings, body)
    eventually(lambda: leases(node) == [])


@pytest.mark.usefixtures("told")
def test_a_pod_that_vanishes_without_a_word_is_told_by_the_operator(
    node: Node, settings: KubernetesSandboxConfig
) -> None:
    """Its node is gone: the connection stays open, and nothing comes of it."""

    async def body(backend: KubernetesBackend) -> None:
        sandbox = await backend.lease("pool", "owner", 600.0)
        running = await busy(sandbox)
        agent = node.agent_pid(sandbox.pod)
        os.kill(agent, signal.SIGSTOP)
        pod = await asyncio.to_thread(node.world.read, "pods", sandbox.pod)
        assert pod is not None
        node.lost.add(pod["metadata"]["uid"])
        await asyncio.to_thread(node.world.delete, "pods", sandbox.pod)
        with pytest.raises(SandboxDied, match="has lost its pod"):
            await asyncio.wait_for(running, PATIENCE_S)
        await sandbox.release()
        node.lost.clear()

    within(settings, body)


def test_an_agent_that_is_killed_is_an_infrastructure_fault(node: Node, settings: KubernetesSandboxConfig) -> None:
    async def body(backend: KubernetesBackend) -> None:
        sandbox = await backend.lease("pool", "owner", 600.0)
        running = await busy(sandbox)
        os.kill(node.agent_pid(sandbox.pod), signal.SIGKILL)
        with pytest.raises(SandboxDied, match="its agent broke off POST /exec") as caught:
            await asyncio.wait_for(running, PATIENCE_S)
        assert caught.value.outcome is Outcome.infra_failed
        for use in (sandbox.read("up"), sandbox.freeze()):
            with pytest.raises(SandboxDied, match=r"nothing answers at 127.77|broke off"):
                await use
        await sandbox.release()

    within(settings, body)


def test_without_the_api_server_commands_go_on_and_leases_fail_in_time(
    cluster: Cluster, node: Node, settings: KubernetesSandboxConfig
) -> None:
    plane = cluster.control_plane

    async def body(backend: KubernetesBackend) -> None:
        sandbox, other = await backend.lease("pool", "owner", 600.0), await backend.lease("pool", "owner", 600.0)
        await asyncio.to_thread(plane.stop_api_server, True)
        try:
            assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"
            broken = r"GET /apis/occamy.dev/.*/sandboxleases.*: (ClientConnector|ClientOS|ServerDisconnected)"
            hasty = KubernetesBackend(settings.model_copy(update={"bind_seconds": 1.0}))
            with pytest.raises(SandboxError, match=broken) as caught:
                await hasty.lease("pool", "late", 600.0)
            await hasty.close()
            assert caught.value.outcome is Outcome.infra_failed
            patient = asyncio.create_task(backend.lease("pool", "patient", 600.0))
            await other.release()  # heard of later
            with pytest.raises(LeaseLost, match="was released"):
                await other.read("f")
        finally:
            await asyncio.to_thread(plane.start_api_server)
        assert (await sandbox.exec(["echo", "still"])).stdout == b"still\n"
        async with asyncio.timeout(PATIENCE_S):
            held = [sandbox, await patient]
            while len(await asyncio.to_thread(leases, node)) > len(held):
                await asyncio.sleep(0.1)
        for again in (held[1], await backend.lease("pool", "again", 600.0)):  # its watch has come back
            assert (await again.exec(["echo", "new"])).stdout == b"new\n"
            await again.release()
        await sandbox.release()

    within(settings, body, release_seconds=2.0)
    eventually(lambda: leases(node) == [])


def test_a_release_that_is_refused_is_repeated(node: Node, settings: KubernetesSandboxConfig) -> None:
    """As by an API server that has just started and knows no roles yet."""
    rights = client.RbacAuthorizationV1Api(node.world.cluster.client())
    space, held_by = node.world.namespace, node.world.cluster.client(settings.kubeconfig)
    bound = rights.read_namespaced_role_binding("tenant", space)
    again = client.V1RoleBinding(
        metadata=client.V1ObjectMeta(name="tenant"), role_ref=bound.role_ref, subjects=bound.subjects
    )

    def allowed() -> bool:
        try:
            return bool(call(held_by, "GET", node.world.path("sandboxleases")))
        except ApiException:
            return False

    async def body(backend: KubernetesBackend) -> None:
        sandbox = await backend.lease("pool", "owner", 600.0)
        await asyncio.to_thread(rights.delete_namespaced_role_binding, "tenant", space)
        try:
            await asyncio.to_thread(eventually, lambda: not allowed())
            await sandbox.release()
        finally:
            await asyncio.to_thread(rights.create_namespaced_role_binding, space, again)
        await asyncio.to_thread(eventually, lambda: leases(node) == [])

    within(settings, body, release_seconds=1.0)
    eventually(allowed)


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        ({"phase": "Expired", "reason": "DeadlinePassed"}, LeaseLost, "was taken away .DeadlinePassed"),
        ({"phase": "Expired", "reason": "HeartbeatMissed"}, LeaseLost, "was taken away .HeartbeatMissed"),
        ({"phase": "Released", "reason": "Released"}, LeaseLost, "was taken away .Released"),
        ({"phase": "Failed", "reason": "TermsChanged"}, SandboxError, "was refused .TermsChanged"),
    ],
)
def test_what_the_operator_says_ends_a_lease(
    node: Node, settings: KubernetesSandboxConfig, status: dict[str, str], kind: type[SandboxError], words: str
) -> None:
    async def body(backend: KubernetesBackend) -> None:
        sandbox = await backend.lease("pool", "owner", 600.0)
        running = await busy(sandbox)
        name = next(lease["metadata"]["name"] for lease in leases(node) if lease["metadata"]["uid"] == sandbox.id)
        await asyncio.to_thread(node.world.patch, "sandboxleases", name, {"status": status}, "status")
        with pytest.raises(kind, match=words) as caught:
            await asyncio.wait_for(running, PATIENCE_S)
        assert caught.value.outcome is Outcome.infra_failed  # long before its holder's own deadline
        with pytest.raises(kind, match=words):
            await sandbox.read("up")
        await sandbox.release()

    within(settings, body)


@pytest.mark.usefixtures("told")
def test_a_lease_that_somebody_deletes_is_lost(node: Node, settings: KubernetesSandboxConfig) -> None:
    async def body(backend: KubernetesBackend) -> None:
        sandbox = await backend.lease("pool", "owner", 600.0)
        running = await busy(sandbox)
        for lease in leases(node):
            await asyncio.to_thread(node.world.delete, "sandboxleases", lease["metadata"]["name"])
        with pytest.raises(LeaseLost, match="is gone: somebody deleted it"):
            await asyncio.wait_for(running, PATIENCE_S)

    within(settings, body)


def test_what_cannot_be_leased_is_refused_with_the_reason_and_leaves_no_lease(
    node: Node, settings: KubernetesSandboxConfig, tmp_path: Path
) -> None:
    async def body(backend: KubernetesBackend) -> None:
        with pytest.raises(SandboxError, match=r"was refused \(TtlTooLong: ttlSeconds 1015; pool pool allows 900\)"):
            await backend.lease("pool", "owner", 1000.0)
        with pytest.raises(SandboxError, match=r"of owner got no pod in 15 s \(NoPool: there is no pool absent"):
            await backend.lease("absent", "owner", 60.0)
        waiting = asyncio.create_task(backend.lease("absent", "owner", 60.0))
        await asyncio.sleep(0.5)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(ValueError, match=r"neither this machine's loopback nor its files \(127.0.0.1:80\)"):
            await backend.lease("pool", "owner", 60.0, reach=[("127.0.0.1", 80)])
        with pytest.raises(ValueError, match=r"\(localhost:80\); serve at an address that pods reach"):
            await backend.lease("pool", "owner", 60.0, reach=[("192.0.2.1", 80), ("localhost", 80)])
        with pytest.raises(ValueError, match=str(tmp_path)):
            await backend.lease("pool", "owner", 60.0, readable=[tmp_path])

    within(settings, body, bind_seconds=15.0)
    eventually(lambda: leases(node) == [])
    with pytest.raises(IsolationRefused, match="'gvisor' is required, 'container' is what the pools give"):
        KubernetesBackend(settings.model_copy(update={"minimum_isolation": Isolation.gvisor}))


def test_without_credentials_or_rights_the_error_says_so(
    node: Node, settings: KubernetesSandboxConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def without_client(backend: KubernetesBackend) -> None:
        with pytest.raises(SandboxError, match=r"need the kubernetes client .*; install the extra kubernetes"):
            await backend.lease("pool", "owner", 600.0)

    async def refused(backend: KubernetesBackend) -> None:
        with pytest.raises(SandboxError, match=r"403 .*cannot (list|create) resource .sandboxleases."):
            await backend.lease("pool", "owner", 600.0)

    async def absent(backend: KubernetesBackend) -> None:
        with pytest.raises(
            SandboxError, match=r"no credentials for a cluster in .*nothing \(.*; set sandbox.kubeconfig"
        ):
            await backend.lease("pool", "owner", 600.0)

    within(settings, refused, namespace="default")
    within(settings, absent, kubeconfig=tmp_path / "nothing")
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    within(settings, without_client)


_HOLDER = """
import asyncio, sys
from occamy.sandboxes.kubernetes.backend import KubernetesBackend
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig

async def main():
    backend = KubernetesBackend(KubernetesSandboxConfig.model_validate_json(sys.argv[1]))
    sandbox = await backend.lease("pool", "killed", 600.0)
    print(sandbox.id, flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


def test_a_holder_that_is_killed_loses_its_lease_and_one_that_lives_does_not(
    node: Node, settings: KubernetesSandboxConfig
) -> None:
    def spec(uid: str) -> dict[str, Any]:
        return next(lease["spec"] for lease in leases(node) if lease["metadata"]["uid"] == uid)

    short = settings.model_copy(update={"heartbeat_seconds": 10})

    async def body(backend: KubernetesBackend) -> None:
        sandbox = await backend.lease("pool", "owner", 600.0)
        command = [sys.executable, "-c", _HOLDER, short.model_dump_json()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            held = (await asyncio.to_thread(holder.stdout.readline)).strip()
            assert held
            holder.kill()
        mine = {"labelSelector": f"occamy.dev/lease-uid={held}"}
        await asyncio.to_thread(eventually, lambda: not node.world.list("pods", **mine))
        await asyncio.to_thread(eventually, lambda: "renewed" in spec(sandbox.id))
        assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"
        await sandbox.release()

    within(settings, body, heartbeat_seconds=20)
    eventually(lambda: [lease["status"]["reason"] for lease in leases(node)] == ["HeartbeatMissed"])
    node.world.delete("sandboxleases", leases(node)[0]["metadata"]["name"])


def test_many_leases_in_turns_are_as_many_pods(node: Node, settings: KubernetesSandboxConfig) -> None:
    """As many at a time as the pool's max: each gets a pod of its own, and none is left."""

    async def body(backend: KubernetesBackend) -> None:
        seats = asyncio.Semaphore(6)

        async def episode(number: int) -> str:
            async with seats:
                sandbox = await backend.lease("pool", f"e{number}", 600.0)
                await sandbox.write("mine", str(number).encode())
                assert (await sandbox.exec(["cat", "mine"])).stdout == str(number).encode()
                await sandbox.release()
                return sandbox.id

        assert len(set(await asyncio.gather(*(episode(n) for n in range(12))))) == 12

    within(settings, body)
    eventually(lambda: leases(node) == [])
