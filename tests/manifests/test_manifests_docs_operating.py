"""docs/threat-model.md, operating.md and troubleshooting.md say what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig
from operators.sandbox.models import PoolSpec
from operators.sandbox.plan_lease import RETENTION_S
from operators.sandbox.plan_pool import RETRY_S
from operators.sandbox.pods import HOLD_S
from operators.sandbox.sizing import demands

from .ends import OUTSIDE, ends_and_policies
from .reachability import reaches
from .rendering import ROOT, overlay

DOCS = ROOT / "docs"
PAGES = [DOCS / name for name in ("install.md", "operating.md", "threat-model.md", "troubleshooting.md")]
TROUBLE = (DOCS / "troubleshooting.md").read_text()


def rows(page: str, begins: str) -> list[list[str]]:
    """Cells of the table whose head begins so, without the head."""
    table = (DOCS / page).read_text().partition(begins)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_table_of_sizes_is_what_the_command_prints() -> None:
    expected = []
    for name in ("kind", "production"):
        expected.append([f"**{name}**", *[""] * 6])
        expected += [[d.name, *d.row().removeprefix(d.name).split()] for d in demands(overlay(name))]
    assert rows("operating.md", "| | pods |") == expected


def test_the_table_of_connections_is_what_the_policies_mean() -> None:
    ends, policies = ends_and_policies(overlay("production"))
    names = {"any other pod of `occamy-sandboxes`": "unknown", "scheduled retraining": "retraining"}
    ports = [22, 53, 80, 443, 5000, 6443, 8080, 8100, 8101, 8750, 10250, 30000]
    for source, cell in rows("threat-model.md", "| from |"):
        end = ends[names.get(source, source)]
        said = set() if cell == "nothing" else set(cell.split(", "))
        anywhere = {p for p in ports if reaches(end, OUTSIDE["internet"], p, policies)}
        found = {f"any address {p}" for p in anywhere}
        for target in ends:
            for port in set(ports) - anywhere:
                if reaches(end, ends[target], port, policies, "UDP" if port == 53 else "TCP"):
                    found.add(f"{target} {port}")
        assert found == said, source


def reasons(*modules: str) -> set[str]:
    """Words in CamelCase that the operator may give as a reason."""
    found = set()
    for module in modules:
        for node in ast.walk(ast.parse((ROOT / "operators" / "sandbox" / module).read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"^(?:[A-Z][a-z]+){2,}$", node.value))
    return found


def test_every_reason_of_the_operator_is_explained() -> None:
    kinds = {"SandboxClaim", "SandboxLease", "SandboxPool", "SandboxTemplate", "SandboxWarmPool"}
    of_deletions = {"HeldTwice", "LeaseDeleted", "LeaseEnded", "ScaledDown"}
    given = reasons("plan_lease.py", "plan_pool.py", "pods.py", "agent_sandbox.py") - kinds - of_deletions
    assert {"AtMax", "DeadlinePassed", "QuotaExceeded", "LaunchRefused"} <= given
    assert {reason for reason in given if reason not in TROUBLE} == set()


@pytest.mark.parametrize(
    ("words", "file"),
    [
        ("no complete list of the cluster for", "operators/sandbox/health.py"),
        ("has owed a change for", "operators/sandbox/health.py"),
        ("resync failed", "operators/sandbox/resync.py"),
        ("the cluster cannot be listed yet", "operators/sandbox/resync.py"),
        ("reconcile failed", "operators/sandbox/reconcile.py"),
        ("serves on port", "occamy/sandboxes/kubernetes/agent.py"),
        ("no credentials for a cluster", "occamy/sandboxes/kubernetes/api.py"),
        ("no way to the agent of pod", "occamy/sandboxes/kubernetes/backend.py"),
        ("got no pod in", "occamy/sandboxes/kubernetes/backend.py"),
    ],
)
def test_what_programs_are_said_to_say_they_say(words: str, file: str) -> None:
    assert words in TROUBLE
    assert words in (ROOT / file).read_text()


def test_figures_are_those_of_the_code() -> None:
    fields = KubernetesSandboxConfig.model_fields
    for name in ("bind_seconds", "connect_seconds"):
        assert re.search(
            rf"sandbox\.{name}` \({fields[name].default:g}\)|`{name}` \({fields[name].default:g}\)", all_text()
        )
    assert f"stays for {RETENTION_S / 60:g} minutes" in TROUBLE
    assert f"retried every {RETRY_S:g} s" in TROUBLE
    assert f"tried again every {HOLD_S:g} s" in TROUBLE
    assert f"`startSeconds` ({PoolSpec.model_fields['start_seconds'].default})" in TROUBLE
    assert f"`batch` ({PoolSpec.model_fields['batch'].default})" in all_text()


def all_text() -> str:
    return "\n".join(page.read_text() for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        other = (page.parent / name) if name else page
        assert other.exists(), target
        heads = [
            re.sub("[^a-z0-9 -]", "", h.lower()).strip().replace(" ", "-")
            for h in re.findall(r"^#+ (.+)$", other.read_text(), re.M)
        ]
        assert not anchor or anchor in heads, target
    for path in re.findall(r"`((?:manifests|kustomize|tests|images|operators)/[A-Za-z0-9_./*-]+)`", text):
        assert list(ROOT.glob(path.rstrip("/"))), path
    for field in re.findall(r"`rollout\.sandbox\.([a-z_]+)`", text):
        assert field in KubernetesSandboxConfig.model_fields, field
