"""What a tenant has to be allowed to do, asked of the API server before episodes are begun."""

from __future__ import annotations

import asyncio

from occamy.sandboxes.kubernetes.api import Api
from occamy.sandboxes.kubernetes.leases import GROUP
from occamy.sandboxes.protocol import SandboxError

LEASES = frozenset((GROUP, "sandboxleases", verb) for verb in ("create", "get", "list", "watch", "patch", "delete"))
TOKENS = frozenset({("", "secrets", "get")})
EXEC = frozenset(("", "pods/exec", verb) for verb in ("get", "create"))
"""Which of the two is asked for depends on the API server's version; only where pods are not reached themselves."""


async def check_rights(api: Api, namespace: str, *, through_exec: bool) -> None:
    """Raise SandboxError naming every right that is missing in the namespace."""
    rights = sorted(LEASES | TOKENS | (EXEC if through_exec else frozenset()))
    given = await asyncio.gather(*(_allowed(api, namespace, *right) for right in rights))
    missing = [f"{verb} {resource}" for (_, resource, verb), allowed in zip(rights, given, strict=True) if not allowed]
    if missing:
        raise SandboxError(
            f"namespace {namespace}: not allowed to {', '.join(missing)}; bind the ClusterRole occamy-sandbox-tenant "
            "there to whoever rolls out, or correct rollout.sandbox.namespace"
        )


async def _allowed(api: Api, namespace: str, group: str, resource: str, verb: str) -> bool:
    kind, _, subresource = resource.partition("/")
    asked = {"namespace": namespace, "group": group, "resource": kind, "subresource": subresource, "verb": verb}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    answer = await api.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
    return bool(answer["status"]["allowed"])
