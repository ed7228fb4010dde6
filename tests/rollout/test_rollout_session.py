"""Rollout sessions against the real engine, and against engines that die, fail, or never let the agent finish."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from occamy.capture.sealed import read_sealed
from occamy.contracts.episode import Outcome, QuarantineReason
from occamy.contracts.manifest import SealError
from occamy.contracts.release import load_release
from occamy.contracts.task import TaskContract
from occamy.engines.local.launch import launch_engine
from occamy.harness.agent import ComposedHarness
from occamy.harness.compose import resolve
from occamy.harness.loading import load
from occamy.rollout.config import RolloutConfig
from occamy.rollout.jobs import EpisodeJob, make_jobs
from occamy.rollout.sample import sample_episodes
from occamy.rollout.session import RolloutSession, RolloutStopped, SessionError

CONFIG = RolloutConfig(concurrency=4, max_new_tokens=16, hold_seconds=30)
IMPATIENT = ComposedHarness(
    resolve({"name": "i", "middleware": [{"kind": "budgets"}, {"kind": "retry", "backoff_seconds": 0.001}]})
)


def jobs_of(release: Path, count: int, trials: int = 1, sampled_by: Any = "policy") -> list[EpisodeJob]:
    tasks = load_release(release).select(pool="short")[:count]
    return list(make_jobs(tasks, trials=trials, seed=1, sampled_by=sampled_by, temperature=1.0, model="random"))


def session(
    folder: Path, checkpoint: Path, url: str | None, config: RolloutConfig = CONFIG, **more: Any
) -> RolloutSession:
    harness = more.pop("harness", None) or load("react")
    return RolloutSession(folder, checkpoint=checkpoint, engine_url=url, harness=harness, config=config, **more)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[str]:
    with launch_engine(checkpoint, max_running=8) as process:
        yield process.url


def test_a_policy_is_sampled_recorded_resumed_and_sealed(
    release: Path, checkpoint: Path, engine: str, tmp_path: Path
) -> None:
    jobs = jobs_of(release, 3, trials=2)
    with session(tmp_path / "s", checkpoint, engine) as first:
        results = {r.record.episode_id: r for r in first.stream(jobs[:4], 4)}
        evidence = first.evidence(jobs[0].episode_id)
        assert evidence.state["services"].keys() == jobs[0].task.world.services.keys()
    assert results.keys() == {j.episode_id for j in jobs[:4]}
    for result in results.values():
        record = result.record
        assert record.outcome is not Outcome.infra_failed and record.quarantine is None
        assert record.final_fingerprint.startswith("sha256:") and (record.version_min, record.version_max) == (0, 0)
        assert sum(int(s.mask.sum()) for s in result.segments) == record.output_tokens > 0
        sampled = np.concatenate([s.logprobs[s.mask] for s in result.segments])
        assert (sampled < 0).all() and record.model == "random"
    with session(tmp_path / "s", checkpoint, engine) as second:
        again = {r.record.episode_id: r for r in second.stream(jobs, 4)}
        for name, result in results.items():
            assert again[name].record == result.record  # same wall time: taken from the store
            assert [s.tokens.tolist() for s in again[name].segments] == [s.tokens.tolist() for s in result.segments]
        assert len(second.records()) == 6
        manifest = second.seal(kind="episodes", parents={"tasks": "x"}, facts={"seed": 1})
        assert second.seal(kind="episodes", parents={"tasks": "x"}, facts={"seed": 1}) == manifest
        other = EpisodeJob(**{**jobs[0].__dict__, "seed": 99})
        with pytest.raises(SessionError, match="another task, seed or model"):
            list(second.stream([other], 1))
    sealed = read_sealed(tmp_path / "s" / "sealed", "episodes")
    assert [r.episode_id for r in sealed.records] == sorted(again)
    with pytest.raises(SessionError, match="begun with max_new_tokens 16, now 17"):
        session(tmp_path / "s", checkpoint, engine, CONFIG.model_copy(update={"max_new_tokens": 17}))


def test_same_seed_and_engine_give_the_same_episode(
    release: Path, checkpoint: Path, engine: str, tmp_path: Path
) -> None:
    seen = []
    for name in ("a", "b"):
        with session(tmp_path / name, checkpoint, engine) as one:
            [result] = one.stream(jobs_of(release, 1), 1)
            seen.append([s.tokens.tolist() for s in result.segments])
    assert seen[0] == seen[1]


def test_new_weights_are_served_between_episodes(release: Path, checkpoint: Path, engine: str, tmp_path: Path) -> None:
    jobs = jobs_of(release, 2)
    with session(tmp_path / "s", checkpoint, engine) as one:
        stream = one.stream(jobs, 1)
        before = next(stream).record
        stream.close()
        one.update_weights(checkpoint, 7)
        [after] = [r.record for r in one.stream(jobs[1:], 1)]
        one.update_weights(checkpoint, 0)
    assert (before.version_max, after.version_min, after.version_max) == (0, 7, 7)


def test_a_hung_and_a_dead_engine_fail_the_episode_on_infrastructure(
    release: Path, checkpoint: Path, tmp_path: Path
) -> None:
    config = CONFIG.model_copy(update={"hold_seconds": 3.0, "answer_seconds": 3.0})
    with launch_engine(checkpoint) as process, session(tmp_path / "s", checkpoint, process.url, config) as one:
        jobs = jobs_of(release, 3)
        records = []
        for job, blow in zip(jobs, (signal.SIGCONT, signal.SIGSTOP, signal.SIGKILL)):
            os.kill(process.pid, blow)
            records += [r.record for r in one.stream([job], 1)]
    assert records[0].outcome is not Outcome.infra_failed
    for record in records[1:]:
        assert (record.outcome, record.quarantine) == (Outcome.infra_failed, QuarantineReason.infra_failed)
        assert (record.score, record.reward, record.success) == (0.0, 0.0, False) and record.error


@contextmanager
def failing_engine(answer: threading.Event | None = None) -> Iterator[tuple[str, list[str]]]:
    """Something that speaks HTTP and answers every generation with 500, and nobody before `answer` is set."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.path)
            if answer is not None:
                answer.wait(10)
            body = b'{"error":{"message":"CUDA error"}}' if self.path == "/generate" else b"{}"
            self.send_response(500 if self.path == "/generate" else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_engine_that_answers_500_is_never_scored(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"hold_seconds": 0.5})
    with failing_engine() as (url, asked), session(tmp_path / "s", checkpoint, url, config, harness=IMPATIENT) as one:
        records = [r.record for r in one.stream(jobs_of(release, 2), 2)]
    assert asked
    for record in records:
        assert (record.outcome, record.quarantine) == (Outcome.infra_failed, QuarantineReason.infra_failed)
        assert (record.score, record.reward, record.segments) == (0.0, 0.0, 0) and record.error


def test_a_session_stops_when_nothing_works(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    config = CONFIG.model_copy(update={"infra_failure_limit": 3, "hold_seconds": 0.1})
    url = f"http://127.0.0.1:{port}"
    with (
        session(tmp_path / "s", checkpoint, url, config, harness=IMPATIENT) as one,
        pytest.raises(RolloutStopped, match="3 episodes in a row failed"),
    ):
        list(one.stream(jobs_of(release, 5, trials=2), 2))


def test_infrastructure_failures_are_run_again_in_the_next_session(
    release: Path, checkpoint: Path, engine: str, tmp_path: Path
) -> None:
    config = CONFIG.model_copy(update={"infra_failure_limit": 2, "hold_seconds": 0.2})
    jobs = jobs_of(release, 2)
    with (
        failing_engine() as (url, _),
        session(tmp_path / "s", checkpoint, url, config, harness=IMPATIENT) as one,
        pytest.raises(RolloutStopped, match="resume in"),
    ):
        list(one.stream(jobs, 1))
    with session(tmp_path / "s", checkpoint, engine, harness=IMPATIENT) as one:
        outcomes = [r.record.outcome for r in one.stream(jobs, 1)]
        assert len(outcomes) == 2 and Outcome.infra_failed not in outcomes
        assert len(one.records()) == 2


def test_a_weight_update_that_finds_no_quiet_moment_holds_nobody(
    release: Path, checkpoint: Path, tmp_path: Path
) -> None:
    config, answer = CONFIG.model_copy(update={"hold_seconds": 0.3}), threading.Event()
    first, second = jobs_of(release, 2)
    with (
        failing_engine(answer) as (url, asked),
        session(tmp_path / "s", checkpoint, url, config, harness=IMPATIENT) as one,
    ):
        thread = threading.Thread(target=lambda: list(one.stream([first], 1)))
        thread.start()
        while not asked:
            thread.join(0.01)
        with pytest.raises(TimeoutError):
            one.update_weights(checkpoint, 1)
        answer.set()
        thread.join()
        before = len(asked)
        list(one.stream([second], 1))
        assert "/generate" in asked[before:]


def test_a_folder_begun_for_other_episodes_is_refused(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    session(tmp_path / "s", checkpoint, "http://127.0.0.1:9", asked="sha256:a")
    with pytest.raises(SessionError, match="asked 'sha256:a', now 'sha256:b'"):
        session(tmp_path / "s", checkpoint, "http://127.0.0.1:9", asked="sha256:b")


class Restless:
    """A teacher that calls the same tool for ever."""

    async def complete(self, episode_id: str, request: dict[str, Any]) -> dict[str, Any]:
        function = {"name": "file_list", "arguments": "{}"}
        return {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]}


def test_an_agent_that_never_finishes_times_out_with_partial_score(
    release: Path, checkpoint: Path, tmp_path: Path
) -> None:
    with session(tmp_path / "s", checkpoint, None, teacher=Restless()) as one:
        [result] = one.stream(jobs_of(release, 1, sampled_by="teacher"), 1)
    record, budget = result.record, jobs_of(release, 1)[0].task.meta.budget
    assert record.outcome is Outcome.timed_out and record.steps == budget.turns and "budget" in record.error
    assert (record.reward, record.success, record.quarantine) == (0.0, False, None)
    assert result.segments[0].mask.any()


class Vandal:
    """A teacher that does the task's first write, then changes something that nobody asked for, then says done."""

    def __init__(self, task: TaskContract) -> None:
        self.calls = [("file_write", '{"path":"memo","text":"12"}')]

    async def complete(self, episode_id: str, request: dict[str, Any]) -> dict[str, Any]:
        if not self.calls:
            return {"role": "assistant", "content": "done"}
        name, arguments = self.calls.pop(0)
        function = {"name": name, "arguments": arguments}
        return {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]}


def test_files_live_in_the_sandbox_and_a_forbidden_effect_zeroes_the_score(
    release: Path, checkpoint: Path, tmp_path: Path
) -> None:
    [job] = jobs_of(release, 1, sampled_by="teacher")
    with session(tmp_path / "s", checkpoint, None, teacher=Vandal(job.task)) as one:
        [result] = one.stream([job], 1)
        evidence = one.evidence(job.episode_id)
    assert evidence.state["files"]["memo"] == "12" and evidence.forbidden == ("file memo",)
    assert (result.record.outcome, result.record.score, result.record.success) == (Outcome.completed, 0.0, False)
    assert [e.name for e in evidence.events] == ["file_write"] and evidence.answer == "done"


def test_one_id_twice_at_once_is_refused(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    [job] = jobs_of(release, 1, sampled_by="teacher")
    with (
        session(tmp_path / "s", checkpoint, None, teacher=Restless()) as one,
        pytest.raises(SessionError, match="twice at once"),
    ):
        list(one.stream([job, job], 2))


def test_sample_episodes_starts_an_engine_and_is_idempotent(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    tasks = load_release(release).select(pool="short")[:2]
    arguments: dict[str, Any] = {"trials": 2, "seed": 1, "model": "random", "parents": {"release": "r"}}
    manifest = sample_episodes(tasks, checkpoint, tmp_path / "out", CONFIG, **arguments)
    assert len(read_sealed(tmp_path / "out", "episodes").records) == 4
    assert sample_episodes(tasks, checkpoint, tmp_path / "out", CONFIG, **arguments) == manifest
    assert not (tmp_path / ".out.work").exists()


def test_episodes_sampled_with_other_weights_are_not_taken_for_these(
    release: Path, checkpoint: Path, tmp_path: Path
) -> None:
    tasks = load_release(release).select(pool="short")[:1]
    arguments: dict[str, Any] = {"trials": 1, "seed": 1, "model": "random"}
    sample_episodes(tasks, checkpoint, tmp_path / "out", CONFIG, **arguments)
    other = shutil.copytree(checkpoint, tmp_path / "other")
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(SealError, match="other tasks, weights"):
        sample_episodes(tasks, other, tmp_path / "out", CONFIG, **arguments)
