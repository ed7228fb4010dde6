"""docs/install.md says what the manifests say."""

from __future__ import annotations

import re
import textwrap

import yaml

from occamy import __version__

from .rendering import COMPONENTS, OVERLAYS, ROOT, of_kind, overlay
from .validation import problems

PAGE = (ROOT / "docs" / "install.md").read_text()


def table(first: str) -> dict[str, list[str]]:
    """Rows of the table whose first heading is `first`, by the name in their first cell."""
    rows = PAGE.partition(f"| {first} |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name.strip("`"): rest for name, *rest in cells}


def test_overlays_and_components_are_all_described() -> None:
    described = table("overlay")
    assert sorted(described) == OVERLAYS
    assert sorted(table("component")) == COMPONENTS
    for name, (_, listed) in described.items():
        used = yaml.safe_load((ROOT / "kustomize" / "overlays" / name / "kustomization.yaml").read_text())
        assert re.findall("`(.+?)`", listed) == [c.rpartition("/")[2] for c in used.get("components", ())]


def test_every_image_is_described() -> None:
    named = {name for row in table("image") for name in re.findall("occamy-[a-z-]+", row)}
    assert named == {f"occamy-{f.parent.name}" for f in (ROOT / "images").glob("*/Dockerfile")} | {"occamy-trainer-gpu"}


def test_the_pools_are_as_large_as_it_says() -> None:
    largest = {n: max(p["spec"]["max"] for p in of_kind(overlay(n), "SandboxPool")) for n in ("kind", "production")}
    assert largest == {"kind": 6, "production": 400}
    assert "six sandboxes at most" in PAGE
    assert "400 at most" in PAGE


def test_the_lease_to_try_is_valid_and_names_a_pool_that_is_there() -> None:
    lease = yaml.safe_load(textwrap.dedent(PAGE.partition("<<'END'\n")[2].partition("    END")[0]))
    assert problems(lease) == []
    assert lease["spec"]["pool"] in [p["metadata"]["name"] for p in of_kind(overlay("kind"), "SandboxPool")]


def test_the_pool_for_agent_programs_is_valid_and_like_the_one_that_is_shipped() -> None:
    page = (ROOT / "docs" / "sandboxes.md").read_text()
    [text] = re.findall(r"^```yaml\n(apiVersion: .*?)^```", page, re.DOTALL | re.MULTILINE)
    pool = yaml.safe_load(text)
    assert problems(pool) == [] and pool["spec"]["template"].pop("image") == f"occamy-harnesses:{__version__}"
    shipped, _ = yaml.safe_load_all((ROOT / "manifests" / "sandboxes" / "pool.yaml").read_text())
    shipped["spec"]["template"].pop("image")
    assert pool["spec"] == shipped["spec"]
