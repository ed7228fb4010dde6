"""The Kubernetes backend: a lease is a SandboxLease, commands run under the agent in the pod that it is bound to."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from occamy.contracts.outcome import Outcome
from occamy.sandboxes import archive, paths
from occamy.sandboxes.kubernetes.api import Api, find_credentials, patiently
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig
from occamy.sandboxes.kubernetes.http import HEAD_BYTES
from occamy.sandboxes.kubernetes.leases import Held, Leases, unless_ended
from occamy.sandboxes.kubernetes.rights import check_rights
from occamy.sandboxes.kubernetes.tunnel import Tunnel
from occamy.sandboxes.kubernetes.wire import AgentClient, Done, Line, check_arrived, file_target, parsed
from occamy.sandboxes.protocol import (
    ExecResult,
    IsolationRefused,
    LeaseExpired,
    SandboxDied,
    SandboxError,
    Snapshot,
)

_AGENT_S = 60.0
"""For what an agent does within seconds: start a command, read, write, freeze. Our choice."""
_BULK_S = 600.0
"""To move a whole workspace. Our choice."""
_SHORTEST_S = 10
"""Fewest seconds that a lease may be asked for."""
_PORT = 8750
_FREEZES = 3
"""Attempts to hear of a freeze through a tunnel, whose relay in the pod a freeze kills."""


class KubernetesBackend:
    """Leases pods of the sandbox operator. Belongs to the event loop that first leases one."""

    def __init__(self, config: KubernetesSandboxConfig) -> None:
        """Raises IsolationRefused when `config` demands more than the pools give."""
        if config.isolation.rank < config.minimum_isolation.rank:
            raise IsolationRefused(
                f"isolation {config.minimum_isolation.value!r} is required, {config.isolation.value!r} is what the "
                "pools give; lease from another pool, or lower sandbox.minimum_isolation"
            )
        self.config = config
        self.isolation = config.isolation
        self._opened: asyncio.Task[tuple[Api, Leases]] | None = None

    async def lease(
        self,
        pool: str,
        owner: str,
        deadline_s: float,
        *,
        reach: Sequence[tuple[str, int]] = (),
        readable: Sequence[Path] = (),
    ) -> KubernetesSandbox:
        """A pod that serves; the deadline counts from then on. See `SandboxBackend.lease`.

        The pool's network rule has to open what is in `reach`; nothing here can.
        """
        if far := [f"{host}:{port}" for host, port in reach if _is_loopback(host)] or [str(path) for path in readable]:
            raise ValueError(
                f"lease for {owner}: a pod has neither this machine's loopback nor its files ({far[0]}); serve at an "
                "address that pods reach (rollout.servers.host), and put programs into the pool's image"
            )
        began = time.monotonic()
        api, leases = await self._open()
        held = await leases.create(self._spec(pool, owner, deadline_s), self.config.bind_seconds)
        try:
            await self._bound(held, owner)
            token = await leases.token(held, self.config.bind_seconds)
            sandbox = KubernetesSandbox(self.config, api, leases, held, owner, token)
            await sandbox.connect()
            leases.served(held, time.monotonic() - began)
            sandbox.begin(deadline_s)
            return sandbox
        except BaseException:
            leases.drop(held)
            raise

    async def check(self) -> None:
        """Ask for each right that a lease needs, and whether the API server would take one."""
        api, leases = await self._open()
        space, through_exec, seconds = self.config.namespace, self.config.route == "exec", self.config.api_seconds
        await patiently(lambda: check_rights(api, space, through_exec=through_exec), seconds)
        await patiently(lambda: leases.check(self._spec("check", "check", 0.0)), seconds)

    async def close(self) -> None:
        """Release what is left and end the session with the API server."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        try:
            api, leases = await opened
        except SandboxError:  # whoever leased has heard of it
            return
        try:
            await leases.close(self.config.release_seconds)
        finally:
            await api.close()

    def _spec(self, pool: str, owner: str, deadline_s: float) -> dict[str, Any]:
        return {
            "pool": self.config.pool or pool,
            "owner": {"run": self.config.run, "episode": owner[:256]},
            "ttlSeconds": max(_SHORTEST_S, math.ceil(deadline_s + self.config.bind_seconds)),
            "launch": self.config.launch,
        }

    async def _open(self) -> tuple[Api, Leases]:
        if self._opened is None or (self._opened.done() and self._opened.exception()):
            self._opened = asyncio.create_task(self._connect())
        return await asyncio.shield(self._opened)

    async def _connect(self) -> tuple[Api, Leases]:
        config = self.config
        credentials = await asyncio.to_thread(find_credentials, config.kubeconfig, config.context)
        api = Api(credentials, config.api_seconds)
        return api, Leases(api, config.namespace, config.heartbeat_seconds)

    async def _bound(self, held: Held, owner: str) -> None:
        """Wait until the operator has given the lease a pod. Raises SandboxError with what it says."""
        try:
            await asyncio.wait_for(held.bound.wait(), self.config.bind_seconds)
        except TimeoutError as e:
            said = f"{held.status.get('reason')}: {held.status.get('message')}" if held.status else "no operator spoke"
            raise SandboxError(
                f"lease {held.name} of {owner} got no pod in {self.config.bind_seconds:.0f} s ({said}); "
                "see `kubectl get sandboxpools`, or raise sandbox.bind_seconds"
            ) from e
        held.check()


class KubernetesSandbox:
    """One lease. See `Sandbox` for the contract of each method."""

    def __init__(
        self, config: KubernetesSandboxConfig, api: Api, leases: Leases, held: Held, owner: str, token: str
    ) -> None:
        self.id = held.uid
        self.owner = owner
        self.isolation = config.isolation
        self.route = ""
        """How its agent is reached: agent or exec."""
        self._name = f"lease {held.name} of {owner}"
        self._config, self._leases, self._held = config, leases, held
        endpoint = urlsplit(held.status.get("endpoint") or "")
        self._address = (endpoint.hostname, endpoint.port or _PORT)
        self._tunnel = Tunnel(api, config.namespace, held.status["pod"], self._address[1])
        self._agent = AgentClient(self._dial, token, self._name)

    @property
    def pod(self) -> str:
        """Name of the pod."""
        return str(self._held.status["pod"])

    async def connect(self) -> None:
        """Find the way to the agent. Raises SandboxDied when there is none."""
        wanted = self._config.route
        if wanted != "exec" and self._address[0]:
            try:
                self.route = "agent"
                await self._ask("GET", "/state")
                return
            except SandboxDied:
                if wanted == "agent":
                    raise
        self.route = "exec"
        try:
            await self._ask("GET", "/state")
        except SandboxError as e:
            raise SandboxDied(f"{self._name}: no way to the agent of pod {self.pod}: {e} {self._tunnel.words}") from e

    def begin(self, deadline_s: float) -> None:
        """The deadline counts from now."""
        self._held.deadline = time.monotonic() + deadline_s

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_s: float = 60.0,
    ) -> ExecResult:
        self._alive()
        paths.parts_of(cwd)
        began = time.monotonic()
        left = self._held.deadline - began
        timeout_s = min(timeout_s, left)
        order = {
            "argv": list(argv),
            "env": dict(env or {}),
            "cwd": cwd,
            "timeout_s": timeout_s,
            "lease_s": left,
            "limits": self._config.limits.model_dump(),
            "min_free_bytes": self._config.min_free_bytes,
        }
        body = json.dumps(order).encode() + b"\n" + stdin
        most = 2 * self._config.limits.output_bytes
        said = await self._ask("POST", "/exec", body, limit=most, timeout_s=timeout_s + _AGENT_S)
        line, _, output = said.partition(b"\n")
        done = parsed(self._name, Done, line)
        code = done.exit
        return ExecResult(
            outcome=Outcome.timed_out if code is None else Outcome.agent_failed if code else Outcome.completed,
            exit_code=code,
            stdout=output[: done.stdout],
            stderr=output[done.stdout :],
            seconds=time.monotonic() - began,
            truncated=done.truncated,
            limit=done.limit,
        )

    async def read(self, path: str) -> bytes:
        self._alive()
        paths.parts_of(path)
        most = self._config.limits.workspace_bytes
        return await self._ask("GET", f"{file_target(path)}&limit={most}", limit=most)

    async def write(self, path: str, data: bytes) -> None:
        self._alive()
        paths.parts_of(path)
        answer = await self._ask("PUT", file_target(path), data)
        check_arrived(self._name, answer, data)

    async def remove(self, path: str) -> None:
        self._alive()
        paths.parts_of(path)
        await self._ask("DELETE", file_target(path))

    async def files(self) -> list[str]:
        self._alive()
        most = self._config.limits.workspace_bytes
        said = await self._ask("GET", f"/files?limit={most}", limit=most)
        return [os.fsdecode(path) for path in said.split(b"\0")[:-1]]

    async def freeze(self) -> None:
        self._alive(expired=False)
        target = f"/freeze?limit={self._config.limits.workspace_bytes}"
        for attempt in range(_FREEZES):
            try:
                await self._ask("POST", target, timeout_s=_BULK_S)
                return
            except SandboxDied:
                if self.route != "exec" or attempt == _FREEZES - 1:
                    raise

    async def snapshot(self) -> Snapshot:
        self._alive()
        most = self._config.limits.workspace_bytes
        return archive.seal(await self._ask("GET", f"/snapshot?limit={most}", limit=2 * most, timeout_s=_BULK_S))

    async def restore(self, archive_bytes: bytes) -> None:
        self._alive()
        target = f"/restore?limit={self._config.limits.workspace_bytes}"
        check_arrived(self._name, await self._ask("PUT", target, archive_bytes, timeout_s=_BULK_S), archive_bytes)

    async def release(self) -> None:
        """Delete the lease, and with it the pod. What the API server does not hear in time is repeated later."""
        self._agent.close()
        if self._held.deletion is None:
            await self._leases.release(self._held, self._config.release_seconds)
        await self._tunnel.close()

    async def _ask(
        self, method: str, target: str, body: bytes = b"", *, limit: int = 0, timeout_s: float = _AGENT_S
    ) -> bytes:
        """A call to the agent, which ends when the lease does."""
        call = self._agent.call(method, target, body, limit=limit, timeout_s=timeout_s)
        return await unless_ended(self._held, call)

    async def _dial(self) -> Line:
        if self.route == "exec":
            return await self._tunnel.dial()
        host, port = self._address
        try:
            async with asyncio.timeout(self._config.connect_seconds):
                return await asyncio.open_connection(host, port, limit=HEAD_BYTES)
        except (OSError, TimeoutError) as e:
            raise SandboxDied(f"{self._name}: nothing answers at {host}:{port}: {e or 'timed out'}") from e

    def _alive(self, *, expired: bool = True) -> None:
        self._held.check()
        if expired and time.monotonic() > self._held.deadline:
            raise LeaseExpired(f"{self._name} is past its deadline; take a new lease")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
