"""Making a lease through an API server that is busy with quotas or away: made once, or refused and none left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kubernetes import client

from occamy.sandboxes.kubernetes.api import ApiDown, ApiError
from occamy.sandboxes.kubernetes.leases import Held

from .api_faults import SPEC, through
from .cluster import eventually
from .daemons import PATIENCE_S
from .sandbox_world import World


def making(faults: list[str]) -> list[tuple[str, str]]:
    """Faults of attempts to make an object."""
    return [("POST", fault) for fault in faults]


@pytest.mark.parametrize(
    "faults", [["contended"] * 3, ["lost"], ["busy", "lost", "contended"], ["away", "stranger"]], ids="-".join
)
def test_a_lease_is_asked_for_again_and_made_once(world: World, kubeconfig: Path, faults: list[str]) -> None:
    async def body() -> None:
        async with through(kubeconfig, world.namespace, making(faults)) as (leases, server):
            held = await leases.create(SPEC, PATIENCE_S)
            (made,) = await asyncio.to_thread(world.list, "sandboxleases")
            assert (made["metadata"]["name"], made["metadata"]["uid"]) == (held.name, held.uid)
            assert server.faults == []

    asyncio.run(body())
    assert world.list("sandboxleases") == []


def test_a_token_is_asked_for_again(world: World, kubeconfig: Path) -> None:
    secret = {"metadata": {"name": "lease"}, "stringData": {"token": "hush"}}
    client.CoreV1Api(world.api).create_namespaced_secret(world.namespace, secret)
    held = Held("cowork-1", status={"tokenSecret": "lease", "pod": "cowork-0"})

    async def body() -> None:
        async with through(kubeconfig, world.namespace, [("SECRET", "busy"), ("SECRET", "lost")]) as (leases, _):
            assert await leases.token(held, PATIENCE_S) == "hush"
            with pytest.raises(ApiError, match=r"404 .*secrets .absent. not found"):
                await leases.token(Held("cowork-2", status={"tokenSecret": "absent"}), PATIENCE_S)

    asyncio.run(body())


@pytest.mark.parametrize(("fault", "kind"), [("contended", ApiError), ("busy", ApiDown), ("lost", ApiDown)])
def test_patience_ends_and_nothing_is_left(world: World, kubeconfig: Path, fault: str, kind: type[Exception]) -> None:
    async def body() -> None:
        async with through(kubeconfig, world.namespace, making([fault, fault])) as (leases, _):
            with pytest.raises(kind, match=r"POST /apis/occamy.dev/.*/sandboxleases: "):
                await leases.create(SPEC, 0.0)

    asyncio.run(body())
    assert world.list("sandboxleases") == []


def test_a_refusal_is_not_repeated(world: World, kubeconfig: Path) -> None:
    async def body() -> None:
        async with through(kubeconfig, world.namespace, making(["stranger"])) as (leases, _):
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
        async with through(kubeconfig, world.namespace, []) as (leases, _):
            made = await asyncio.gather(*(leases.create(SPEC, PATIENCE_S) for _ in range(40)))
            assert len({held.uid for held in made}) == 40

    with restless(core, world.namespace):
        asyncio.run(body())
    assert world.list("sandboxleases") == []
