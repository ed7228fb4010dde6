"""What the recording proxy adds to a call, early and late in episodes of 100K tokens: ``make bench-capture``.

Not a test. The recording proxy, a baseline that renders and tokenises the whole history at every call, and a relay that
parses and hashes the body and sends as many ids on stand in front of the same stub engine, in one run; the floor is
parsing and hashing alone. "Long prompt": nine tenths of the tokens come with the first message. "Growing":
every turn brings its share.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from occamy.capture.render import Renderer
from occamy.capture.server import ProxyServer
from occamy.contracts.capture import CaptureRules

TOKENS, TURNS = 100_000, 200
BYTES_PER_TOKEN = 4
LOOK = {1: range(1, 6), 50: range(48, 53), 200: range(196, 201)}
"""Turn in the results -> turns that are measured for it; the call that opens the episode is turn 0."""
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a record.",
        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
    },
}
SAID = '<tool_call>\n{"name": "read", "arguments": {"id": "A01"}}\n</tool_call><|im_end|>'
SPAWN = multiprocessing.get_context("spawn")


def words(rng: random.Random, count: int) -> str:
    """Text of about `count` tokens."""
    names = ("account", "order", "ledger", "contact", "status", "amount", "region", "renewal", "invoice", "balance")
    return " ".join(f"{rng.choice(names)} {rng.choice(names)}: {rng.randrange(1000)};" for _ in range(count // 5))


def tokenizer_folder(folder: Path) -> None:
    """A byte-level BPE trained on such text, with the published chat template of Qwen3 (instruct, July 2025)."""
    trl = importlib.util.find_spec("trl")
    assert trl is not None and trl.submodule_search_locations, "install the extra dev: the template comes with trl"
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([words(random.Random(i), 2000) for i in range(20)], trainer)
    for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    backend.add_tokens([AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    template = Path(trl.submodule_search_locations[0]) / "chat_templates" / "qwen3_instruct_2507.jinja"
    tokenizer.chat_template = template.read_text()
    tokenizer.save_pretrained(folder)


async def stub_engine(tokenizer: Path) -> web.Application:
    """Answers every /generate with the same tool call, and reads no more of the request than it must."""
    ids = list(Renderer(tokenizer).encode(SAID))
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "0", "cached_tokens": 0, "completion_tokens": len(ids)}
    body = orjson.dumps(
        {"text": "", "output_ids": ids, "meta_info": {**meta, "output_token_logprobs": [[-0.5, i, None] for i in ids]}}
    )

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/generate", generate)
    return app


async def baseline(tokenizer: Path, engine: str) -> web.Application:
    """A proxy that keeps nothing: renders and tokenises the whole history at every call."""
    renderer, http = Renderer(tokenizer), aiohttp.ClientSession()

    async def chat(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        text = renderer._template.render(body["messages"], body["tools"], generation_prompt=True)
        ids = renderer._backend.encode(text, add_special_tokens=False).ids
        asked = orjson.dumps({"input_ids": ids, "sampling_params": {}, "return_logprob": True})
        async with http.post(f"{engine}/generate", data=asked) as response:
            got = orjson.loads(await response.read())
        answer = renderer.parse(got["output_ids"][:-1])
        calls = [
            {"id": f"c{i}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for i, c in enumerate(answer.calls)
        ]
        message = {"role": "assistant", "content": answer.content, "tool_calls": calls}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/{path:.*}/chat/completions", chat)
    return app


async def relay(tokenizer: Path, engine: str) -> web.Application:
    """What no proxy can do without: reads, parses and hashes the body, sends as many ids on, answers."""
    http = aiohttp.ClientSession()
    call = {"id": "c0", "type": "function", "function": {"name": "read", "arguments": '{"id": "A01"}'}}
    answer = orjson.dumps({"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [call]}}]})

    async def chat(request: web.Request) -> web.Response:
        raw = await request.read()
        orjson.loads(raw)
        hashlib.sha256(raw).digest()
        asked = b'{"input_ids": [%b1]}' % (b"1000," * (len(raw) // BYTES_PER_TOKEN))
        async with http.post(f"{engine}/generate", data=asked) as response:
            await response.read()
        return web.Response(body=answer, content_type="application/json")

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/{path:.*}/chat/completions", chat)
    return app


def serve(make: Callable[..., Any], arguments: tuple[Any, ...], pipe: Connection) -> None:
    """Child process: an aiohttp application on a free port until the pipe closes."""

    async def run() -> None:
        runner = web.AppRunner(await make(*arguments), access_log=None)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        await web.SockSite(runner, listener).start()
        pipe.send("http://{}:{}".format(*listener.getsockname()[:2]))
        await asyncio.to_thread(pipe.poll, None)

    asyncio.run(run())


def serve_proxy(tokenizer: Path, engine: str, pipe: Connection) -> None:
    """Child process: the recording proxy; opens an episode for each name that comes, and answers with its key."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProxyServer(Path(folder), tokenizer, engine_url=engine, context_limit=2 * TOKENS) as proxy,
    ):
        pipe.send(proxy.url)
        while (name := pipe.recv()) is not None:
            pipe.send(proxy.open_episode(name, sampled_by="policy", seed=0, rules=CaptureRules()))


class Side:
    """One thing under test: a process, its address, and what it has used so far."""

    def __init__(self, pid: int, url: str, pipe: Connection) -> None:
        self.pid, self.url, self.pipe = pid, url, pipe

    def cpu(self) -> float:
        """Seconds of CPU of all its threads."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((t / "schedstat").read_text().split()[0]) for t in tasks) / 1e9

    def memory(self) -> float:
        """Resident MiB."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def open(self, episode: str) -> str:
        """Open an episode at the recording proxy and return its key."""
        self.pipe.send(episode)
        return str(self.pipe.recv())


@contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[Side]:
    """A child process that says its address first; ended by its pid."""
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=target, args=(*arguments, theirs), daemon=True)
    child.start()
    try:
        yield Side(child.pid or 0, str(ours.recv()), ours)
    finally:
        child.kill()
        child.join()


class Episode:
    """A harness in miniature. `grows` tells how the tokens come."""

    def __init__(self, seed: int, grows: bool, turns: int = TURNS, tokens: int = TOKENS) -> None:
        self._rng = random.Random(seed)
        first = 100 if grows else int(0.9 * tokens)
        self._share = (tokens - first) // turns - 40  # the tool call and its frame take the rest
        self.body: dict[str, Any] = {
            "model": "m",
            "tools": [TOOL],
            "messages": [
                {"role": "system", "content": "You keep records."},
                {"role": "user", "content": words(self._rng, first)},
            ],
        }

    def take(self, answer: dict[str, Any]) -> None:
        """Append the answer and its observation."""
        message = answer["choices"][0]["message"]
        result = {
            "role": "tool",
            "tool_call_id": message["tool_calls"][0]["id"],
            "content": words(self._rng, max(5, self._share)),
        }
        self.body["messages"] += [message, result]

    def raw(self) -> bytes:
        """The next request."""
        return orjson.dumps(self.body)


async def call(http: aiohttp.ClientSession, side: Side, name: str, key: str, raw: bytes) -> dict[str, Any]:
    """One chat completion."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    url = f"{side.url}/episodes/{name}/root/v1/chat/completions"
    async with http.post(url, data=raw, headers=headers) as response:
        body = await response.read()
        assert response.status == 200, body[:300]
        return dict(orjson.loads(body))


async def direct(http: aiohttp.ClientSession, engine: Side, tokens: int) -> float:
    """Seconds of a call to the stub engine itself with a prompt of so many ids."""
    raw = orjson.dumps({"input_ids": [1000] * tokens})
    began = time.perf_counter()
    async with http.post(f"{engine.url}/generate", data=raw) as response:
        await response.read()
    return time.perf_counter() - began


def floor(raw: bytes) -> float:
    """CPU seconds of parsing and hashing a body."""
    began = time.process_time()
    orjson.loads(raw)
    hashlib.sha256(raw).digest()
    return time.process_time() - began


async def measure(side: Side, engine: Side, grows: bool, episodes: int, *, recording: bool) -> list[dict[str, Any]]:
    """Latency beyond the stub engine's own and CPU per call, at the turns of interest.

    The baseline keeps nothing, so the turns between need not be asked of it.
    """
    looked = {number: turn for turn, numbers in LOOK.items() for number in numbers}
    seen: dict[int, list[tuple[float, float, float]]] = {turn: [] for turn in LOOK}
    async with aiohttp.ClientSession() as http:
        for number in range(episodes):
            name = f"{'growing' if grows else 'long'}-{number}"
            key = side.open(name) if recording else ""
            episode = Episode(number, grows)
            answer: dict[str, Any] = {}
            for at in range(TURNS + 1):
                turn = looked.get(at)
                if turn is None:
                    answer = await call(http, side, name, key, episode.raw()) if recording or at == 0 else answer
                else:
                    raw, before, began = episode.raw(), side.cpu(), time.perf_counter()
                    answer = await call(http, side, name, key, raw)
                    took, used = time.perf_counter() - began, side.cpu() - before
                    alone = await direct(http, engine, len(raw) // BYTES_PER_TOKEN)
                    seen[turn].append((took - alone, used, floor(raw)))
                episode.take(answer)
    return [{"turn": turn, **summary(rows)} for turn, rows in seen.items()]


def summary(rows: list[tuple[float, float, float]]) -> dict[str, float]:
    """Milliseconds, rounded for reading."""
    added, used, least = ([1000 * row[i] for row in rows] for i in range(3))
    return {
        "added_ms_p50": round(statistics.median(added), 2),
        "added_ms_p99": round(statistics.quantiles(added, n=100, method="inclusive")[98], 2),
        "cpu_ms": round(statistics.median(used), 2),
        "floor_cpu_ms": round(statistics.median(least), 2),
    }


async def crowd(side: Side, episodes: int, turns: int) -> dict[str, Any]:
    """Many episodes at once, each taking its turns; what failed is counted."""

    async def play(number: int, http: aiohttp.ClientSession) -> list[float]:
        name, episode, took = f"crowd-{number}", Episode(number, True, turns, 200 * turns), []
        for _ in range(turns):
            began = time.perf_counter()
            episode.take(await call(http, side, name, keys[number], episode.raw()))
            took.append(1000 * (time.perf_counter() - began))
        return took

    keys = [side.open(f"crowd-{n}") for n in range(episodes)]
    began = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        done = await asyncio.gather(*(play(n, http) for n in range(episodes)), return_exceptions=True)
    wall = time.perf_counter() - began
    took = [ms for result in done if not isinstance(result, BaseException) for ms in result]
    return {
        "episodes": episodes,
        "turns": turns,
        "errors": sum(isinstance(result, BaseException) for result in done),
        "calls_per_s": round(len(took) / wall),
        "ms_p50": round(statistics.median(took), 1),
        "ms_p99": round(statistics.quantiles(took, n=100)[98], 1),
    }


async def memory(side: Side, episodes: int) -> float:
    """MiB that an episode of 100K tokens and 200 turns takes while it is open."""
    before = 0.0
    async with aiohttp.ClientSession() as http:
        for number in range(episodes + 1):
            name, episode = f"kept-{number}", Episode(number, False)
            key = side.open(name)
            for _ in range(TURNS):
                episode.take(await call(http, side, name, key, episode.raw()))
            before = side.memory() if number == 0 else before  # the first one warms up caches and the heap
    return (side.memory() - before) / episodes


async def benchmark(episodes: int) -> dict[str, Any]:
    """All of it, one side after the other, in front of one stub engine."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = Path(scratch)
        tokenizer_folder(tokenizer)
        with started(serve, stub_engine, (tokenizer,)) as engine:
            with started(serve, baseline, (tokenizer, engine.url)) as side:
                few = max(1, episodes // 4)
                slow = {g: await measure(side, engine, g, few, recording=False) for g in (False, True)}
            with started(serve, relay, (tokenizer, engine.url)) as side:
                bare = {g: await measure(side, engine, g, episodes, recording=False) for g in (False, True)}
            with started(serve_proxy, tokenizer, engine.url) as side:
                fast = {g: await measure(side, engine, g, episodes, recording=True) for g in (False, True)}
                many = await crowd(side, 64, 10)
            with started(serve_proxy, tokenizer, engine.url) as side:
                mib = await memory(side, 4)
    workloads = {}
    for grows, name in ((False, "long prompt"), (True, "growing")):
        first, last, old, least = fast[grows][0], fast[grows][-1], slow[grows][-1], bare[grows][-1]
        workloads[name] = {
            "recording": fast[grows],
            "re-rendering": slow[grows],
            "relay": bare[grows],
            "p50 at turn 200 / turn 1": round(last["added_ms_p50"] / first["added_ms_p50"], 2),
            "cpu at turn 200, re-rendering / recording": round(old["cpu_ms"] / last["cpu_ms"], 1),
            "cpu at turn 200, recording / relay": round(last["cpu_ms"] / least["cpu_ms"], 2),
            "cpu at turn 200, recording / floor": round(last["cpu_ms"] / last["floor_cpu_ms"], 2),
        }
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "tokens": TOKENS,
        "turns": TURNS,
        "workloads": workloads,
        "concurrent": many,
        "mib_per_open_episode": round(mib, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=8, help="per workload; five calls of each look at a turn")
    parser.add_argument("--write", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    result = asyncio.run(benchmark(args.episodes))
    for name, workload in result["workloads"].items():
        print(name)
        for kind in ("recording", "re-rendering", "relay"):
            for row in workload[kind]:
                figures = "  ".join(f"{k} {v:8.2f}" for k, v in row.items() if k != "turn")
                print(f"  {kind:13} turn {row['turn']:3}  {figures}")
        for ratio, value in workload.items():
            if isinstance(value, float):
                print(f"  {ratio}: {value}")
    print("64 at once:", ", ".join(f"{k} {v}" for k, v in result["concurrent"].items()))
    print(f"memory: {result['mib_per_open_episode']} MiB per open episode of {TOKENS} tokens")
    if args.write is not None:
        args.write.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
