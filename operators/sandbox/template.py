"""What a sandbox pod is made from: its container, and the network around it."""

from __future__ import annotations

import ipaddress
import re
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from operators.sandbox.rules import Resource, Rule

Label = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")]
Quantity = Annotated[str, Field(max_length=20, pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Path = Annotated[str, Field(min_length=2, max_length=255, pattern=r"^(/[A-Za-z0-9_.-]+)+$")]
PINNED = "^[^@]+@sha256:[0-9a-f]{64}$|^([^@]*/)?[^@/:]+:[A-Za-z0-9_][A-Za-z0-9_.-]*$"
"""An image reference that names one build: by digest, or by a tag."""
Text = Annotated[str, Field(max_length=1024)]


def _is_network(value: str) -> str:
    ipaddress.ip_network(value)
    return value


Cidr = Annotated[str, Field(max_length=43, pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$"), AfterValidator(_is_network)]


class Isolation(StrEnum):
    """What stands between the agent and the node's kernel."""

    container = "container"
    """Namespaces, seccomp, no capabilities: the node's own kernel."""
    gvisor = "gvisor"
    """A kernel in user space."""
    kata = "kata"
    """A virtual machine."""


class Profile(StrEnum):
    """What a sandbox may connect to; nothing else, and no name server, is reachable."""

    none = "none"
    proxy_only = "proxy-only"
    allow_list = "allow-list"


class EnvVar(Resource):
    """An environment variable of the agent's container."""

    name: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: Annotated[str, Field(max_length=4096)] = ""


class Resources(Resource):
    """Limits of the container; requests equal them unless told otherwise. All defaults are ours."""

    cpu: Quantity = "1"
    memory: Quantity = "2Gi"
    ephemeral_storage: Quantity = "4Gi"
    """Disk of the container's logs, scratch folders and workspace together."""
    cpu_request: Quantity | None = None
    """Share of CPU that scheduling counts with; agents idle while the model thinks."""


class Scratch(Resource):
    """A writable folder that ends with the pod."""

    name: Label
    mount_path: Path
    size: Quantity
    """Disk beyond which the pod is evicted."""


class Template(Resource):
    """The pod that a pool keeps warm. Security settings are not choices: every pod is hardened the same way."""

    image: Annotated[str, Field(min_length=1, max_length=512)]
    """Pinned by a tag other than latest, or by digest."""
    command: Annotated[tuple[Text, ...], Field(max_length=32)] = ()
    """Starts the in-pod agent; the image's own entry point when empty."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = ()
    resources: Resources = Resources()
    isolation: Isolation = Isolation.container
    """Level that the profile demands; gvisor and kata need a runtime class."""
    runtime_class_name: Label | None = None
    volumes: Annotated[tuple[Scratch, ...], Field(max_length=16)] = ()
    workspace: Path = "/workspace"
    workspace_size: Quantity = "2Gi"
    port: Port = 8750
    """Where the in-pod agent serves; it answers GET /healthz once it does."""
    user: Annotated[int, Field(ge=1000, le=2**31 - 1)] = 10001
    """User and group of every process in the pod."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"self.image.matches('{PINNED}') && !self.image.endsWith(':latest')",
            "image must be pinned by a tag other than latest, or by digest",
            lambda s: re.search(PINNED, s.image) is not None and not s.image.endswith(":latest"),
        ),
        Rule(
            "self.isolation == 'container' || has(self.runtimeClassName)",
            "isolation gvisor and kata need runtimeClassName",
            lambda s: s.isolation is Isolation.container or s.runtime_class_name is not None,
        ),
    )


class Peer(Resource):
    """Who may be reached, or may reach in: pods by label, or a range of addresses."""

    pod_labels: Annotated[dict[str, LabelValue], Field(max_length=16)] | None = None
    namespace_labels: Annotated[dict[str, LabelValue], Field(max_length=16)] | None = None
    """Namespaces of those pods; the pool's own when absent."""
    cidr: Cidr | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.cidr) ? !has(self.podLabels) && !has(self.namespaceLabels)"
            " : has(self.podLabels) && size(self.podLabels) > 0",
            "a peer is either a cidr, or podLabels with or without namespaceLabels",
            lambda s: not s.pod_labels and s.namespace_labels is None if s.cidr is not None else bool(s.pod_labels),
        ),
    )


class Target(Peer):
    """A peer and the TCP ports that may be reached there."""

    ports: Annotated[tuple[Port, ...], Field(min_length=1, max_length=16)]

    rules: ClassVar[tuple[Rule, ...]] = (
        *Peer.rules,
        Rule("!(53 in self.ports)", "port 53 would open name servers to exfiltration", lambda s: 53 not in s.ports),
        Rule(
            "!has(self.cidr) || (self.cidr.matches('/([89]|[1-9][0-9]{1,2})$') && !self.cidr.startsWith('169.'))",
            "a cidr may not be wider than /8, nor in 169.0.0.0/8, where clouds hand out credentials to any pod",
            lambda s: s.cidr is None or (int(s.cidr.partition("/")[2]) >= 8 and not s.cidr.startswith("169.")),
        ),
    )


class HostName(Resource):
    """A name that resolves without a name server."""

    name: Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
    ip: Annotated[str, Field(max_length=39, pattern=r"^[0-9a-fA-F.:]+$")]


class Network(Resource):
    """The default-deny policy that every pod of the pool gets before its first process starts."""

    profile: Profile = Profile.proxy_only
    proxy: Target | None = None
    """The recording proxy."""
    allow: Annotated[tuple[Target, ...], Field(max_length=32)] = ()
    """What profile allow-list adds to the proxy."""
    clients: Annotated[tuple[Peer, ...], Field(max_length=16)] = ()
    """Who may call the in-pod agent; nobody when empty (the API server's exec still works)."""
    hosts: Annotated[tuple[HostName, ...], Field(max_length=32)] = ()
    """Names for what can be reached, since no name server can be."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.profile != 'proxy-only' || has(self.proxy)",
            "profile proxy-only needs network.proxy; profile none needs nothing",
            lambda s: s.profile is not Profile.proxy_only or s.proxy is not None,
        ),
        Rule(
            "self.profile != 'none' || !has(self.proxy)",
            "profile none reaches no proxy; leave network.proxy away",
            lambda s: s.profile is not Profile.none or s.proxy is None,
        ),
        Rule(
            "(self.profile == 'allow-list') == (has(self.allow) && size(self.allow) > 0)",
            "network.allow goes with profile allow-list, and that profile needs it",
            lambda s: (s.profile is Profile.allow_list) == bool(s.allow),
        ),
    )
