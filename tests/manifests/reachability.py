"""Says what NetworkPolicies mean, by the rules of networking.k8s.io/v1: may one end open a connection to another?

A connection needs both: egress of its source, where a policy isolates that, and ingress of its target likewise.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Policy = Mapping[str, Any]


@dataclass(frozen=True)
class End:
    """A pod, or an address that is no pod's when it has no namespace."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "10.244.0.9"


def reaches(source: End, target: End, port: int, policies: list[Policy], protocol: str = "TCP") -> bool:
    """Whether `source` may open a connection to `port` of `target`."""
    return _lets(source, target, port, protocol, policies, "Egress") and _lets(
        target, source, port, protocol, policies, "Ingress"
    )


def _lets(own: End, other: End, port: int, protocol: str, policies: list[Policy], direction: str) -> bool:
    """Whether the policies on one end let the other in, or the end out to it."""
    on = [p for p in policies if _isolates(p, own, direction)]
    peers = "from" if direction == "Ingress" else "to"
    rules = [(rule, p["metadata"]["namespace"]) for p in on for rule in p["spec"].get(direction.lower()) or ()]
    return not on or any(
        _on_port(rule.get("ports"), port, protocol) and _is_peer(rule.get(peers), other, home) for rule, home in rules
    )


def _isolates(policy: Policy, end: End, direction: str) -> bool:
    spec = policy["spec"]
    kinds = spec.get("policyTypes") or (["Ingress", "Egress"] if "egress" in spec else ["Ingress"])
    return (
        direction in kinds
        and policy["metadata"]["namespace"] == end.namespace
        and selects(spec["podSelector"], end.labels)
    )


def _on_port(ports: list[Mapping[str, Any]] | None, port: int, protocol: str) -> bool:
    if not ports:
        return True
    return any(
        p.get("protocol", "TCP") == protocol
        and ("port" not in p or _number(p["port"]) <= port <= _number(p.get("endPort", p["port"])))
        for p in ports
    )


def _number(port: int | str) -> int:
    if isinstance(port, str):
        raise ValueError(f"port {port!r}: ours are numbers; a name means what each pod says")
    return port


def _is_peer(peers: list[Mapping[str, Any]] | None, other: End, home: str) -> bool:
    return not peers or any(_matches(peer, other, home) for peer in peers)


def _matches(peer: Mapping[str, Any], other: End, home: str) -> bool:
    if block := peer.get("ipBlock"):
        inside = [ipaddress.ip_network(net) for net in (block["cidr"], *block.get("except", ()))]
        at = ipaddress.ip_address(other.address)
        return at in inside[0] and not any(at in net for net in inside[1:])
    if not other.namespace:
        return False
    spaces = peer.get("namespaceSelector")
    in_space = other.namespace == home if spaces is None else selects(spaces, other.namespace_labels)
    return in_space and selects(peer.get("podSelector", {}), other.labels)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects; an empty one selects everything."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    return all(_holds(e, labels.get(e["key"])) for e in selector.get("matchExpressions", ()))


def _holds(expression: Mapping[str, Any], value: str | None) -> bool:
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case other:
            raise ValueError(f"{other}: no operator of a label selector")
