"""Sandboxes in real pods: the contract, both ways to their agents, what a command can do there, grading apart."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import json
import random
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from kubernetes import client
from kubernetes.stream import stream

from occamy.contracts.episode import Outcome
from occamy.sandboxes.grading import ExportChanged, Grader, grade_apart
from occamy.sandboxes.kubernetes.backend import KubernetesBackend, KubernetesSandbox
from occamy.sandboxes.kubernetes.config import KubernetesSandboxConfig
from occamy.sandboxes.protocol import Sandbox, SandboxDied
from tests.sandboxes.contract import LIMITS, PROMISES, Ground

from .cluster import Cluster, eventually
from .daemons import PATIENCE_S
from .node import NodeCluster
from .pod_processes import PATIENT, tenant
from .python_image import AGENT, USER, python_image
from .sandbox_world import World, install

pytestmark = pytest.mark.node

IMAGE, GRADER_IMAGE = "localhost/sandbox-python:1", "localhost/grader-python:1"
GRADER_FILE = "/opt/grader/grade.py"
GRADE = b"""
import json, pathlib, sys
answer = pathlib.Path("answer.txt").read_text().strip()
print(json.dumps({"score": int(answer == "42"), "files": sorted(p.name for p in pathlib.Path(".").iterdir())}))
"""
SMALL = {"cpu": "500m", "cpuRequest": "20m", "memory": "256Mi", "ephemeralStorage": "256Mi"}
CLOSED = {"profile": "none"}


@pytest.fixture(scope="module")
def world(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A namespace with an operator, a pool of agents' pods and one of graders'."""
    manager = node_cluster.manager
    if not isinstance(manager, NodeCluster):
        pytest.skip("needs images that are made here; on a cluster of yours use those of images/")
    folder = tmp_path_factory.mktemp("pods")
    busybox = manager.assets.program("busybox")
    manager.load_image(str(python_image(busybox, folder / "agents.tar", IMAGE, {})))
    manager.load_image(str(python_image(busybox, folder / "graders.tar", GRADER_IMAGE, {GRADER_FILE: GRADE})))
    install(node_cluster)
    with node_cluster.namespace("pods") as namespace:
        started = World(node_cluster, namespace, folder)
        started.start()
        template = {"image": IMAGE, "resources": SMALL, "workspaceSize": "200Mi"}
        started.pool("pool", template=template, warm=2, max=6, network=CLOSED)
        started.pool("graders", template=template | {"image": GRADER_IMAGE}, warm=1, max=2, network=CLOSED)
        started.ready("pool", 2)
        started.ready("graders", 1)
        yield started
        assert started.operator is not None
        started.operator.stop(10)


@pytest.fixture(scope="module")
def settings(world: World) -> KubernetesSandboxConfig:
    """A tenant's, who may also use pods/exec."""
    kubeconfig = tenant(world.cluster, world.namespace)
    rule = {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get", "create"]}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "exec"}
    subject = {"kind": "ServiceAccount", "name": "tenant", "namespace": world.namespace}
    api = client.RbacAuthorizationV1Api(world.cluster.client())
    api.create_namespaced_role(world.namespace, {"metadata": {"name": "exec"}, "rules": [rule]})
    binding = {"metadata": {"name": "exec"}, "roleRef": role, "subjects": [subject]}
    api.create_namespaced_role_binding(world.namespace, binding)
    return KubernetesSandboxConfig(
        namespace=world.namespace, kubeconfig=kubeconfig, limits=LIMITS, route="agent", **PATIENT
    )


def within(
    settings: KubernetesSandboxConfig, body: Callable[[KubernetesBackend], Awaitable[None]], **changes: Any
) -> None:
    """Run a body with a backend of its own."""

    async def run() -> None:
        backend = KubernetesBackend(settings.model_copy(update=changes))
        try:
            await body(backend)
        finally:
            await backend.close()

    asyncio.run(run())


def agent_pid(world: World, pod: str) -> int:
    """The agent's process id on this machine."""
    uid = (world.read("pods", pod) or {})["metadata"]["uid"]
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            mine = AGENT.encode() in line.read_bytes() and uid in (line.parent / "cgroup").read_text()
            status = (line.parent / "status").read_text()
        except OSError:
            continue
        if mine and status.partition("NSpid:")[2].partition("\n")[0].split()[-1] == "1":
            return int(line.parent.name)
    raise LookupError(f"pod {pod} has no agent on this machine")


@pytest.mark.parametrize("promise", PROMISES)
def test_a_pod_keeps_its_promise(promise: str, world: World, settings: KubernetesSandboxConfig) -> None:
    @contextmanager
    def squeeze(sandbox: Sandbox, size: int) -> Iterator[None]:
        assert isinstance(sandbox, KubernetesSandbox)
        agent = agent_pid(world, sandbox.pod)
        _limit_files(agent, str(size))
        try:
            yield
        finally:
            _limit_files(agent, "unlimited")

    async def body(backend: KubernetesBackend) -> None:
        await PROMISES[promise](Ground(backend, squeeze))

    within(settings, body)


def _limit_files(pid: int, size: str) -> None:
    """Set the soft limit of a running agent, as its own user may."""
    alike = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "prlimit", "--pid", str(pid)]
    subprocess.run([*alike, f"--fsize={size}:"], check=True)


def test_through_pods_exec_the_same_bytes_come_and_go(world: World, settings: KubernetesSandboxConfig) -> None:
    data = random.Random(3).randbytes(30 << 20)

    async def body(backend: KubernetesBackend) -> None:
        sandbox = await backend.lease("pool", "owner", 600.0)
        assert sandbox.route == "exec"
        done = await sandbox.exec(["sh", "-c", "cat; printf '\\377' >&2; exit 3"], stdin=b"\x00\xff\n")
        assert (done.exit_code, done.stdout, done.stderr) == (3, b"\x00\xff\n", b"\xff")
        await sandbox.write("blob", data)
        assert hashlib.sha256(await sandbox.read("blob")).digest() == hashlib.sha256(data).digest()
        await sandbox.exec(["sh", "-c", "(setsid sh -c 'while :; do echo x >> ticks; done' >/dev/null 2>&1 &)"])
        running = asyncio.create_task(sandbox.exec(["sh", "-c", "while :; do echo x >> more; sleep 0.02; done"]))
        while not (await sandbox.exec(["ls"])).stdout.count(b"more"):
            await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await _settled(sandbox, "more")
        await sandbox.freeze()
        frozen = await sandbox.snapshot()
        await asyncio.sleep(0.3)
        assert await sandbox.snapshot() == frozen
        await sandbox.release()

    within(settings, body, route="exec")


async def _settled(sandbox: Sandbox, path: str) -> None:
    before = b""
    while (now := await sandbox.read(path)) != before:
        before = now
        await asyncio.sleep(0.2)


def test_an_agent_whose_address_is_cut_off_is_reached_through_pods_exec(
    world: World, settings: KubernetesSandboxConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    dial = asyncio.open_connection

    async def cut_off(*address: Any, **options: Any) -> Any:
        if address:
            raise TimeoutError("the packets are dropped")
        return await dial(*address, **options)

    monkeypatch.setattr(asyncio, "open_connection", cut_off)

    async def body(backend: KubernetesBackend) -> None:
        sandbox = await backend.lease("pool", "owner", 600.0)
        assert sandbox.route == "exec" and (await sandbox.exec(["echo", "on"])).stdout == b"on\n"
        await sandbox.release()

    async def nowhere(backend: KubernetesBackend) -> None:
        with pytest.raises(SandboxDied, match=r"nothing answers at [0-9.]+:8750: the packets are dropped"):
            await backend.lease("pool", "owner", 600.0)

    within(settings, body, route="auto")
    within(settings, nowhere, route="agent")


def test_what_a_command_can_do_in_its_pod(world: World, settings: KubernetesSandboxConfig) -> None:
    async def body(backend: KubernetesBackend) -> None:
        sandbox = await backend.lease("pool", "owner", 600.0)

        async def says(script: str) -> str:
            done = await sandbox.exec(["sh", "-c", f"{{ {script}; }} 2>&1"])
            return done.stdout.decode()

        assert await says("id -u; id -g") == f"{USER}\n{USER}\n"
        status = await says("cat /proc/self/status")
        assert "NoNewPrivs:\t1" in status and "CapEff:\t0000000000000000" in status and "Seccomp:\t2" in status
        assert AGENT in await says("tr '\\0' ' ' < /proc/1/cmdline")
        assert await says("kill -9 1; kill -STOP 1; echo sent") == "sent\n"  # the first of its namespace is immune
        for secret in ("environ", "mem", "maps", "fd/"):
            assert "denied" in await says(f"cat /proc/1/{secret} || ls /proc/1/{secret}")
        token = world.read("secrets", _lease(world, sandbox)["status"]["tokenSecret"])
        assert token is not None
        assert _decoded(token) not in await says("env; cat /proc/*/environ /proc/*/cmdline")
        for place in ("/", "/opt/occamy", "/usr/bin", "/etc", "/run/occamy"):
            assert "Read-only file system" in await says(f"touch {place}/planted")
        assert "No such file" in await says("ls /var/run/secrets/kubernetes.io")
        assert await says("cat /proc/1/stat | cut -d' ' -f3") in ("S\n", "R\n")
        await sandbox.release()

    within(settings, body)


def _lease(world: World, sandbox: Sandbox) -> dict[str, Any]:
    return next(lease for lease in world.list("sandboxleases") if lease["metadata"]["uid"] == sandbox.id)


def _decoded(secret: dict[str, Any]) -> str:
    return base64.b64decode(secret["data"]["token"]).decode()


def test_freeze_ends_what_came_in_from_outside_as_well(world: World, settings: KubernetesSandboxConfig) -> None:
    """`kubectl exec` into the pod: a process that is no child of the agent."""

    async def body(backend: KubernetesBackend) -> None:
        sandbox = await backend.lease("pool", "owner", 600.0)
        script = "cd /workspace; i=0; while :; do i=$((i+1)); echo $i > counter; done"
        session = await asyncio.to_thread(
            stream, client.CoreV1Api(world.cluster.client()).connect_get_namespaced_pod_exec, sandbox.pod,
            world.namespace, command=["sh", "-c", script], stdout=True, stderr=True, _preload_content=False,
        )  # fmt: skip
        while not (await sandbox.exec(["ls"])).stdout.count(b"counter"):
            await asyncio.sleep(0.05)
        await sandbox.freeze()
        frozen = await sandbox.snapshot()
        await asyncio.sleep(0.3)
        assert await sandbox.snapshot() == frozen
        await asyncio.to_thread(session.run_forever, timeout=PATIENCE_S)
        assert session.returncode == 137
        await sandbox.release()

    within(settings, body)


def test_a_pod_that_is_deleted_under_a_command_is_an_infrastructure_fault(
    world: World, settings: KubernetesSandboxConfig
) -> None:
    async def body(backend: KubernetesBackend) -> None:
        sandbox = await backend.lease("pool", "owner", 600.0)
        running = asyncio.create_task(sandbox.exec(["sleep", "600"], timeout_s=600.0))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(world.delete, "pods", sandbox.pod)
        with pytest.raises(SandboxDied) as caught:
            await asyncio.wait_for(running, PATIENCE_S)
        assert caught.value.outcome is Outcome.infra_failed
        await sandbox.release()

    within(settings, body)
    eventually(lambda: world.list("sandboxleases") == [])


CHEAT = """
mkdir -p opt/grader .occamy
echo 'print({"score": 1})' > grade.py; cp grade.py opt/grader/; cp grade.py json.py; cp grade.py pathlib.py
echo '{"fingerprint": "sha256:0", "score": 1}' > manifest.json; cp manifest.json .occamy/; cp manifest.json result.json
mkdir -p /opt/grader && cp grade.py /opt/grader/grade.py; ln -s /opt/grader/grade.py link.py
(setsid env -i sh -c 'i=0; while :; do i=$((i+1)); echo $i > score; done' >/dev/null 2>&1 &)
"""


def test_grading_is_apart_from_an_agent_that_cheats(world: World, settings: KubernetesSandboxConfig) -> None:
    recorded = Grader(
        argv=("python3", "-I", GRADER_FILE),
        files=(GRADER_FILE,),
        digest=f"sha256:{hashlib.sha256(GRADE).hexdigest()}",  # of the asset itself, before any rollout
    )

    async def body(backend: KubernetesBackend) -> None:
        agent = await backend.lease("pool", "e1", 600.0)
        await agent.write("answer.txt", b"41\n")
        assert b"Read-only" in (await agent.exec(["sh", "-c", CHEAT])).stderr
        assert (await agent.exec(["ls", GRADER_FILE])).exit_code != 0  # never in an agent's pod
        while b"score" not in (await agent.exec(["ls"])).stdout.split():
            await asyncio.sleep(0.05)
        await agent.freeze()
        export = await agent.snapshot()
        first = await grade_apart(backend, "graders", "e1", export, recorded, 600.0)
        assert await agent.snapshot() == export  # nothing has moved meanwhile
        pods = {p["metadata"]["name"]: p for p in world.list("pods")}
        await agent.release()
        again = await grade_apart(backend, "graders", "e1", export, recorded, 600.0)
        assert first.stdout == again.stdout
        said = json.loads(first.stdout)
        assert said["score"] == 0
        assert {"manifest.json", "grade.py", "json.py", "score"} <= set(said["files"])
        edited = dataclasses.replace(export, archive=export.archive.replace(b'"score": 1', b'"score": 2'))
        with pytest.raises(ExportChanged):
            await grade_apart(backend, "graders", "e1", edited, recorded, 600.0)
        for pod in pods.values():
            assert all(set(v) - {"name"} <= {"emptyDir", "secret"} for v in pod["spec"]["volumes"])
        policies = world.list("networkpolicies")
        assert policies and all(p["spec"]["policyTypes"] == ["Ingress", "Egress"] for p in policies)
        assert not any(p["spec"].get("egress") or p["spec"].get("ingress") for p in policies)

    within(settings, body)


def test_the_first_command_with_the_agent_and_through_pods_exec(
    world: World, settings: KubernetesSandboxConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """From asking for a lease on a warm pool to the first command's output: by turns, under the same load."""
    routes: tuple[Literal["agent", "exec"], ...] = ("agent", "exec")
    leased: dict[str, list[float]] = {route: [] for route in routes}
    first: dict[str, list[float]] = {route: [] for route in routes}

    async def body(backend: KubernetesBackend) -> None:
        other = KubernetesBackend(settings.model_copy(update={"route": "exec"}))
        for turn in range(9):
            for route, used in zip(routes, (backend, other)):
                await asyncio.to_thread(world.ready, "pool", 2)
                began = time.monotonic()
                sandbox = await used.lease("pool", "owner", 600.0)
                bound = time.monotonic()
                assert sandbox.route == route
                assert (await sandbox.exec(["echo", "1"])).stdout == b"1\n"
                if turn:  # the first opens the backend's watch
                    leased[route].append(bound - began)
                    first[route].append(time.monotonic() - began)
                await sandbox.release()
        await other.close()

    within(settings, body)
    with capsys.disabled():
        for route in routes:
            figures = [f(each[route]) * 1000 for each in (leased, first) for f in (statistics.median, min)]
            words = "lease {:.0f} ms (best {:.0f}), lease and first command {:.0f} ms (best {:.0f})"
            print(f"\n{route}: {words.format(*figures)}", end="")
