"""The few calls to the API server that the operator makes, with failures told apart by what they mean for a write."""

from __future__ import annotations

import dataclasses
import json
import os
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp
import kopf

from operators.sandbox.models import GROUP, VERSION

_TIMEOUT_S = 15.0
"""For one call. Our choice."""
_CONNECTIONS = 32
MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """The API server said no. Nothing was written."""

    def __init__(self, status: int, reason: str, message: str, retry_s: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message, self.retry_s = status, reason, message, retry_s


class NotFound(ApiError):
    """No such object."""


class Conflict(ApiError):
    """The object is not the version or the UID that was meant."""


class Exists(ApiError):
    """The name is taken."""


class Refused(ApiError):
    """Quota, validation or permission: the same request will be refused again."""


class Unclear(Exception):
    """There was no answer, or none that tells: the write may or may not have happened, or may yet happen."""


class Login(NamedTuple):
    """Where the API server is, and who we are."""

    server: str
    headers: Mapping[str, str]
    tls: ssl.SSLContext


class Api:
    """A session with the API server as the operator's own identity."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._login: Login | None = None

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """One request; a PATCH is a merge patch. Raises ApiError and its kinds, Unclear."""
        login = self._logged_in()
        answer = await self._once(login, method, path, body, query)
        if answer[0] == 401:  # tokens of service accounts are renewed on disk
            if self._login is login:  # else another call has read it
                self._login = None
            answer = await self._once(self._logged_in(), method, path, body, query)
        status, headers, text = answer
        if status < 400:
            found: dict[str, Any] = json.loads(text)
            return found
        raise failure(status, text, headers.get("Retry-After"))

    async def _once(
        self, login: Login, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str] | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        data = None if body is None else json.dumps(body).encode()
        headers = {**login.headers, "Content-Type": MERGE if method == "PATCH" else "application/json"}
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=_CONNECTIONS, keepalive_timeout=60)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
        try:
            async with self._session.request(
                method, login.server + path, data=data, headers=headers, params=query, ssl=login.tls
            ) as response:
                return response.status, response.headers, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise Unclear(f"{method} {path}: {type(e).__name__}: {e}") from e

    def _logged_in(self) -> Login:
        """The session outlives logins: closing it would cancel every caller that waits for a connection."""
        if self._login is None:
            info = connection()
            self._login = Login(info.server.rstrip("/"), info.as_http_headers(), info.as_ssl_context())
        return self._login


def connection() -> kopf.ConnectionInfo:
    """How to reach the API server: as the pod's service account, or by KUBECONFIG. Raises kopf.LoginError."""
    settings = kopf.OperatorSettings()
    if info := kopf.login_with_service_account(settings=settings):
        return dataclasses.replace(info, server=server_of(os.environ) or info.server)
    if info := kopf.login_with_kubeconfig(settings=settings):
        return info
    raise kopf.LoginError("neither a service account is mounted nor does KUBECONFIG name a file")


def server_of(environment: Mapping[str, str]) -> str:
    """The API server's address as every pod is told it, which needs no DNS; kopf takes a name. Empty without."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""


def failure(status: int, text: bytes, retry_after: str | None) -> Exception:
    """What an answer of 400 and above means."""
    try:
        said = json.loads(text)
    except ValueError:
        said = {}
    said = said if isinstance(said, dict) else {}
    reason, message = said.get("reason", ""), said.get("message", text[:300].decode(errors="replace"))
    if status >= 500:
        return Unclear(f"{status} {reason}: {message}")
    if status == 429:
        return ApiError(status, reason, message, float(retry_after) if retry_after and retry_after.isdecimal() else 1.0)
    kinds = {404: NotFound, 403: Refused, 422: Refused, 400: Refused}
    kind = kinds.get(status, ApiError)
    if status == 409:
        kind = Exists if reason == "AlreadyExists" else Conflict
    return kind(status, reason, message)


def path(kind: str, namespace: str | None = None, name: str | None = None, sub: str | None = None) -> str:
    """URL path of a kind by its plural, of an object, of a subresource."""
    roots = {
        "pods": "/api/v1",
        "secrets": "/api/v1",
        "events": "/api/v1",
        "networkpolicies": "/apis/networking.k8s.io/v1",
        "sandboxtemplates": "/apis/extensions.agents.x-k8s.io/v1beta1",
        "sandboxwarmpools": "/apis/extensions.agents.x-k8s.io/v1beta1",
        "sandboxclaims": "/apis/extensions.agents.x-k8s.io/v1beta1",
        "sandboxes": "/apis/agents.x-k8s.io/v1beta1",
    }
    root = roots.get(kind, f"/apis/{GROUP}/{VERSION}")
    parts = [root, *(("namespaces", namespace) if namespace else ()), kind, *(p for p in (name, sub) if p)]
    return "/".join(parts)
