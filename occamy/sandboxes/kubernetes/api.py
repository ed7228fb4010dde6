"""The API server as a tenant sees it: credentials from the kubernetes client, calls, watches and streams by aiohttp."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from occamy.sandboxes.protocol import SandboxError

MERGE = "application/merge-patch+json"
_WATCH_S = 30
"""Seconds after which a watch is opened anew: one that was cut off without a word tells of no pod. Our choice."""
_SILENCE_S = 10.0
"""How much longer than that an API server may be silent."""
_LINE_BYTES = 4 << 20  # an object of at most 1.5 MiB, as JSON
PAUSE_S = (0.2, 5.0)
"""Before the API server is asked again after a failure: at first, and at most. Our choice."""
CONFLICT = "Conflict"
"""Reason of a refusal to make an object when its quota was changed each time that it was counted. Nothing was made."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class ApiError(SandboxError):
    """The API server said no. `status` is the HTTP status, `reason` its word for why: NotFound, AlreadyExists …"""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class ApiDown(SandboxError):
    """The API server did not answer, or answered that it cannot: what was asked may have happened or not."""


async def patiently(ask: Callable[[], Awaitable[T]], seconds: float) -> T:
    """What `ask` returns, asked again for so long while the API server is away, busy, or counting a quota anew.

    One that comes back knows no accounts and roles yet, so 401 and 403 are asked about again if it was away.
    """
    until, pause, away = time.monotonic() + seconds, PAUSE_S[0], False
    while True:
        try:
            return await ask()
        except (ApiDown, ApiError) as e:
            away = away or isinstance(e, ApiDown)
            passes = isinstance(e, ApiDown) or e.reason == CONFLICT or (away and e.status in (401, 403))
            if not passes or time.monotonic() + pause > until:
                raise
            log.info("asked again in %.1f s: %s", pause, e)
        await asyncio.sleep(pause)
        pause = min(2 * pause, PAUSE_S[1])


class Api:
    """A session with one API server."""

    def __init__(self, credentials: Any, seconds: float) -> None:
        """`credentials` is a kubernetes.client.Configuration. Belongs to the running event loop."""
        self._config, self._seconds = credentials, seconds
        self._server = str(credentials.host).rstrip("/")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=_ssl_context(credentials), keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=seconds),
            read_bufsize=_LINE_BYTES,
        )

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request; a PATCH is a merge patch. Raises ApiError, ApiDown."""
        headers = {**await self._headers(), "Content-Type": MERGE if method == "PATCH" else "application/json"}
        data = None if body is None else json.dumps(body).encode()
        try:
            async with self._session.request(
                method, self._server + path, data=data, headers=headers, allow_redirects=False
            ) as response:
                text = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise ApiDown(f"{method} {path}: {_words(e)}") from e
        if response.status >= 300:
            raise _failure(f"{method} {path}", response.status, text)
        return _object(f"{method} {path}", text)

    async def watch(self, path: str, selector: str, version: str) -> AsyncIterator[tuple[str, dict[str, Any], str]]:
        """Type, object and version of each event since a version, until the API server ends the watch.

        Raises ApiError (410: list again), ApiDown.
        """
        query = {
            "watch": "true",
            "labelSelector": selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_WATCH_S + _SILENCE_S)
        headers = await self._headers()
        try:
            async with self._session.get(
                self._server + path, params=query, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    raise _failure(f"watch {path}", response.status, await response.read())
                async for line in response.content:
                    event = json.loads(line)
                    kind, said = event["type"], event["object"]
                    if kind == "ERROR":
                        raise ApiError(said.get("code", 0), said.get("reason", ""), said.get("message", ""))
                    yield kind, said, said["metadata"]["resourceVersion"]
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError, AttributeError) as e:
            raise ApiDown(f"watch {path}: {_words(e)}") from e

    async def stream(self, path: str, query: list[tuple[str, str]]) -> aiohttp.ClientWebSocketResponse:
        """A websocket in the API server's channel protocol. Raises ApiError, ApiDown."""
        try:
            return await self._session.ws_connect(
                self._server + path,
                params=query,
                headers=await self._headers(),
                protocols=("v4.channel.k8s.io",),
                max_msg_size=0,
                heartbeat=30.0,
            )
        except aiohttp.WSServerHandshakeError as e:
            raise ApiError(e.status, "", f"{path}: {e.status} {e.message}") from e
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise ApiDown(f"{path}: {_words(e)}") from e

    async def _headers(self) -> dict[str, str]:
        """Who we are; a token may have to be renewed first, which may run a program. Raises ApiDown."""
        try:
            async with asyncio.timeout(self._seconds):
                token = await asyncio.to_thread(self._config.get_api_key_with_prefix, "authorization")
        except Exception as e:  # whatever reading a file, or running that program, comes to
            raise ApiDown(f"no credentials: {_words(e)}") from e
        return {"Authorization": token} if token else {}


def find_credentials(kubeconfig: Path | None, context: str | None) -> Any:
    """A kubernetes.client.Configuration. Reads files, and may run a program that the kubeconfig names.

    Raises SandboxError without the kubernetes client, or without credentials.
    """
    try:
        from kubernetes import client, config  # type: ignore[import-untyped]
    except ModuleNotFoundError as e:
        raise SandboxError(
            f"sandboxes in a cluster need the kubernetes client ({e}); install the extra kubernetes"
        ) from e
    found = client.Configuration()
    try:
        if kubeconfig is None and context is None:
            try:
                config.load_incluster_config(client_configuration=found)
                return found
            except config.ConfigException:
                pass  # not in a pod
        config.load_kube_config(
            config_file=str(kubeconfig) if kubeconfig else None, context=context, client_configuration=found
        )
    except (config.ConfigException, OSError) as e:
        at = kubeconfig or "KUBECONFIG or ~/.kube/config"
        raise SandboxError(f"no credentials for a cluster in {at} ({e}); set sandbox.kubeconfig, or KUBECONFIG") from e
    return found


def _ssl_context(found: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=found.ssl_ca_cert)
    if found.cert_file:
        context.load_cert_chain(found.cert_file, found.key_file)
    if not found.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _object(what: str, text: bytes) -> dict[str, Any]:
    """The object that an API server answers with. Raises ApiDown for what others do, such as a proxy's page."""
    try:
        found: dict[str, Any] = json.loads(text)
        found["apiVersion"]
    except (ValueError, LookupError, TypeError) as e:
        raise ApiDown(f"{what}: no API server answers so: {text[:300].decode(errors='replace')}") from e
    return found


def _failure(what: str, status: int, text: bytes) -> SandboxError:
    try:
        answer = json.loads(text)
        reason, said = answer.get("reason", ""), answer.get("message", "")
    except (ValueError, AttributeError):
        reason, said = "", text[:300].decode(errors="replace")
    words = f"{what}: {status} {said}"
    return ApiDown(words) if status < 400 or status >= 500 or status == 429 else ApiError(status, reason, words)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
