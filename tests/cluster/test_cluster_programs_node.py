"""Whole episodes of real agent programs, Hermes and OpenClaw, in real pods of the image that is for them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from occamy.contracts.episode import EpisodeRecord, Outcome, QuarantineReason
from occamy.contracts.task import TaskContract
from occamy.harness.adapters.launch import AdapterHarness
from occamy.rollout.admit import check_episode
from occamy.rollout.archive import open_archive
from occamy.rollout.config import RolloutConfig, ServersConfig
from occamy.rollout.session import RolloutSession
from occamy.rollout.trial import Sampler, play
from occamy.sandboxes.kubernetes.backend import KubernetesBackend
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig
from occamy.synthesis.author import Slot
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.variants import write_task
from operators.sandbox.hardening import violations
from tests.rollout.agent_programs import installed, job, patient, with_long_files
from tests.rollout.open_vocabulary import write_tokenizer
from tests.rollout.test_rollout_openclaw import Marathon
from tests.rollout.written_policy import WrittenPolicy

from .cluster import Cluster, eventually
from .daemons import free_port
from .node import NodeCluster, load_built
from .pod_processes import tenant
from .pod_usage import Usage
from .sandbox_world import World, install

pytestmark = [pytest.mark.node, pytest.mark.timeout(900)]

PAGE = (Path(__file__).parents[2] / "docs" / "sandboxes.md").read_text()
POOL = yaml.safe_load(re.findall(r"^```yaml\n(apiVersion: .*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0])
"""The pool that the page gives these programs."""
IMAGE = f"localhost/{POOL['spec']['template']['image']}"


@pytest.fixture(scope="module")
def world(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A namespace with an operator and that pool, which may reach this machine."""
    manager = node_cluster.manager
    if not isinstance(manager, NodeCluster):
        pytest.skip("loads an image that was built here; on a cluster of yours, try as docs/sandboxes.md says")
    load_built(manager, IMAGE)
    install(node_cluster)
    with node_cluster.namespace("programs") as namespace:
        started = World(node_cluster, namespace, tmp_path_factory.mktemp("programs"))
        started.start()
        proxy = {"cidr": f"{manager.gateway}/32", "ports": [free_port(), free_port()]}
        template = POOL["spec"]["template"] | {"image": IMAGE}
        started.pool("programs", template=template, network={"proxy": proxy}, warm=2, max=6)
        started.ready("programs", 2)
        yield started
        assert started.operator is not None
        started.operator.stop(10)


@pytest.fixture(scope="module")
def config(world: World) -> RolloutConfig:
    """In pods, as a tenant. Pods reach this machine at the address that all of them have for it."""
    pool = world.read("sandboxpools", "programs")
    assert pool is not None
    proxy = pool["spec"]["network"]["proxy"]
    proxy_port, tools_port = proxy["ports"]
    return RolloutConfig(
        context_limit=65536,
        max_new_tokens=2048,
        concurrency=1,
        sandbox=KubernetesSandboxConfig(
            namespace=world.namespace, kubeconfig=tenant(world.cluster, world.namespace), pool="programs", route="agent"
        ),
        servers=ServersConfig(host=proxy["cidr"].partition("/")[0], proxy_port=proxy_port, tools_port=tools_port),
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What prompts of real programs need."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def task() -> TaskContract:
    """A task whose reference reads and writes files."""
    task = write_task(Slot("train", "long", 7), SynthesisConfig(fault_share=0.0), 7)
    assert task.world.files and {"file_write", "file_read"} <= {c.name for c in task.grading.reference}
    return patient(task)


def rolled_out(
    task: TaskContract, harness: AdapterHarness, tokenizer: Path, folder: Path, config: RolloutConfig
) -> EpisodeRecord:
    """The episode of the oracle."""
    sampler = Sampler(tokenizer, "oracle")
    [record] = play([task], harness, sampler, folder, config, trials=1, seed=1, on_record=lambda record: None)
    return record


@pytest.mark.parametrize("name", ["hermes", "openclaw"])
def test_a_whole_episode_in_a_pod_is_that_of_this_machine(
    name: str,
    world: World,
    config: RolloutConfig,
    task: TaskContract,
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    harness = installed(name)
    here = config.model_copy(update={"sandbox": RolloutConfig().sandbox, "servers": ServersConfig()})
    local = rolled_out(task, harness, tokenizer, tmp_path / "here", here)
    with Usage(world.cluster.manager) as usage:
        pod = rolled_out(task, harness, tokenizer, tmp_path / "pod", config)
    for record in (local, pod):
        assert (record.error, record.outcome, record.quarantine, record.score) == ("", Outcome.completed, None, 1.0)
    same = (local.final_fingerprint, local.harness_digest, local.steps, local.tool_calls, local.output_tokens)
    assert (pod.final_fingerprint, pod.harness_digest, pod.steps, pod.tool_calls, pod.output_tokens) == same
    [recorded] = open_archive(tmp_path / "pod" / "sealed")
    assert check_episode(recorded) == []
    eventually(lambda: world.list("sandboxleases") == [])
    with capsys.disabled():
        seconds = f"{local.wall_seconds:.1f} s on this machine, {pod.wall_seconds:.1f} s in a pod with {usage}"
        print(f"\n{name}: an episode takes {seconds}", end="")


def test_openclaw_compacts_within_what_a_pod_allows_by_default(
    world: World, config: RolloutConfig, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its workers reserve far more memory than they fill."""
    harness = installed("openclaw")
    task = with_long_files(write_task(Slot("train", "short", 0), SynthesisConfig(), 7))
    policy = WrittenPolicy(tokenizer)
    policy.write = marathon = Marathon(task)
    with (
        Usage(world.cluster.manager) as usage,
        RolloutSession(
            tmp_path / "s", checkpoint=tokenizer, engine_url=policy.url, harness=harness, config=config
        ) as session,
    ):
        [result] = session.stream([job(task, "m")], 1)
    policy.close()
    record = result.record
    assert (record.error, record.outcome, record.quarantine, record.success) == ("", Outcome.completed, None, True)
    assert marathon.finished and marathon.summaries >= 2
    with capsys.disabled():
        print(f"\nopenclaw: {marathon.summaries} compactions take {usage}", end="")


@pytest.mark.parametrize("name", ["hermes", "openclaw"])
def test_another_version_and_a_missing_program_are_infrastructure(
    name: str, config: RolloutConfig, task: TaskContract, tokenizer: Path, tmp_path: Path
) -> None:
    harness = installed(name)
    there = harness.adapter.version
    harness.adapter = harness.adapter.model_copy(update={"version": "1.2.3"})
    elsewhere = config.model_copy(update={"sandbox": config.sandbox.model_copy(update={"programs": "/opt"})})
    for folder, used, found in (
        ("other", config, f"version {there} in /opt/harnesses/{name}"),
        ("none", elsewhere, f"no such program in /opt/{name}"),
    ):
        record = rolled_out(task, harness, tokenizer, tmp_path / folder, used)
        assert (record.outcome, record.quarantine) == (Outcome.infra_failed, QuarantineReason.infra_failed)
        assert f"the sandbox has {found}, the adapter is for 1.2.3" in record.error


def test_their_pods_are_hardened_and_may_reach_the_proxy_alone(world: World, config: RolloutConfig) -> None:
    world.ready("programs", 2)
    pods = [pod["spec"] for pod in world.list("pods") if "deletionTimestamp" not in pod["metadata"]]
    assert pods and [fault for pod in pods for fault in violations(pod)] == []
    servers = config.servers
    ports = [{"port": number, "protocol": "TCP"} for number in (servers.proxy_port, servers.tools_port)]
    egress = [{"to": [{"ipBlock": {"cidr": f"{servers.host}/32"}}], "ports": ports}]
    policies = world.list("networkpolicies")
    assert policies and all(policy["spec"]["egress"] == egress for policy in policies)

    async def said(script: str) -> str:
        assert isinstance(config.sandbox, KubernetesSandboxConfig)
        backend = KubernetesBackend(config.sandbox)
        sandbox = await backend.lease("programs", "owner", 60.0)
        done = await sandbox.exec(["sh", "-c", script])
        await sandbox.release()
        await backend.close()
        return done.stdout.decode()

    writable = "find / -type d -writable -not -path '/proc/*' -prune 2>/dev/null | sort"
    found = asyncio.run(said(f"id -u; {writable}; ls -d /run/secrets /var/run/secrets")).split()
    assert found == ["10001", "/dev/mqueue", "/dev/shm", "/tmp", "/workspace"]
