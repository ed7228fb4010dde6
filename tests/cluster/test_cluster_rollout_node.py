"""Whole episodes in real pods: a composition, the agent program of docs/harnesses.md, and pods that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from occamy.capture.sealed import read_sealed
from occamy.contracts.episode import EpisodeRecord, Outcome, QuarantineReason
from occamy.contracts.task import Budget, TaskContract
from occamy.engines.local.launch import launch_engine
from occamy.harness.assignment import Harness
from occamy.harness.loading import load
from occamy.nano.base import base_checkpoint
from occamy.rollout.admit import check_episode, replay_versions
from occamy.rollout.archive import open_archive
from occamy.rollout.config import RolloutConfig, ServersConfig
from occamy.rollout.jobs import EpisodeJob, make_jobs
from occamy.rollout.oracle import OracleTeacher
from occamy.rollout.sample import sample_episodes
from occamy.rollout.session import RolloutSession
from occamy.rollout.trial import Sampler, play
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig
from occamy.synthesis.author import Slot
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.variants import write_task
from tests.rollout.test_rollout_adapters import toy

from .cluster import Cluster, eventually
from .daemons import free_port
from .node import NodeCluster
from .pod_processes import tenant
from .python_image import python_image
from .sandbox_world import World, install
from .test_cluster_sandbox_node import SMALL, agent_pid

pytestmark = pytest.mark.node

IMAGE = "localhost/rollout-python:1"
FILES = (4, 5, 7)
"""Long tasks of seed 7 whose reference reads or writes files, or that begin with one."""
PATIENT = Budget(turns=30, tool_calls=30, tokens=10_000, wall_seconds=200.0)


@pytest.fixture(scope="module")
def world(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A namespace with an operator and a pool of two warm pods, which may reach this machine."""
    manager = node_cluster.manager
    if not isinstance(manager, NodeCluster):
        pytest.skip("needs an image that is made here; on a cluster of yours use those of images/")
    folder = tmp_path_factory.mktemp("rollouts")
    manager.load_image(str(python_image(manager.assets.program("busybox"), folder / "agents.tar", IMAGE, {})))
    install(node_cluster)
    with node_cluster.namespace("rollouts") as namespace:
        started = World(node_cluster, namespace, folder)
        started.start()
        proxy = {"proxy": {"cidr": f"{manager.gateway}/32", "ports": [free_port(), free_port()]}}
        template = {"image": IMAGE, "resources": SMALL, "workspaceSize": "200Mi"}
        started.pool("cowork", template=template, warm=2, max=6, network=proxy)
        started.ready("cowork", 2)
        yield started
        assert started.operator is not None
        started.operator.stop(10)


@pytest.fixture(scope="module")
def config(world: World) -> RolloutConfig:
    """In pods, as a tenant. Pods reach this machine at the address that all of them have for it."""
    manager = world.cluster.manager
    assert isinstance(manager, NodeCluster)
    pool = world.read("sandboxpools", "cowork")
    assert pool is not None
    proxy_port, tools_port = pool["spec"]["network"]["proxy"]["ports"]
    return RolloutConfig(
        context_limit=65536,
        max_new_tokens=512,
        concurrency=2,
        sandbox=KubernetesSandboxConfig(
            namespace=world.namespace, kubeconfig=tenant(world.cluster, world.namespace), route="agent"
        ),
        servers=ServersConfig(host=manager.gateway, proxy_port=proxy_port, tools_port=tools_port),
    )


def tasks_with_files() -> list[TaskContract]:
    tasks = [write_task(Slot("train", "long", n), SynthesisConfig(fault_share=0.0), 7) for n in FILES]
    assert any(t.world.files for t in tasks)
    assert {"file_write", "file_read"} <= {c.name for t in tasks for c in t.grading.reference}
    return [t.model_copy(update={"meta": t.meta.model_copy(update={"budget": PATIENT})}) for t in tasks]


def rolled_out(harness: Harness, folder: Path, config: RolloutConfig) -> list[EpisodeRecord]:
    """Episodes of the oracle."""
    sampler = Sampler(base_checkpoint(), "oracle")
    return play(tasks_with_files(), harness, sampler, folder, config, trials=1, seed=1, on_record=lambda record: None)


@pytest.mark.parametrize("name", ["react", "toy"])
def test_whole_episodes_in_pods_are_those_of_this_machine(
    name: str, world: World, config: RolloutConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = load(toy(tmp_path / "toy") if name == "toy" else name)
    here = config.model_copy(update={"sandbox": RolloutConfig().sandbox, "servers": ServersConfig()})
    local, pods = rolled_out(harness, tmp_path / "here", here), rolled_out(harness, tmp_path / "pods", config)
    for record in (*local, *pods):
        assert (record.outcome, record.quarantine, record.score, record.success) == (Outcome.completed, None, 1.0, True)
    same = {r.episode_id: (r.final_fingerprint, r.harness_digest, r.steps, r.output_tokens) for r in local}
    assert {r.episode_id: (r.final_fingerprint, r.harness_digest, r.steps, r.output_tokens) for r in pods} == same
    archive = open_archive(tmp_path / "pods" / "sealed")
    assert len(archive.records) == len(FILES) and [f for one in archive for f in check_episode(one)] == []
    eventually(lambda: world.list("sandboxleases") == [])
    seconds = [statistics.median(r.wall_seconds for r in records) for records in (local, pods)]
    with capsys.disabled():
        print("\n{}: an episode takes {:.2f} s on this machine, {:.2f} s in a pod".format(name, *seconds), end="")


def test_what_a_policy_sampled_for_an_episode_in_a_pod_replays_token_by_token(
    config: RolloutConfig, tmp_path: Path
) -> None:
    base = base_checkpoint()
    small = config.model_copy(update={"context_limit": 1024, "max_new_tokens": 48})
    sample_episodes(tasks_with_files()[:2], base, tmp_path / "sealed", small, trials=1, seed=1, model="base")
    sealed = read_sealed(tmp_path / "sealed", "episodes")
    assert [r.quarantine for r in sealed.records] == [None, None] and all(r.output_tokens for r in sealed.records)
    assert [f for one in open_archive(tmp_path / "sealed") for f in check_episode(one)] == []
    with launch_engine(base, max_running=4) as engine:
        assert replay_versions(sealed.segments, url=engine.url) == []


class Killer(OracleTeacher):
    """Kills the pod of the episode before it answers its third call."""

    def __init__(self, world: World) -> None:
        super().__init__(0.0)
        self._world, self._calls = world, 0

    async def complete(self, episode_id: str, request: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        if self._calls == 3:
            await asyncio.to_thread(self._kill, episode_id)
        return await super().complete(episode_id, request)

    def _kill(self, episode_id: str) -> None:
        leases = self._world.list("sandboxleases")
        [pod] = [lease["status"]["pod"] for lease in leases if lease["spec"]["owner"]["episode"] == episode_id]
        os.kill(agent_pid(self._world, pod), signal.SIGKILL)


@pytest.mark.parametrize("name", ["react", "toy"])
def test_a_pod_that_is_killed_in_the_middle_is_infrastructure_and_runs_again(
    name: str, world: World, config: RolloutConfig, tmp_path: Path
) -> None:
    harness = load(toy(tmp_path / "toy") if name == "toy" else name)
    task = tasks_with_files()[-1]
    assert [c.name for c in task.grading.reference].index("file_write") >= 2  # a tool call meets the dead pod
    [job] = make_jobs([task], trials=1, seed=1, sampled_by="teacher", temperature=0.0, model="oracle")

    def attempt(teacher: OracleTeacher) -> tuple[EpisodeRecord, list[Any]]:
        return _attempt(job, teacher, harness, tmp_path / "s", config)

    record, findings = attempt(Killer(world))
    assert (record.outcome, record.quarantine) == (Outcome.infra_failed, QuarantineReason.infra_failed)
    assert "SandboxDied" in record.error and (record.success, record.final_fingerprint) == (False, "")
    assert findings == []
    record, findings = attempt(OracleTeacher(0.0))  # resumed: that says nothing about the attempt
    assert (record.outcome, record.score, findings) == (Outcome.completed, 1.0, [])
    eventually(lambda: world.list("sandboxleases") == [])


def _attempt(
    job: EpisodeJob, teacher: OracleTeacher, harness: Harness, folder: Path, config: RolloutConfig
) -> tuple[EpisodeRecord, list[Any]]:
    teacher.enrol(job)
    with RolloutSession(
        folder, checkpoint=base_checkpoint(), engine_url=None, harness=harness, config=config, teacher=teacher
    ) as session:
        [result] = session.stream([job], 1)
        return result.record, list(check_episode(session.recorded(job.episode_id)))
