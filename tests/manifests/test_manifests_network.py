"""Who may reach whom, by the policies of each overlay and by those that the operator makes for sandboxes.

No network plugin that enforces policies can be had where these tests run; what is tested is what the policies mean.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from .ends import OUTSIDE, ends_and_policies
from .reachability import End, Policy, reaches
from .rendering import OVERLAYS, overlay

ROWS = """
sandbox         rollout              8100  yes
sandbox         team rollout         8100  yes
sandbox         rollout              8101  yes
sandbox         rollout              8102  no
sandbox         impostor             8100  no
sandbox         stage                8100  no
sandbox         api server            443  no
sandbox         api server           6443  no
sandbox         dns                    53  no
sandbox         sandbox 2            8750  no
sandbox         grader               8750  no
sandbox         operator             8080  no
sandbox         mlflow               5000  no
sandbox         internet              443  no
sandbox         cloud credentials      80  no
rollout         sandbox              8750  yes
rollout         sandbox                22  no
rollout         grader               8750  yes
team rollout    sandbox              8750  yes
team pod        sandbox              8750  no
impostor        sandbox              8750  no
stranger        sandbox              8750  no
stage           sandbox              8750  no
operator        sandbox              8750  no
prometheus      sandbox              8750  no
grader          rollout              8100  no
grader          sandbox              8750  no
grader          api server            443  no
grader          dns                    53  no
grader          mlflow               5000  no
grader          internet              443  no
grader          cloud credentials      80  no
unknown         internet              443  no
rollout         unknown                80  no
rollout         api server            443  yes
rollout         dns                    53  yes
rollout         mlflow               5000  yes
stage           rollout              8100  no
stage           rollout              8101  no
stranger        rollout              8100  no
team rollout    rollout              8100  no
operator        api server            443  yes
operator        api server           6443  yes
operator        dns                    53  yes
operator        internet              443  yes
operator        internet               80  no
operator        mlflow               5000  no
stranger        operator             8080  no
retraining      dns                    53  {s3}
retraining      internet              443  {s3}
retraining      internet               80  no
stranger        retraining           8080  no
prometheus      operator             8080  {monitoring}
"""
"""What holds in every overlay. 443 is open to all addresses where the API server is: policies cannot name it."""

GPU_ROWS = """
rollout         router              30000  yes
team rollout    router              30000  yes
team pod        router              30000  no
stage           router              30000  no
sandbox         router              30000  no
sandbox         engine              30000  no
rollout         engine              30000  yes
router          engine              30000  yes
stranger        engine              30000  no
impostor        engine              30000  no
impostor        router              30000  no
router          api server            443  yes
router          internet              443  yes
router          internet               80  no
engine          dns                    53  no
engine          internet              443  no
engine          api server            443  no
"""


def rows(text: str, **known: str) -> dict[tuple[str, str, int], bool]:
    """Source, target, port, and whether it may."""
    found = {}
    for line in text.strip().format(**known).splitlines():
        source, target, port, says = re.split(r"\s{2,}", line)
        found[source, target, int(port)] = {"yes": True, "no": False}[says]
    return found


@pytest.mark.parametrize("name", OVERLAYS)
def test_everybody_reaches_what_it_should_and_nothing_else(name: str) -> None:
    ends, policies = ends_and_policies(overlay(name))
    full = "no" if name == "kind" else "yes"
    expected = rows(ROWS, s3=full, monitoring=full) | (rows(GPU_ROWS) if name != "kind" else {})
    found = {
        (a, b, port): reaches(ends[a], ends[b], port, policies, "UDP" if port == 53 else "TCP")
        for a, b, port in expected
    }
    assert {row: may for row, may in found.items() if may != expected[row]} == {}


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_sandbox_reaches_two_ports_of_rollouts_in_all_the_cluster(name: str) -> None:
    ends, policies = ends_and_policies(overlay(name))
    ports = [22, 53, 80, 443, 2379, 5000, 6443, 8080, 8100, 8101, 8102, 8750, 9000, 10250, 30000]
    cases = [(end, port, how) for end in ends for port in ports for how in ("TCP", "UDP")]
    reached = [c for c in cases if reaches(ends["sandbox"], ends[c[0]], c[1], policies, c[2])]
    both = [(end, port, "TCP") for end in ("rollout", "team rollout") for port in (8100, 8101)]
    assert sorted(reached) == both
    assert [c for c in cases if reaches(ends["grader"], ends[c[0]], c[1], policies, c[2])] == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_pod_of_ours_but_stages_is_isolated_both_ways(name: str) -> None:
    ends, policies = ends_and_policies(overlay(name))
    ours = set(ends) - set(OUTSIDE) - {"stage", "rollout"}
    anybody = dataclasses.replace(OUTSIDE["stranger"], labels={})
    assert {end for end in ours if reaches(anybody, ends[end], 1, policies)} == set()
    assert {end for end in ours if reaches(ends[end], anybody, 1, policies)} == set()


def policy(spec: dict[str, Any], namespace: str = "a") -> Policy:
    return {"metadata": {"namespace": namespace, "name": "p"}, "spec": spec}


WEB = End("a", {"app": "web"}, {"team": "one"}, "10.0.0.5")
DB = End("b", {"app": "db"}, {"team": "two"}, "10.0.1.5")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"podSelector": {}}, True),  # ingress only, by default
        ({"podSelector": {}, "policyTypes": ["Egress"]}, False),
        ({"podSelector": {}, "egress": []}, False),
        ({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]}, True),
        ({"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Egress"]}, True),
        *(
            ({"podSelector": {}, "policyTypes": ["Egress"], "egress": [rule]}, may)
            for rule, may in (
                ({"to": [{"podSelector": {}}]}, False),  # of the policy's own namespace
                ({"to": [{"namespaceSelector": {}}]}, True),
                ({"to": [{"namespaceSelector": {"matchLabels": {"team": "one"}}}]}, False),
                ({"to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}}}]}, False),
                ({"to": [{"namespaceSelector": {}}, {"podSelector": {"matchLabels": {"app": "web"}}}]}, True),
                ({"to": [{"ipBlock": {"cidr": "10.0.0.0/16"}}]}, True),
                ({"to": [{"ipBlock": {"cidr": "10.0.0.0/16", "except": ["10.0.1.0/24"]}}]}, False),
                ({"ports": [{"port": 5432}]}, True),
                ({"ports": [{"port": 5432, "protocol": "UDP"}]}, False),
                ({"ports": [{"port": 5000, "endPort": 6000}]}, True),
                ({"ports": [{"port": 5433, "endPort": 6000}]}, False),
                ({"ports": [{"protocol": "TCP"}]}, True),
                ({"to": [{"namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "Exists"}]}}]}, True),
                (
                    {
                        "to": [
                            {
                                "namespaceSelector": {
                                    "matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["two"]}]
                                }
                            }
                        ]
                    },
                    False,
                ),
            )
        ),
    ],
)
def test_what_a_policy_means(spec: dict[str, Any], expected: bool) -> None:
    assert reaches(WEB, DB, 5432, [policy(spec)]) is expected
    assert reaches(WEB, DB, 5432, [policy(spec, "c")]), "a policy holds in its own namespace alone"


def test_both_ends_have_to_agree_and_policies_add_up() -> None:
    closed = policy({"podSelector": {}, "policyTypes": ["Ingress"]}, "b")
    opened = policy({"podSelector": {}, "ingress": [{"from": [{"namespaceSelector": {}}]}]}, "b")
    assert not reaches(WEB, DB, 1, [closed])
    assert reaches(WEB, DB, 1, [closed, opened])
    assert not reaches(End(), DB, 1, [closed, opened]), "an address is in no namespace"
    assert not reaches(WEB, DB, 1, [opened, policy({"podSelector": {}, "policyTypes": ["Egress"]})])
