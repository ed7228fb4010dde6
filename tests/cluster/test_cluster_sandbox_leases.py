"""Making a lease through an API server that is busy with quotas or away: made once, or refused and none left behind."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from occamy.sandboxes.kubernetes.api import Api, ApiDown, ApiError, find_credentials
from occamy.sandboxes.kubernetes.leases import Held, Leases

from .cluster import Cluster, eventually
from .daemons import PATIENCE_S
from .pod_processes import tenant
from .sandbox_world import World, call, install

SPEC = {"pool": "cowork", "owner": {"run": "r", "episode": "e"}, "ttlSeconds": 600}
CONTENDED = {
    "kind": "Status",
    "apiVersion": "v1",
    "status": "Failure",
    "reason": "Conflict",
    "message": 'Operation cannot be fulfilled on resourcequotas "sandboxes": the object has been modified',
    "code": 409,
}
"""An API server's answer to whoever makes something that it could not count: others changed the quota each time."""

STATUS = {"busy": 429, "away": 503, "stranger": 403}


@pytest.fixture
def world(cluster: Cluster, namespace: str, tmp_path: Path) -> World:
    """A namespace without an operator."""
    install(cluster)
    return World(cluster, namespace, tmp_path)


@pytest.fixture
def kubeconfig(world: World) -> Path:
    """A tenant's, whom the API server knows."""
    made = tenant(world.cluster, world.namespace)

    def known() -> bool:
        try:
            return bool(call(world.cluster.client(made), "GET", world.path("sandboxleases")))
        except ApiException:
            return False

    eventually(known)
    return made


@asynccontextmanager
async def through(kubeconfig: Path, namespace: str, faults: list[str]) -> AsyncIterator[Leases]:
    """A tenant whose requests pass a server that gives a fault for each object that is to be made, or secret that is to
    be read, while any is left: `lost` keeps the API server's answer back, the others are answers of its own."""
    credentials = find_credentials(kubeconfig, None)
    real, tls = credentials.host, ssl.create_default_context(cafile=credentials.ssl_ca_cert)

    async def serve(request: web.Request) -> web.StreamResponse:
        fault = faults.pop(0) if faults and (request.method == "POST" or "/secrets/" in request.path) else ""
        if fault == "contended":
            return web.json_response(CONTENDED, status=409)
        if fault in STATUS:
            return web.Response(status=STATUS[fault])
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        async with session.request(
            request.method, real + request.path_qs, data=await request.read(), headers=headers
        ) as answer:
            if fault == "lost":
                await answer.read()
                assert request.transport is not None
                request.transport.abort()
            passed = web.StreamResponse(status=answer.status)
            await passed.prepare(request)
            async for piece in answer.content.iter_any():
                await passed.write(piece)
            return passed

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        credentials.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
        api = Api(credentials, PATIENCE_S)
        leases = Leases(api, namespace, 120)
        try:
            yield leases
        finally:
            await leases.close(PATIENCE_S)
            await api.close()
            await runner.cleanup()


@pytest.mark.parametrize(
    "faults", [["contended"] * 3, ["lost"], ["busy", "lost", "contended"], ["away", "stranger"]], ids="-".join
)
def test_a_lease_is_asked_for_again_and_made_once(world: World, kubeconfig: Path, faults: list[str]) -> None:
    async def body() -> None:
        async with through(kubeconfig, world.namespace, faults) as leases:
            held = await leases.create(SPEC, PATIENCE_S)
            (made,) = await asyncio.to_thread(world.list, "sandboxleases")
            assert (made["metadata"]["name"], made["metadata"]["uid"]) == (held.name, held.uid)
            assert faults == []

    asyncio.run(body())
    assert world.list("sandboxleases") == []


def test_a_token_is_asked_for_again(world: World, kubeconfig: Path) -> None:
    secret = {"metadata": {"name": "lease"}, "stringData": {"token": "hush"}}
    client.CoreV1Api(world.api).create_namespaced_secret(world.namespace, secret)
    held = Held("cowork-1", status={"tokenSecret": "lease", "pod": "cowork-0"})

    async def body() -> None:
        async with through(kubeconfig, world.namespace, ["busy", "lost"]) as leases:
            assert await leases.token(held, PATIENCE_S) == "hush"
            with pytest.raises(ApiError, match=r"404 .*secrets .absent. not found"):
                await leases.token(Held("cowork-2", status={"tokenSecret": "absent"}), PATIENCE_S)

    asyncio.run(body())


@pytest.mark.parametrize(("fault", "kind"), [("contended", ApiError), ("busy", ApiDown), ("lost", ApiDown)])
def test_patience_ends_and_nothing_is_left(world: World, kubeconfig: Path, fault: str, kind: type[Exception]) -> None:
    async def body() -> None:
        async with through(kubeconfig, world.namespace, [fault, fault]) as leases:
            with pytest.raises(kind, match=r"POST /apis/occamy.dev/.*/sandboxleases: "):
                await leases.create(SPEC, 0.0)

    asyncio.run(body())
    assert world.list("sandboxleases") == []


def test_a_refusal_is_not_repeated(world: World, kubeconfig: Path) -> None:
    async def body() -> None:
        async with through(kubeconfig, world.namespace, ["stranger"]) as leases:
            with pytest.raises(ApiError, match=r"sandboxleases: 403"):
                await leases.create(SPEC, PATIENCE_S)
            with pytest.raises(ApiError, match=r"422 .*ttlSeconds"):
                await leases.create(SPEC | {"ttlSeconds": -1}, PATIENCE_S)

    before = len(world.cluster.uses())
    asyncio.run(body())
    posts = [use for use in world.cluster.uses()[before:] if use.namespace == world.namespace and use.verb == "create"]
    assert [use.code for use in posts] == [422]


def counted(core: client.CoreV1Api, namespace: str) -> bool:
    """Make a quota on leases. False where nobody counts yet: one of before the kind was known waits for minutes."""
    hard = {"count/sandboxleases.occamy.dev": "400"}
    core.create_namespaced_resource_quota(namespace, {"metadata": {"name": "sandboxes"}, "spec": {"hard": hard}})
    try:
        return bool(eventually(lambda: core.read_namespaced_resource_quota("sandboxes", namespace).status.used, 5.0))
    except TimeoutError:
        core.delete_namespaced_resource_quota("sandboxes", namespace)
        return False


@contextmanager
def restless(core: client.CoreV1Api, namespace: str) -> Iterator[None]:
    """A quota that is another version whenever one looks."""
    over = threading.Event()

    def change() -> None:
        number = 0
        while not over.is_set():
            number += 1
            core.patch_namespaced_resource_quota(
                "sandboxes", namespace, {"metadata": {"annotations": {"turn": str(number)}}}
            )

    threads = [threading.Thread(target=change) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_quota_that_never_rests_refuses_nobody(world: World, kubeconfig: Path) -> None:
    """Others have their pods counted in the same quota all the while, as the operator has."""
    core = client.CoreV1Api(world.cluster.client())
    eventually(lambda: counted(core, world.namespace))

    async def body() -> None:
        async with through(kubeconfig, world.namespace, []) as leases:
            made = await asyncio.gather(*(leases.create(SPEC, PATIENCE_S) for _ in range(40)))
            assert len({held.uid for held in made}) == 40

    with restless(core, world.namespace):
        asyncio.run(body())
    assert world.list("sandboxleases") == []
