"""Streams of the client: growing answers, and every way in which one can end early, without a second sample."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from occamy.engines.client import EngineClient, EngineError, Generation, Sampling
from occamy.engines.local.launch import EngineProcess, launch_engine

SAMPLING = Sampling(max_new_tokens=100, seed=1)


def event(ids: tuple[int, ...], finish: str | None = None) -> bytes:
    meta = {
        "finish_reason": finish and {"type": finish},
        "weight_version": "3",
        "output_token_logprobs": [[-0.5, i, None] for i in ids],
        "cached_tokens": 0,
    }
    return b"data: " + json.dumps({"output_ids": list(ids), "meta_info": meta}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
GOOD = event((5,)) + event((5, 6)) + event((5, 6, 2), "stop") + DONE


class Streaming:
    """Streams `data` in pieces of `size` bytes, then ends as `end` says: close, reset or hang."""

    def __init__(self, data: bytes, end: str = "close", size: int = 10**6, status: int = 200) -> None:
        self.data, self.end, self.size, self.status = data, end, size, status
        self.rids: list[str] = []
        self.aborted: list[str] = []
        self.sent = asyncio.Event()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        assert body["stream"] is True
        self.rids.append(body["rid"])
        if self.status != 200:
            return web.Response(body=self.data, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at in range(0, len(self.data), self.size):
            await response.write(self.data[at : at + self.size])
        self.sent.set()
        if self.end == "hang":
            await asyncio.Event().wait()
        if self.end == "reset":
            assert request.transport is not None
            request.transport.abort()
        return response

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append(json.loads(await request.read())["rid"])
        return web.Response()


@asynccontextmanager
async def serving(fake: Streaming) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.post("/generate", fake.generate), web.post("/abort_request", fake.abort)])
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    await runner.cleanup()


def against(make: Callable[[], Streaming], use: Callable[[Streaming, EngineClient], Awaitable[None]]) -> None:
    async def run() -> None:
        fake = make()
        async with serving(fake) as url:
            client = EngineClient(url, timeout_s=2.0)
            try:
                await use(fake, client)
            finally:
                await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("size", [10**6, 7])
def test_parts_grow_and_only_the_last_is_finished(size: int) -> None:
    async def use(fake: Streaming, client: EngineClient) -> None:
        parts = [part async for part in client.stream([1], SAMPLING, rid="r")]
        assert parts == [
            Generation([5], [-0.5], "unfinished", 3, 0),
            Generation([5, 6], [-0.5, -0.5], "unfinished", 3, 0),
            Generation([5, 6, 2], [-0.5, -0.5, -0.5], "stop", 3, 0),
        ]
        assert (fake.rids, fake.aborted) == (["r"], [])

    against(lambda: Streaming(GOOD, size=size), use)


@pytest.mark.parametrize(
    ("make", "kind", "message", "parts"),
    [
        (lambda: Streaming(GOOD[:-5]), "lost", r"ended before its last event and \[DONE\]", 3),
        (lambda: Streaming(event((5,)) + DONE), "lost", "ended before its last event", 1),
        (lambda: Streaming(event((5,)) + event((5, 6))[:40]), "lost", "ended before its last event", 1),
        (lambda: Streaming(event((5,)), end="reset"), "lost", "connection broke after the request was sent", 1),
        (lambda: Streaming(b"", end="reset"), "lost", "connection broke after the request was sent", 0),
        (lambda: Streaming(event((5,)), end="hang"), "timeout", "no answer within 2.0 s", 1),
        (lambda: Streaming(event((5,)) + event((6, 7))), "protocol", "does not extend", 1),
        (lambda: Streaming(event((5, 2), "stop") + event((5, 2, 3))), "protocol", "does not extend", 1),
        (lambda: Streaming(b"data: <html>\n\n"), "protocol", "not an answer of SGLang's", 0),
        (lambda: Streaming(b'data: {"error": {"message": "out of memory"}}\n\n'), "failed", "out of memory", 0),
    ],
)
def test_a_broken_stream_is_aborted_and_never_asked_for_again(
    make: Callable[[], Streaming], kind: str, message: str, parts: int
) -> None:
    async def use(fake: Streaming, client: EngineClient) -> None:
        got: list[Generation] = []
        with pytest.raises(EngineError, match=message) as caught:
            async for part in client.stream([1], SAMPLING):
                got.append(part)  # noqa: PERF401 (kept when it breaks)
        assert (caught.value.kind, len(got)) == (kind, parts)
        assert len(fake.rids) == 1 and fake.aborted == fake.rids

    against(make, use)


@pytest.mark.parametrize(("status", "kind"), [(400, "rejected"), (500, "failed"), (503, "failed")])
def test_a_refused_stream_is_an_error_and_not_repeated(status: int, kind: str) -> None:
    async def use(fake: Streaming, client: EngineClient) -> None:
        with pytest.raises(EngineError, match=f"HTTP {status}: no") as caught:
            _ = [part async for part in client.stream([1], SAMPLING)]
        assert (caught.value.kind, caught.value.status, len(fake.rids)) == (kind, status, 1)

    against(lambda: Streaming(b'{"error": {"message": "no"}}', status=status), use)


def test_a_consumer_that_stops_or_is_cancelled_aborts_the_request() -> None:
    async def closes(fake: Streaming, client: EngineClient) -> None:
        async with aclosing(client.stream([1], SAMPLING, rid="a")) as parts:
            async for _ in parts:
                break
        assert fake.aborted == ["a"]
        with pytest.raises(EngineError, match="'b' is already in flight"):
            async with aclosing(client.stream([1], SAMPLING, rid="b")) as parts:
                await anext(parts)
                await client.generate([1], SAMPLING, rid="b")

    async def cancelled(fake: Streaming, client: EngineClient) -> None:
        async def consume() -> None:
            async for _ in client.stream([1], SAMPLING, rid="c"):
                pass

        task = asyncio.create_task(consume())
        await fake.sent.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fake.aborted == ["c"]

    for use in (closes, cancelled):
        against(lambda: Streaming(event((5,)), end="hang"), use)


def test_a_pause_waits_for_a_stream(checkpoint: Path) -> None:
    async def run(engine: EngineProcess) -> None:
        client = EngineClient(engine.url)
        async with aclosing(client.stream([1, 2], SAMPLING)) as parts:
            await anext(parts)
            pause = asyncio.create_task(client.pause())
            rest = [part async for part in parts]
            assert rest[-1].finish_reason == "length" and len(rest[-1].output_ids) == 100
        await pause
        await client.resume()
        assert (await client.generate([1, 2], SAMPLING)).output_ids == rest[-1].output_ids
        await client.close()

    with launch_engine(checkpoint) as engine:
        asyncio.run(run(engine))


def test_batches_scores_and_arrays_over_http(checkpoint: Path) -> None:
    async def run(engine: EngineProcess) -> None:
        client = EngineClient(engine.url)
        prompts = [np.arange(20, dtype=np.int32), (3, 4), [5]]
        samplings = [Sampling(max_new_tokens=5 + i, seed=i) for i in range(3)]
        batch = await client.generate_batch(prompts, samplings)
        alone = [await client.generate(list(map(int, p)), s) for p, s in zip(prompts, samplings, strict=True)]
        assert [g.output_ids for g in batch] == [g.output_ids for g in alone]
        assert await client.generate_batch([], SAMPLING) == []
        tokens = [*range(20), *batch[0].output_ids]
        score = await client.score(tokens)
        assert score.logprobs[0] is None and len(score.logprobs) == 25 and score.weight_version == 7
        assert np.allclose(score.logprobs[20:], batch[0].logprobs, atol=1e-4)
        later = await client.score(np.array(tokens), start=20)
        assert later.logprobs[0] is None and np.allclose(later.logprobs[1:], batch[0].logprobs[1:], atol=1e-4)
        with pytest.raises(EngineError, match="float64 of shape"):
            await client.generate(np.ones(3), SAMPLING)
        with pytest.raises(EngineError, match="2 inputs, 1 samplings and 2 rids"):
            await client.generate_batch([[1], [2]], [SAMPLING])
        with pytest.raises(EngineError, match=r"has no tokenizer\.json"):
            await client.tokenize("a")
        assert (await client.server_info())["context_length"] == 128
        await client.close()

    with launch_engine(checkpoint, version=7) as engine:
        asyncio.run(run(engine))


def test_an_engine_killed_in_mid_generation_is_an_error_and_is_asked_again_only_when_gone(checkpoint: Path) -> None:
    async def stream_and_kill(engine: EngineProcess) -> None:
        client = EngineClient(engine.url, refused_s=0.0)
        blocked = asyncio.create_task(client.generate([3] * 20, SAMPLING))
        with pytest.raises(EngineError) as broken:
            async for _ in client.stream([1] * 20, SAMPLING):
                os.kill(engine.pid, signal.SIGKILL)
        assert broken.value.kind == "lost"
        with pytest.raises(EngineError) as gone:
            await blocked
        assert gone.value.kind == "refused"
        await client.close()

    with launch_engine(checkpoint) as engine:
        asyncio.run(stream_and_kill(engine))

    async def survive(port: int) -> None:
        with launch_engine(checkpoint, port=port) as first:
            client = EngineClient(first.url, refused_s=60.0)
            call = asyncio.create_task(client.generate([1] * 20, SAMPLING))
            while (await client.server_info())["running"] < 1:
                pass
            os.kill(first.pid, signal.SIGKILL)
        stop = await asyncio.to_thread(_launched, checkpoint, port)
        try:
            assert len((await call).output_ids) == 100
            assert (await client.server_info())["output_tokens"] == 100  # sampled once
            await client.close()
        finally:
            await asyncio.to_thread(stop)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asyncio.run(survive(port))


def _launched(checkpoint: Path, port: int) -> Callable[[], None]:
    stack = ExitStack()
    stack.enter_context(launch_engine(checkpoint, port=port))
    return stack.close
