"""Kubernetes Events about our resources, posted when something changes, off the path that leases wait on."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

from operators.sandbox.api import Api, ApiError, Unclear, path
from operators.sandbox.models import GROUP, VERSION
from operators.sandbox.views import Lease, Pool, moment

COMPONENT = "occamy-sandbox-operator"
_WAITING = 1000
"""Events beyond which the newest are dropped: they inform, nothing depends on them."""
_LATER_S = 0.5
"""A first event waits so long, behind the claims that came with it. Our choice."""

log = logging.getLogger(__name__)


class Events:
    """A bounded queue of events and the task that posts them."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._queue: asyncio.Queue[tuple[str, Mapping[str, Any]]] = asyncio.Queue(_WAITING)

    def post(self, kind: str, about: Pool | Lease, reason: str, message: str, *, warning: bool) -> None:
        """Have an event posted about one of our resources."""
        now = moment(time.time())[:19] + "Z"
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{about.name[:200]}.{secrets.token_hex(6)}", "namespace": about.namespace},
            "involvedObject": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": kind,
                "name": about.name,
                "namespace": about.namespace,
                "uid": about.uid,
            },
            "reason": reason,
            "message": message,
            "type": "Warning" if warning else "Normal",
            "source": {"component": COMPONENT},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            self._queue.put_nowait((about.namespace, body))
        except asyncio.QueueFull:
            log.warning("event dropped", extra={"reason": reason, "object": about.name})

    async def work(self) -> None:
        """Post events until cancelled."""
        while True:
            if self._queue.empty():
                first = await self._queue.get()
                await asyncio.sleep(_LATER_S)
                await self._post(*first)
            else:
                await self._post(*self._queue.get_nowait())

    async def _post(self, namespace: str, body: Mapping[str, Any]) -> None:
        try:
            await self._api.call("POST", path("events", namespace), body)
        except (ApiError, Unclear) as e:
            log.warning("event not posted", extra={"reason": body["reason"], "error": str(e)})
