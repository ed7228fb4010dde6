"""What every sandbox pod must be, checked on the finished object before it is sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HOST = ("hostNetwork", "hostPID", "hostIPC")
_VOLUMES = {"name", "emptyDir", "secret"}
_LIMITS = ("cpu", "memory", "ephemeral-storage")


class NotHardened(ValueError):
    """A pod that was about to be created breaks a guarantee: a fault of the operator, never of its users."""


def violations(spec: Mapping[str, Any]) -> list[str]:
    """Every way in which a pod specification is weaker than a sandbox may be. Empty for one that is hardened."""
    context = spec.get("securityContext", {})
    found = [f"{field} is on" for field in _HOST if spec.get(field)]
    found += [] if spec.get("automountServiceAccountToken") is False else ["a service account token is mounted"]
    found += [] if context.get("runAsNonRoot") is True else ["it may run as root"]
    found += (
        [] if context.get("seccompProfile", {}).get("type") == "RuntimeDefault" else ["seccomp is not RuntimeDefault"]
    )
    found += [] if spec.get("dnsPolicy") == "None" else ["it asks the cluster's name server"]
    found += [] if "activeDeadlineSeconds" in spec else ["it has no deadline"]
    found += [f"volume {v['name']} is of the node" for v in spec.get("volumes", ()) if set(v) - _VOLUMES]
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind, ()):
            found += [f"{container['name']}: {words}" for words in _weak(container)]
    return found


def _weak(container: Mapping[str, Any]) -> list[str]:
    context = container.get("securityContext", {})
    limits = container.get("resources", {}).get("limits", {})
    capabilities = context.get("capabilities", {})
    checks = {
        "privileged": context.get("privileged"),
        "may gain privileges": context.get("allowPrivilegeEscalation") is not False,
        "its root is writable": context.get("readOnlyRootFilesystem") is not True,
        "keeps capabilities": capabilities.get("drop") != ["ALL"] or capabilities.get("add"),
        "runs as another user than the pod": "runAsUser" in context or context.get("runAsNonRoot") is False,
        "has another seccomp profile": "seccompProfile" in context,
    }
    found = [words for words, weak in checks.items() if weak]
    found += [f"has no limit of {name}" for name in _LIMITS if not limits.get(name)]
    return found + [
        f"publishes port {p['hostPort']} of the node" for p in container.get("ports", ()) if p.get("hostPort")
    ]


def require_hardened(pod: Mapping[str, Any]) -> None:
    """Raise NotHardened, naming the pod and every weakness."""
    if found := violations(pod["spec"]):
        raise NotHardened(f"pod {pod['metadata']['name']} would not be hardened: {'; '.join(found)}")
