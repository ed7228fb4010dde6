"""Between a tenant and the API server something else answers, or nothing does: no lease is lost, and none is left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.config import ConfigException

from occamy.sandboxes.kubernetes import api as api_module
from occamy.sandboxes.kubernetes import leases as leases_module
from occamy.sandboxes.kubernetes.api import ApiDown, find_credentials
from occamy.sandboxes.kubernetes.backend import KubernetesBackend
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig
from occamy.sandboxes.kubernetes.leases import Held
from occamy.sandboxes.protocol import LeaseExpired, LeaseLost, SandboxError

from .api_faults import BODIES, EVENTS, SPEC, Between, between, through
from .cluster import eventually
from .daemons import PATIENCE_S
from .sandbox_world import World

NO_ANSWERS = [*BODIES, "redirect"]


async def gone(world: World) -> None:
    """Wait until no lease is left."""
    await asyncio.to_thread(eventually, lambda: world.list("sandboxleases") == [])


async def bind(world: World, held: Held) -> None:
    """Do what the operator does, and wait until the holder sees it."""
    status = {"status": {"phase": "Bound", "pod": "cowork-0"}}
    await asyncio.to_thread(world.patch, "sandboxleases", held.name, status, "status")
    await asyncio.wait_for(held.bound.wait(), PATIENCE_S)
    held.check()


@pytest.mark.parametrize("fault", NO_ANSWERS)
@pytest.mark.parametrize("kind", ["LIST", "POST"])
def test_what_no_api_server_answers_is_asked_again(world: World, kubeconfig: Path, kind: str, fault: str) -> None:
    async def body() -> None:
        async with through(kubeconfig, world.namespace, [(kind, fault)]) as (leases, server):
            held = await leases.create(SPEC, PATIENCE_S)
            (made,) = await asyncio.to_thread(world.list, "sandboxleases")
            assert (made["metadata"]["uid"], server.faults) == (held.uid, [])

    asyncio.run(body())


@pytest.mark.parametrize("fault", [*NO_ANSWERS, "absent"])
def test_a_deletion_is_repeated_until_the_api_server_knows_of_it(world: World, kubeconfig: Path, fault: str) -> None:
    async def body() -> None:
        async with through(kubeconfig, world.namespace, [("DELETE", fault)]) as (leases, server):
            await leases.release(await leases.create(SPEC, PATIENCE_S), PATIENCE_S)
            assert (await asyncio.to_thread(world.list, "sandboxleases"), server.faults) == ([], [])

    asyncio.run(body())


@pytest.mark.parametrize("fault", [*EVENTS, *NO_ANSWERS, "unknown"])
def test_a_watch_that_breaks_is_taken_up_again(world: World, kubeconfig: Path, fault: str) -> None:
    faults = [("LIST", ""), ("WATCH", fault), ("LIST", "page"), ("LIST", "stranger")]

    async def body() -> None:
        async with through(kubeconfig, world.namespace, faults) as (leases, _):
            held = await leases.create(SPEC, PATIENCE_S)
            await bind(world, held)
            await asyncio.to_thread(world.delete, "sandboxleases", held.name)
            await asyncio.wait_for(held.ended.wait(), PATIENCE_S)
            with pytest.raises(LeaseLost, match="is gone: somebody deleted it"):
                held.check()

    asyncio.run(body())


def test_a_watch_that_falls_silent_is_left_before_leases_are_given_up(
    world: World, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a gateway that forgets a connection without a word."""
    blind = api_module._WATCH_S + api_module._SILENCE_S
    assert blind < KubernetesSandboxConfig.model_fields["bind_seconds"].default / 2
    monkeypatch.setattr(api_module, "_WATCH_S", 1)
    monkeypatch.setattr(api_module, "_SILENCE_S", 0.5)

    async def body() -> None:
        async with through(kubeconfig, world.namespace, [("WATCH", "deaf")]) as (leases, _):
            await bind(world, await leases.create(SPEC, PATIENCE_S))

    asyncio.run(body())


def test_quiet_watches_do_not_slow_down_the_next(
    world: World, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses that doubled would come to more than the test's patience."""
    monkeypatch.setattr(leases_module, "PAUSE_S", (0.001, 600.0))

    async def body() -> None:
        async with through(kubeconfig, world.namespace, [("WATCH", "end")] * 25) as (leases, _):
            await bind(world, await leases.create(SPEC, PATIENCE_S))

    asyncio.run(body())


def test_credentials_that_cannot_be_read_for_a_while_lose_nothing(world: World, kubeconfig: Path) -> None:
    """As a token that is being rotated, or the program of a kubeconfig that fails."""
    faults: list[Exception] = []

    def refresh(_: Any) -> None:
        if faults:
            raise faults.pop()

    def changed(credentials: Any) -> None:
        credentials.refresh_api_key_hook = refresh

    async def body() -> None:
        async with through(kubeconfig, world.namespace, [], changed=changed) as (leases, _):
            faults.extend([ConfigException("Token file exists but empty."), FileNotFoundError("token")])
            held = await leases.create(SPEC, PATIENCE_S)
            assert faults == []
            faults.extend([ConfigException("Token file exists but empty."), ValueError("no JSON")])
            await leases.release(held, PATIENCE_S)
            assert await asyncio.to_thread(world.list, "sandboxleases") == []

    asyncio.run(body())


def test_credentials_that_hang_end_a_call_in_time(world: World, kubeconfig: Path) -> None:
    over = threading.Event()

    def changed(credentials: Any) -> None:
        credentials.refresh_api_key_hook = lambda _: over.wait()

    async def body() -> None:
        async with through(kubeconfig, world.namespace, [], seconds=0.5, changed=changed) as (leases, _):
            try:
                with pytest.raises(ApiDown, match="no credentials: TimeoutError"):
                    await asyncio.wait_for(leases.create(SPEC, 0.0), 60.0)
            finally:
                over.set()

    asyncio.run(body())


def test_one_api_server_that_hangs_is_waited_for_once(world: World, kubeconfig: Path) -> None:
    """And not by each of many leases in turn."""

    async def body() -> None:
        faults = [("LIST", "silent")] * 20
        async with through(kubeconfig, world.namespace, faults, seconds=2.0) as (leases, server):
            many = (leases.create(SPEC, 0.0) for _ in range(20))
            assert {type(e) for e in await asyncio.gather(*many, return_exceptions=True)} == {ApiDown}
            assert server.seen.count("LIST") == 1

    asyncio.run(body())


def test_a_renewal_that_fails_is_not_left_for_the_next(
    world: World, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next may come too late: the operator takes a lease away at the moment that its heartbeat is missed."""
    monkeypatch.setattr(leases_module, "PAUSE_S", (0.01, 0.01))
    faults = [("PATCH", "busy")] * 30

    async def body() -> None:
        async with through(kubeconfig, world.namespace, faults, heartbeat_s=12) as (leases, server):  # a beat in 3 s
            held = await leases.create(SPEC, PATIENCE_S)
            async with asyncio.timeout(60.0):
                while not (await asyncio.to_thread(world.list, "sandboxleases"))[0]["spec"].get("renewed"):
                    await asyncio.sleep(0.1)
            held.check()
            assert server.faults == []

    asyncio.run(body())


def test_a_lease_whose_request_arrives_after_its_deletion_is_not_left(world: World, kubeconfig: Path) -> None:
    """Its holder was cancelled meanwhile."""

    async def body() -> None:
        async with through(kubeconfig, world.namespace, [("POST", "late")]) as (leases, server):
            making = asyncio.create_task(leases.create(SPEC, PATIENCE_S))
            while "POST" not in server.seen:
                await asyncio.sleep(0.01)
            server.faults.append(("POST", "late"))
            making.cancel()
            with pytest.raises(asyncio.CancelledError):
                await making
            await asyncio.to_thread(eventually, lambda: len(world.list("sandboxleases")) == 1)
            await gone(world)

    asyncio.run(body())


@asynccontextmanager
async def backend_through(
    world: World, kubeconfig: Path, faults: list[tuple[str, str]]
) -> AsyncIterator[tuple[KubernetesBackend, Between]]:
    """A backend whose kubeconfig names the server between."""
    async with between(find_credentials(kubeconfig, None), faults) as server:
        known = yaml.safe_load(kubeconfig.read_text())
        known["clusters"][0]["cluster"] = {"server": server.url}
        (world.folder / "between").write_text(yaml.safe_dump(known))
        config = KubernetesSandboxConfig(namespace=world.namespace, kubeconfig=world.folder / "between")
        backend = KubernetesBackend(config.model_copy(update={"release_seconds": PATIENCE_S}))
        try:
            yield backend, server
        finally:
            await backend.close()


def others() -> set[asyncio.Task[Any]]:
    """Tasks besides that of the test."""
    return asyncio.all_tasks() - {task for task in (asyncio.current_task(),) if task}


@pytest.mark.parametrize(("left", "kind"), [(600.0, LeaseLost), (0.0, LeaseExpired)])
def test_only_a_deadline_that_is_past_here_too_is_the_agents(
    world: World, kubeconfig: Path, left: float, kind: type[SandboxError]
) -> None:
    """The operator's clock may be ahead, and its count begins before the pod serves."""
    status = {"status": {"phase": "Expired", "reason": "DeadlinePassed"}}

    async def body() -> None:
        async with through(kubeconfig, world.namespace, []) as (leases, _):
            held = await leases.create(SPEC, PATIENCE_S)
            held.deadline = time.monotonic() + left
            await asyncio.to_thread(world.patch, "sandboxleases", held.name, status, "status")
            await asyncio.wait_for(held.ended.wait(), PATIENCE_S)
            with pytest.raises(SandboxError, match="DeadlinePassed") as caught:
                held.check()
            assert type(caught.value) is kind

    asyncio.run(body())


@pytest.mark.parametrize("at", ["open", "LIST", "POST", "late", "WATCH"])
def test_a_backend_that_is_closed_while_it_leases_leaves_nothing(world: World, kubeconfig: Path, at: str) -> None:
    """Neither a lease nor a task, whatever the lease waits for; and it can be used again."""
    faults = {"late": [("POST", "late")]}.get(at, [])

    async def body() -> None:
        async with backend_through(world, kubeconfig, faults) as (backend, server):
            tasks = others()
            leasing = asyncio.create_task(backend.lease("cowork", "e", 60.0))
            while at != "open" and ("POST" if at == "late" else at) not in server.seen:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
            await asyncio.gather(backend.close(), backend.close())
            with pytest.raises(LeaseLost, match=r"was (released|closed)"):
                await asyncio.wait_for(leasing, PATIENCE_S)
            while late := {task for task in others() - tasks if "Leases" in repr(task.get_coro())}:
                await asyncio.wait(late, timeout=PATIENCE_S)
            assert await asyncio.to_thread(world.list, "sandboxleases") == []
            await backend.check()

    asyncio.run(body())


def test_a_backend_that_never_opened_is_closed(tmp_path: Path) -> None:
    async def body() -> None:
        backend = KubernetesBackend(KubernetesSandboxConfig(namespace="n", kubeconfig=tmp_path / "absent"))
        await backend.close()
        leasing = asyncio.create_task(backend.lease("cowork", "e", 60.0))
        await asyncio.sleep(0)
        await backend.close()
        with pytest.raises(SandboxError, match="no credentials for a cluster"):
            await leasing

    asyncio.run(body())


@pytest.mark.parametrize("fault", ["busy", "away", "page", "lost"])
def test_rights_are_asked_for_again_where_an_api_server_is_busy(world: World, kubeconfig: Path, fault: str) -> None:
    async def body() -> None:
        async with backend_through(world, kubeconfig, [("POST", fault)] * 2) as (backend, server):
            await backend.check()
            assert server.faults == []

    asyncio.run(body())
