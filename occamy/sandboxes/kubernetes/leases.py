"""What becomes of this process's leases: one watch for all of them, one heartbeat each, and their end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from occamy.sandboxes.kubernetes.api import CONFLICT, PAUSE_S, Api, ApiError, patiently
from occamy.sandboxes.protocol import LeaseExpired, LeaseLost, SandboxDied, SandboxError

GROUP = "occamy.dev"
API_VERSION = f"{GROUP}/v1alpha1"
HOLDER_LABEL = f"{GROUP}/holder"
FIRST_EXEC_ANNOTATION = f"{GROUP}/first-exec-seconds"
"""What the operator reads and counts."""
_BEATS = 4
"""Renewals in the time after which a missed heartbeat ends a lease. Our choice."""
_REASON_S = 2.0
"""How long the operator has to say why an agent is gone: it often hears of it a moment later."""

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass
class Held:
    """A lease of ours, as last seen."""

    name: str
    uid: str = ""
    """Known once it is created."""
    unclear: bool = False
    """Whether it may have been created, or be created yet, without a word."""
    status: Mapping[str, Any] = field(default_factory=dict)
    bound: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has a pod, or has ended."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has no pod any more and never will."""
    deadline: float = math.inf
    """Until when its holder was to have it, monotonic seconds."""
    deletion: asyncio.Task[None] | None = None
    """Set when we ended it ourselves."""
    failure: tuple[type[SandboxError], str] = (LeaseLost, "")
    """What to raise then."""

    def end(self, kind: type[SandboxError], words: str) -> None:
        """It is over. The first reason counts."""
        if not self.ended.is_set():
            self.failure = (kind, words)
            self.ended.set()
            self.bound.set()

    def check(self) -> None:
        """Raise what ended it, if anything did."""
        if self.ended.is_set():
            kind, words = self.failure
            raise kind(f"lease {self.name} {words}")


class Leases:
    """Creates leases, follows and renews them, and deletes them for certain."""

    def __init__(self, api: Api, namespace: str, heartbeat_s: int | None) -> None:
        self._api, self._namespace, self._heartbeat_s = api, namespace, heartbeat_s
        self._path = f"/apis/{API_VERSION}/namespaces/{namespace}/sandboxleases"
        self._holder = secrets.token_hex(8)
        self._held: dict[str, Held] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._listing: asyncio.Task[str] | None = None
        self._closed = False

    async def create(self, spec: Mapping[str, Any], seconds: float) -> Held:
        """A new lease, which nobody has seen yet; for so long it is asked for patiently. Raises SandboxError."""
        if self._closed:
            raise LeaseLost("the backend was closed before the lease was made; open another")
        held = Held(f"{spec['pool'][:40]}-{secrets.token_hex(8)}")
        self._held[held.name] = held  # before it exists: no event of it is missed
        try:
            held.uid = await unless_ended(held, patiently(lambda: self._make(held, spec), seconds))
        except BaseException:
            if held.unclear:
                self.drop(held)
            else:
                self._held.pop(held.name, None)
            raise
        if self._heartbeat_s is not None:
            self._spawn(self._renew(held, self._heartbeat_s / _BEATS))
        return held

    async def check(self, spec: Mapping[str, Any]) -> None:
        """Raise SandboxError when the API server would never take such a lease. None is made."""
        try:
            await self._api.call("POST", f"{self._path}?dryRun=All", self._body(f"check-{secrets.token_hex(8)}", spec))
        except ApiError as e:
            if e.status != 403 and e.reason != CONFLICT:  # quotas empty themselves; rights are asked for elsewhere
                raise

    async def token(self, held: Held, seconds: float) -> str:
        """What the agent in a bound lease's pod asks for; for so long it is read patiently. Raises SandboxError."""
        name = held.status.get("tokenSecret")
        if not name:
            raise SandboxError(
                f"lease {held.name} is bound to pod {held.status.get('pod')}, which runs no agent; "
                "lease from a pool of backend pods"
            )
        where = f"/api/v1/namespaces/{self._namespace}/secrets/{name}"
        secret = await patiently(lambda: self._api.call("GET", where), seconds)
        return base64.b64decode(secret["data"]["token"]).decode()

    def served(self, held: Held, seconds: float) -> None:
        """Tell the operator, in the background, how long after it was asked for a lease could run a command."""
        self._spawn(self._tell(held.name, {"metadata": {"annotations": {FIRST_EXEC_ANNOTATION: f"{seconds:.4f}"}}}))

    async def release(self, held: Held, seconds: float) -> None:
        """Delete a lease, in the background where the API server does not answer in time."""
        task = self.drop(held)
        done, _ = await asyncio.wait([task], timeout=seconds)
        if not done:
            log.warning("lease %s is not deleted yet; its deadline ends it if nothing else does", held.name)

    def drop(self, held: Held) -> asyncio.Task[None]:
        """Delete a lease in the background, once."""
        if held.deletion is None:
            held.end(LeaseLost, "was released; take a new lease")
            self._held.pop(held.name, None)
            held.deletion = self._spawn(self._delete(held))
        return held.deletion

    async def close(self, seconds: float) -> None:
        """Delete what is left, as far as the API server answers in time, and end the watch."""
        self._closed = True
        deletions = [self.drop(held) for held in list(self._held.values())]
        if deletions or self._background:
            await asyncio.wait([*deletions, *self._background], timeout=seconds)
        tasks = [*self._background, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _make(self, held: Held, spec: Mapping[str, Any]) -> str:
        """One attempt, which finds what an earlier one made whose answer was lost. Returns the UID."""
        await self._start_watching()
        before, held.unclear = held.unclear, True
        try:
            made = await self._api.call("POST", self._path, self._body(held.name, spec))
        except ApiError as e:
            if e.reason != "AlreadyExists":
                held.unclear = before
                raise
            made = await self._api.call("GET", f"{self._path}/{held.name}")
        return str(made["metadata"]["uid"])

    def _body(self, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        meta = {"name": name, "namespace": self._namespace, "labels": {HOLDER_LABEL: self._holder}}
        beat = {} if self._heartbeat_s is None else {"heartbeatSeconds": self._heartbeat_s}
        return {"apiVersion": API_VERSION, "kind": "SandboxLease", "metadata": meta, "spec": {**spec, **beat}}

    async def _start_watching(self) -> None:
        """List once for all who wait, so that no event is missed from here on. Raises SandboxError."""
        if self._watching is None or self._watching.done():
            if self._listing is None or self._listing.done():
                self._listing = self._spawn(self._list())
            version = await asyncio.shield(self._listing)
            if not self._closed and (self._watching is None or self._watching.done()):
                self._watching = asyncio.create_task(self._watch(version))

    async def _watch(self, version: str) -> None:
        """Follow all leases, whatever the API server does meanwhile."""
        pause = PAUSE_S[0]
        while True:
            try:
                async for kind, lease, at in self._api.watch(self._path, f"{HOLDER_LABEL}={self._holder}", version):
                    pause, version = PAUSE_S[0], at
                    if kind != "BOOKMARK":
                        self._seen(lease, gone=kind == "DELETED")
                pause = PAUSE_S[0]  # a quiet watch ends in time, and that is no failure
            except SandboxError as e:
                log.info("the watch on leases ended: %s", e)
                if isinstance(e, ApiError):  # too old a version, mostly
                    with contextlib.suppress(SandboxError):
                        version = await self._list()
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_S[1])

    async def _list(self) -> str:
        """Look at all leases; returns the version from which to watch."""
        known = {name for name, held in self._held.items() if held.uid}
        found = await self._api.call("GET", f"{self._path}?labelSelector={GROUP}%2Fholder%3D{self._holder}")
        for item in found["items"]:
            self._seen(item, gone=False)
        for name in known - {item["metadata"]["name"] for item in found["items"]}:
            if held := self._held.get(name):  # else we released it meanwhile
                held.end(LeaseLost, "is gone: somebody deleted it")
        return str(found["metadata"]["resourceVersion"])

    def _seen(self, lease: Mapping[str, Any], *, gone: bool) -> None:
        held = self._held.get(lease["metadata"]["name"])
        if held is None:
            return
        held.status = lease.get("status") or {}
        if gone or "deletionTimestamp" in lease["metadata"]:
            held.end(LeaseLost, "is gone: somebody deleted it")
        elif ending := _ending(held.status, due=time.monotonic() >= held.deadline):
            held.end(*ending)
        elif held.status.get("phase") == "Bound":
            held.bound.set()

    async def _renew(self, held: Held, pause: float) -> None:
        """Say that the holder lives, until the lease has ended. What fails is repeated sooner than it is due."""
        wait = pause
        while not held.ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(held.ended.wait(), wait)
                return
            now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            try:
                await self._api.call("PATCH", f"{self._path}/{held.name}", {"spec": {"renewed": now}})
                wait = pause
            except SandboxError as e:
                wait = min(pause, PAUSE_S[1])
                log.warning("lease %s could not be renewed: %s", held.name, e)

    async def _tell(self, name: str, patch: Mapping[str, Any]) -> None:
        """Write something that only statistics depend on."""
        try:
            await self._api.call("PATCH", f"{self._path}/{name}", patch)
        except SandboxError as e:
            log.info("lease %s: not told: %s", name, e)

    async def _delete(self, held: Held) -> None:
        """Delete a lease, however long that takes. Its name is nobody else's.

        A refusal need not last: an API server that has just started knows no roles yet. Nor need the absence of one
        whose creation was not answered: it may arrive after its deletion.
        """
        pause = PAUSE_S[0]
        while True:
            try:
                await self._api.call("DELETE", f"{self._path}/{held.name}")
                return
            except SandboxError as e:
                if isinstance(e, ApiError) and e.reason == "NotFound" and (held.uid or pause == PAUSE_S[1]):
                    return
                log.info("lease %s is not deleted yet: %s", held.name, e)
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_S[1])

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def unless_ended(held: Held, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or what the end of the lease means, whichever comes first."""
    task, ended = asyncio.ensure_future(work), asyncio.ensure_future(held.ended.wait())
    try:
        await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            held.check()
        return await task
    except SandboxDied:
        await asyncio.wait([ended], timeout=_REASON_S)
        held.check()
        raise
    finally:
        for each in (task, ended):
            each.cancel()
        await asyncio.gather(task, ended, return_exceptions=True)


def _ending(status: Mapping[str, Any], *, due: bool) -> tuple[type[SandboxError], str] | None:
    """What the operator's last word on a lease means to its holder; None while it goes on.

    Unless the holder's own deadline is past too, the time is not what an agent has used up: clocks differ, or the pod
    came late.
    """
    words = f"{status.get('reason')}: {status.get('message')}"
    match status.get("phase"), status.get("reason"):
        case "Expired", "DeadlinePassed" if due:
            return LeaseExpired, f"is past its deadline ({words}); take a new lease"
        case "Expired" | "Released", _:
            return LeaseLost, f"was taken away ({words}); take a new lease"
        case "Failed", "PodLost" | "PodEnded":
            return SandboxDied, f"has lost its pod ({words})"
        case "Failed", _:
            return SandboxError, f"was refused ({words})"
    return None
