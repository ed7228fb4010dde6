"""The engine as a process behind HTTP: the wire contract, weight updates, and how it starts and ends."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from occamy.engines.client import EngineClient, EngineError, Sampling
from occamy.engines.local.launch import EngineProcess, launch_engine

GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
LONG = Sampling(max_new_tokens=120, seed=1)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[EngineProcess]:
    with launch_engine(checkpoint, version=4, max_running=16) as process:
        yield process


def talk(engine: EngineProcess, use: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def run() -> None:
        client = EngineClient(engine.url, timeout_s=60.0)
        try:
            await use(client)
        finally:
            await client.close()

    asyncio.run(run())


async def post(engine: EngineProcess, path: str, body: object) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session, session.post(engine.url + path, data=data) as response:
        raw = await response.read()
        return response.status, json.loads(raw) if raw else None


def test_generation_over_http(engine: EngineProcess) -> None:
    async def use(client: EngineClient) -> None:
        await client.wait_healthy(10.0)
        info = await client.model_info()
        assert info["weight_version"] == "4" and info["context_length"] == 128
        prompt = list(range(20))
        first = await client.generate(prompt, GREEDY)
        assert len(first.output_ids) == len(first.logprobs) == 8
        assert (first.finish_reason, first.weight_version) == ("length", 4)
        stop = Sampling(temperature=0.0, stop_token_ids=(first.output_ids[2],))
        stopped = await client.generate(prompt, stop)
        end = first.output_ids.index(first.output_ids[2]) + 1
        assert (stopped.output_ids, stopped.finish_reason) == (first.output_ids[:end], "stop")
        assert stopped.cached_tokens == 19
        await client.flush_cache()
        assert (await client.generate(prompt, GREEDY)).cached_tokens == 0

    talk(engine, use)


def test_the_same_seed_gives_the_same_answer_whatever_else_runs(engine: EngineProcess) -> None:
    async def use(client: EngineClient) -> None:
        calls = [([i, i + 1, 3], Sampling(max_new_tokens=20, seed=i)) for i in range(12)]
        together = await asyncio.gather(*(client.generate(*call) for call in calls))
        lone = [await client.generate(*call) for call in calls]
        assert [g.output_ids for g in together] == [g.output_ids for g in lone]
        assert len({tuple(g.output_ids) for g in lone}) == 12

    talk(engine, use)


def test_batch_and_many_samples_are_lists(engine: EngineProcess) -> None:
    async def use(client: EngineClient) -> None:
        params = {"max_new_tokens": 5, "sampling_seed": 3}
        status, batch = await post(
            engine, "/generate", {"input_ids": [[1, 2], [3]], "sampling_params": params, "rid": "b"}
        )
        assert status == 200 and [a["meta_info"]["id"] for a in batch] == ["b-0", "b-1"]
        assert [a["meta_info"]["prompt_tokens"] for a in batch] == [2, 1]
        assert "output_token_logprobs" not in batch[0]["meta_info"]
        samples = await client.generate_n([1, 2], Sampling(max_new_tokens=5, seed=3), 2)
        assert samples[0].output_ids == batch[0]["output_ids"] != samples[1].output_ids

    talk(engine, use)


def test_stream_is_cumulative_and_ends_with_done(engine: EngineProcess) -> None:
    async def use(client: EngineClient) -> None:
        whole = await client.generate([1, 2, 3], GREEDY)
        params = {"temperature": 0, "max_new_tokens": 8}
        body = {"input_ids": [1, 2, 3], "sampling_params": params, "stream": True, "return_logprob": True}
        async with aiohttp.ClientSession() as session, session.post(engine.url + "/generate", json=body) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            text = (await response.read()).decode()
        events = text.removesuffix("\n\n").split("\n\n")
        assert events.pop() == "data: [DONE]"
        seen = [json.loads(event.removeprefix("data: ")) for event in events]
        assert all(e["output_ids"] == whole.output_ids[: len(e["output_ids"])] for e in seen)
        assert seen[-1]["output_ids"] == whole.output_ids
        assert seen[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
        assert [e["meta_info"]["finish_reason"] for e in seen[:-1]] == [None] * (len(seen) - 1)

    talk(engine, use)


def test_a_stream_of_many_tells_them_apart_by_index(engine: EngineProcess) -> None:
    async def use(client: EngineClient) -> None:
        inputs = [[1, 2, 3], [4, 5]]
        alone = [(await client.generate(i, GREEDY)).output_ids for i in inputs]
        params = {"temperature": 0, "max_new_tokens": 8}
        body = {"input_ids": inputs, "sampling_params": params, "stream": True}
        async with aiohttp.ClientSession() as session, session.post(engine.url + "/generate", json=body) as response:
            *events, done = (await response.read()).decode().removesuffix("\n\n").split("\n\n")
        seen = [json.loads(event.removeprefix("data: ")) for event in events]
        last = {e["index"]: e["output_ids"] for e in seen if e["meta_info"]["finish_reason"]}
        assert last == dict(enumerate(alone)) and done == "data: [DONE]"

    talk(engine, use)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON"),
        (b"[]", "the body must be a JSON object"),
        ({"text": "hello"}, "'text' is not supported"),
        ({"input_ids": []}, "input_ids must be a non-empty list"),
        ({"input_ids": [1, 50]}, r"input_ids holds 50, which is out of the vocabulary \(0 to 49\)"),
        ({"input_ids": [1, -1]}, "input_ids holds -1, which is out of the vocabulary"),
        ({"input_ids": [True]}, "input_ids holds True"),
        (
            {"input_ids": [1] * 128},
            r"The input \(128 tokens\) is longer than the model's context length \(128 tokens\)",
        ),
        (
            {"input_ids": [1] * 100, "sampling_params": {"max_new_tokens": 29}},
            "exceeds the model's maximum context length",
        ),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature = -1 must be a number from 0"),
        (b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}', "the body is not JSON"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 2.5}}, "max_new_tokens = 2.5 must be a whole number"),
        ({"input_ids": [1], "sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty = 0.5 is not supported"),
        ({"input_ids": [1], "sampling_params": {"temprature": 1}}, "temprature is not known"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": [99]}}, "stop_token_ids holds 99"),
        ({"input_ids": [1], "logprob_start_len": -2}, "logprob_start_len = -2 must be a whole number from -1"),
        ({"input_ids": [1], "top_logprobs_num": 51}, "top_logprobs_num = 51 must be a whole number from 0 to 50"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "2 inputs, 2 sampling_params and 1 rids"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(engine: EngineProcess, body: object, message: str) -> None:
    status, answer = asyncio.run(post(engine, "/generate", body))
    assert status == 400
    assert re.search(message, answer["error"]["message"])


def test_update_while_generating_mixes_no_versions(engine: EngineProcess, make_checkpoint, checkpoint: Path) -> None:
    other = make_checkpoint(seed=5)

    async def use(client: EngineClient) -> None:
        old = await client.generate([1, 2, 3], LONG)
        running = asyncio.create_task(client.generate([1, 2, 3], LONG))
        update = asyncio.create_task(client.update_weights_from_disk(other, 5))
        await update
        new = await client.generate([1, 2, 3], LONG)
        assert (new.weight_version, new.cached_tokens) == (5, 0)
        assert new.output_ids != old.output_ids
        got = await running
        assert got.output_ids == (old if got.weight_version == 4 else new).output_ids
        assert (await client.model_info())["model_path"] == str(other)
        await client.update_weights_from_disk(checkpoint, 4)

    talk(engine, use)


def test_bad_update_keeps_the_old_weights(engine: EngineProcess, make_checkpoint) -> None:
    def poison(tensors: dict) -> None:
        tensors["model.norm.weight"][0] = float("nan")

    async def use(client: EngineClient) -> None:
        before = await client.generate([1, 2, 3], GREEDY)
        cases = {
            "model.norm.weight holds 1 NaN": make_checkpoint(change=poison),
            "layers is 1, the engine serves 2": make_checkpoint(num_hidden_layers=1),
            "no config.json": "/nonexistent",
        }
        for message, folder in cases.items():
            with pytest.raises(EngineError, match=message) as caught:
                await client.update_weights_from_disk(folder, 9)
            assert caught.value.kind == "failed"
        after = await client.generate([1, 2, 3], GREEDY)
        assert (after.output_ids, after.weight_version) == (before.output_ids, 4)

    talk(engine, use)


def test_pause_lets_generations_finish_and_holds_new_ones(engine: EngineProcess) -> None:
    async def use(client: EngineClient) -> None:
        other = EngineClient(engine.url)
        running = [asyncio.create_task(c.generate([1, 2], LONG)) for c in (client, other)]
        while json.loads(await _get(engine, "/server_info"))["running"] < 2:
            pass
        await client.pause()
        assert [(await task).finish_reason for task in running] == ["length", "length"]
        held = [asyncio.create_task(c.generate([1, 2], GREEDY)) for c in (client, other)]
        while json.loads(await _get(engine, "/server_info"))["waiting"] < 1:
            pass
        assert not any(task.done() for task in held)
        await client.resume()
        assert [len((await task).output_ids) for task in held] == [8, 8]
        await other.close()

    talk(engine, use)


def test_abort_by_rid_and_pause_in_abort_mode(engine: EngineProcess) -> None:
    async def use(client: EngineClient) -> None:
        other = EngineClient(engine.url)
        await post(engine, "/pause_generation", {})
        tasks = [asyncio.create_task(other.generate([1], LONG, rid=name)) for name in ("a", "ab")]
        while json.loads(await _get(engine, "/server_info"))["waiting"] < 2:
            pass
        await client.abort("a")
        assert (await tasks[0]).finish_reason == "abort"
        assert not tasks[1].done()
        await client.resume()
        assert (await tasks[1]).finish_reason == "length"
        await post(engine, "/pause_generation", {})
        held = asyncio.create_task(other.generate([1], LONG))
        while json.loads(await _get(engine, "/server_info"))["waiting"] < 1:
            pass
        await client.abort()
        gone = await held
        assert (gone.finish_reason, gone.output_ids) == ("abort", [])
        await client.resume()
        await other.close()

    talk(engine, use)


def test_a_client_that_goes_away_frees_its_place(engine: EngineProcess) -> None:
    async def use(client: EngineClient) -> None:
        await post(engine, "/pause_generation", {})
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 100}}
        with pytest.raises(TimeoutError):
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.2)) as session:
                await session.post(engine.url + "/generate", json=body)
        while json.loads(await _get(engine, "/server_info"))["waiting"]:
            pass
        await client.resume()

    talk(engine, use)


async def _get(engine: EngineProcess, path: str) -> bytes:
    async with aiohttp.ClientSession() as session, session.get(engine.url + path) as response:
        return await response.read()


def test_what_is_wrong_at_the_start_is_said(checkpoint: Path, make_checkpoint, tmp_path: Path) -> None:
    def drop(tensors: dict) -> None:
        del tensors["model.norm.weight"]

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases: list[tuple[str, Path, dict[str, int]]] = [
            (r"tensor model\.norm\.weight is missing", make_checkpoint(change=drop), {}),
            (rf"127\.0\.0\.1:{port}: Address already in use; --port 0", checkpoint, {"port": port}),
            ("max_running\n.*greater than or equal to 1", checkpoint, {"max_running": 0}),
        ]
        for message, folder, options in cases:
            with pytest.raises(EngineError, match=message) as caught, launch_engine(folder, **options):
                pass
            assert caught.value.kind == "start"
    log = tmp_path / "logs" / "engine.log"
    log.parent.mkdir()
    log.write_text("what an earlier run said\n")
    # A process that dies without a word of its own: its log is shown, from where this run began.
    options = {"threads": "many"}
    with (
        pytest.raises(EngineError, match="ended with code 2 before") as died,
        launch_engine(checkpoint, log=log, **options),
    ):
        pass
    assert "invalid int value: 'many'" in str(died.value) and "earlier run" not in str(died.value)


def test_the_command_serves_in_the_foreground_until_it_is_told_to_stop(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "occamy.cli.main", "engine", "serve", "--model", str(checkpoint), "--port", "0"]
    with subprocess.Popen([*command, "--deterministic"], stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        line = serving.stdout.readline()
        said = re.fullmatch(
            r"serving on (http://127\.0\.0\.1:\d+): \S+ \(qwen3_moe, 2 layers, vocabulary 50, context 128, "
            r"deterministic\) as weight version 0\n",
            line,
        )
        assert said, line
        talk(EngineProcess(said[1], serving.pid), lambda client: client.wait_healthy(5.0))
        serving.send_signal(signal.SIGINT)
        assert serving.wait(20) == 0


def test_an_engine_that_dies_in_use_is_named_with_its_end(checkpoint: Path, tmp_path: Path) -> None:
    def kill_and_call() -> None:
        with launch_engine(checkpoint, log=tmp_path / "e.log") as engine:
            os.kill(engine.pid, signal.SIGKILL)
            talk(engine, lambda client: client.pause())

    with pytest.raises(EngineError, match=r"(?s)ended with code -9; end of .*e\.log.*serving on http") as died:
        kill_and_call()
    assert died.value.kind == "failed"
    assert isinstance(died.value.__cause__, EngineError) and died.value.__cause__.kind in ("refused", "lost")


def test_the_engine_ends_with_its_block_and_with_its_launcher(checkpoint: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom occamy.engines.local.launch import launch_engine\n"
        "with launch_engine(Path(sys.argv[1])) as engine:\n    print(engine.pid, flush=True)\n    os._exit(0)\n"
    )
    orphan = subprocess.run([sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True, check=True)
    assert _ends(int(orphan.stdout))
    with launch_engine(checkpoint) as engine:
        assert not _gone(engine.pid)
    assert _gone(engine.pid)


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _ends(pid: int, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while not _gone(pid) and time.monotonic() < deadline:
        pass
    return _gone(pid)
