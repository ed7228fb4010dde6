"""Which sandboxes a rollout takes, and that programs in them find what is served to them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from occamy.harness.adapters.launch import AdapterHarness
from occamy.harness.assignment import Programs
from occamy.harness.loading import load
from occamy.recipe import load_recipe
from occamy.rollout.backend import open_backend, programs_of, serving_address
from occamy.rollout.config import RolloutConfig, ServersConfig
from occamy.rollout.session import RolloutSession
from occamy.sandboxes.config import LocalSandboxConfig
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig
from occamy.sandboxes.protocol import Isolation, IsolationRefused

from .test_rollout_adapters import toy

PODS = KubernetesSandboxConfig(namespace="x")


def test_programs_are_this_machines_or_those_of_the_pods_image() -> None:
    assert programs_of(LocalSandboxConfig()) is None
    image = PODS.model_copy(update={"python": "/usr/bin/python3.11", "programs": "/opt/agents"})
    assert programs_of(image) == Programs("/usr/bin/python3.11", "/opt/agents")


@pytest.mark.parametrize(
    ("sandbox", "servers", "said"),
    [
        (PODS, {}, "proxy_port and tools_port have to be the ports that the network rule of the pool opens"),
        (PODS, {"host": "192.0.2.1", "proxy_port": 8100}, "proxy_port and tools_port have to be"),
        (
            PODS,
            {"proxy_port": 1, "tools_port": 2},
            "is 127.0.0.1, which the program of harness toy cannot reach",
        ),
        (PODS, {"host": "$POD_IP", "proxy_port": 1, "tools_port": 2}, r"host is \$POD_IP, and POD_IP is ''"),
        (LocalSandboxConfig(), {"host": "192.0.2.1"}, "cannot reach from a local sandbox; leave it at 127.0.0.1"),
    ],
)
def test_a_program_that_could_not_reach_what_is_served_is_refused(
    sandbox: Any, servers: dict[str, Any], said: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POD_IP", raising=False)
    config = RolloutConfig(context_limit=65536, sandbox=sandbox, servers=ServersConfig(**servers))
    harness = load(toy(tmp_path / "toy"))
    with pytest.raises(ValueError, match=said):
        RolloutSession(tmp_path / "s", checkpoint=checkpoint, engine_url="http://x", harness=harness, config=config)
    assert not (tmp_path / "s").exists()  # refused before anything is begun


def test_where_it_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    servers = ServersConfig(host="$POD_IP", proxy_port=8100, tools_port=8101)
    config = RolloutConfig(sandbox=PODS, servers=servers)
    program, service = load(toy(tmp_path / "toy")), load("accio_work")
    assert isinstance(program, AdapterHarness) and isinstance(service, AdapterHarness)
    assert serving_address(program, config) == "10.1.2.3"
    assert serving_address(load("react"), config) == "127.0.0.1"  # runs in this process
    assert serving_address(service, config.model_copy(update={"servers": ServersConfig()})) == "127.0.0.1"
    monkeypatch.setenv("POD_IP", "::")
    with pytest.raises(ValueError, match="POD_IP is '::'"):
        serving_address(program, config)
    for host in ("localhost", "0.0.0.0", "::1", ""):
        with pytest.raises(ValueError, match=f"'{host}' is no IPv4 address that can be called"):
            ServersConfig(host=host)


def test_the_recipe_of_the_page_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "sandboxes.md"
    local, pods = re.findall(r"^```yaml\n(rollout:\n.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert load_recipe(f"extends: laptop\nname: page\n{local}").rollout.sandbox.backend == "local"
    config = load_recipe(f"extends: laptop\nname: page\n{pods}").rollout
    assert (config.sandbox.backend, config.sandbox.minimum_isolation) == ("kubernetes", Isolation.gvisor)
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    assert config.servers.address() == "10.1.2.3"


def test_less_isolation_than_a_recipe_demands_is_refused(tmp_path: Path) -> None:
    for config in (
        PODS.model_copy(update={"minimum_isolation": Isolation.kata}),
        LocalSandboxConfig(minimum_isolation=Isolation.container),
    ):
        with pytest.raises(IsolationRefused, match="is required"):
            open_backend(config, tmp_path)
    assert open_backend(PODS, tmp_path).isolation is Isolation.container
