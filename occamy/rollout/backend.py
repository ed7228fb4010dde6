"""What a rollout acts on: the sandbox backend of its configuration, and whether agent programs find their way there."""

from __future__ import annotations

import hashlib
import os
import tempfile
from ipaddress import IPv4Address
from pathlib import Path

from occamy.harness.adapters.launch import AdapterHarness
from occamy.harness.assignment import Harness, Programs
from occamy.rollout.config import RolloutConfig, SandboxConfig
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig
from occamy.sandboxes.local import LocalBackend
from occamy.sandboxes.protocol import SandboxBackend

_MEMORY_FOLDER = Path("/dev/shm")


def open_backend(config: SandboxConfig, folder: Path) -> SandboxBackend:
    """The backend for a session in `folder`. Raises IsolationRefused when it gives less than `config` demands."""
    if isinstance(config, KubernetesSandboxConfig):
        from occamy.sandboxes.kubernetes.backend import KubernetesBackend

        return KubernetesBackend(config)
    return LocalBackend(_sandbox_root(folder), config)


def programs_of(config: SandboxConfig) -> Programs | None:
    """Agent programs that the sandboxes have of their own; None where they see those of this machine."""
    return Programs(config.python, config.programs) if isinstance(config, KubernetesSandboxConfig) else None


def serving_address(harness: Harness, config: RolloutConfig) -> str:
    """Where to serve model and tools. Raises ValueError when the harness's program cannot reach that.

    A composition runs in this process, and nobody else is served.
    """
    if not isinstance(harness, AdapterHarness):
        return "127.0.0.1"
    host, pods = config.servers.address(), isinstance(config.sandbox, KubernetesSandboxConfig)
    if not harness.in_sandbox:
        return host
    if pods and not (config.servers.proxy_port and config.servers.tools_port):
        raise ValueError(
            "rollout.servers.proxy_port and tools_port have to be the ports that the network rule of the pool opens; "
            "set both, such as 8100 and 8101"
        )
    if IPv4Address(host).is_loopback is pods:
        fix = "name an address of this machine or pod, such as $POD_IP" if pods else "leave it at 127.0.0.1"
        raise ValueError(
            f"rollout.servers.host is {host}, which the program of harness {harness.adapter.name} cannot reach from "
            f"a {config.sandbox.backend} sandbox; {fix}"
        )
    return host


def _sandbox_root(folder: Path) -> Path:
    """A folder in memory that belongs to this session folder alone; what a killed session left is found by name."""
    base = _MEMORY_FOLDER if os.access(_MEMORY_FOLDER, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"occamy-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}"
