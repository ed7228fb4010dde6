"""The client against an engine that misbehaves: what is sent again, what never is, and which shapes are accepted."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from occamy.engines.client import EngineClient, EngineError, Generation, Sampling


def answer(version: object = "3", ids: tuple[int, ...] = (5, 2), finish: str = "stop") -> dict[str, Any]:
    scored = [[-0.5, i, None] for i in ids]
    meta = {
        "finish_reason": {"type": finish},
        "weight_version": version,
        "output_token_logprobs": scored,
        "cached_tokens": 4,
    }
    return {"text": "", "output_ids": list(ids), "meta_info": meta}


class Faulty:
    """An endpoint that speaks /generate and fails as told: one script entry per /generate call."""

    def __init__(self, *script: object, abort_status: int = 200) -> None:
        self.script, self.abort_status = list(script), abort_status
        self.generated: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.reached = asyncio.Event()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.generated.append(json.loads(await request.read()))
        self.reached.set()
        step = self.script[min(len(self.generated), len(self.script)) - 1]
        if step == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if step == "hang":
            await asyncio.Event().wait()
        if isinstance(step, tuple):
            return web.json_response(step[1], status=step[0])
        return web.json_response(step)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append(json.loads(await request.read())["rid"])
        return web.Response(status=self.abort_status)


def against(engine: Callable[[], Faulty], use: Callable[[Faulty, str], Awaitable[None]]) -> None:
    async def run() -> None:
        faulty = engine()
        app = web.Application()
        app.add_routes([web.post("/generate", faulty.generate), web.post("/abort_request", faulty.abort)])
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        try:
            await use(faulty, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            await runner.cleanup()

    asyncio.run(run())


async def failing(client: EngineClient, kind: str, match: str, n: int = 1) -> EngineError:
    with pytest.raises(EngineError, match=match) as caught:
        await client.generate_n([1], Sampling(), n)
    assert caught.value.kind == kind
    await client.close()
    return caught.value


def test_sends_sglangs_body_and_reads_its_answer() -> None:
    async def use(faulty: Faulty, url: str) -> None:
        client = EngineClient(url)
        sampling = Sampling(temperature=0.7, max_new_tokens=9, stop_token_ids=(2,), seed=11)
        got = await client.generate([1, 2, 3], sampling, rid="r")
        await client.close()
        assert got == Generation([5, 2], [-0.5, -0.5], "stop", 3, 4)
        assert faulty.generated == [
            {
                "input_ids": [1, 2, 3],
                "sampling_params": {
                    "temperature": 0.7,
                    "top_p": 1.0,
                    "top_k": -1,
                    "max_new_tokens": 9,
                    "stop_token_ids": [2],
                    "sampling_seed": 11,
                },
                "return_logprob": True,
                "rid": "r",
            }
        ]

    against(lambda: Faulty(answer()), use)


def test_lost_answer_is_aborted_before_it_is_asked_for_again() -> None:
    async def use(faulty: Faulty, url: str) -> None:
        client = EngineClient(url)
        got = await client.generate([1], Sampling(), rid="r")
        await client.close()
        assert got.output_ids == [5, 2]
        assert faulty.aborted == ["r"]
        assert [body["rid"] for body in faulty.generated] == ["r", "r_1"]

    against(lambda: Faulty("drop", answer()), use)


def test_lost_answer_is_not_asked_for_again_when_the_abort_is_not_confirmed() -> None:
    async def use(faulty: Faulty, url: str) -> None:
        await failing(EngineClient(url), "lost", "the connection broke after the request was sent")
        assert len(faulty.generated) == 1 and len(faulty.aborted) == 1

    against(lambda: Faulty("drop", answer(), abort_status=500), use)


def test_answers_that_keep_getting_lost_are_given_up() -> None:
    async def use(faulty: Faulty, url: str) -> None:
        await failing(EngineClient(url, attempts=2), "lost", "connection broke")
        assert len(faulty.generated) == len(faulty.aborted) == 2

    against(lambda: Faulty("drop"), use)


def test_loading_engine_is_tried_again_but_other_errors_are_not() -> None:
    loading = (503, {"error": {"message": "The server is still loading"}})

    async def loaded(faulty: Faulty, url: str) -> None:
        client = EngineClient(url)
        assert (await client.generate([1], Sampling())).weight_version == 3
        await client.close()
        assert len(faulty.generated) == 3 and faulty.aborted == []

    against(lambda: Faulty(loading, loading, answer()), loaded)
    for status, kind in ((400, "rejected"), (500, "failed"), (503, "failed")):

        async def refused(faulty: Faulty, url: str, status: int = status, kind: str = kind) -> None:
            error = await failing(EngineClient(url), kind, f"HTTP {status}: too long")
            assert error.status == status and len(faulty.generated) == 1

        against(lambda status=status: Faulty((status, {"error": {"message": "too long"}})), refused)


def test_timeout_aborts_and_does_not_send_again() -> None:
    async def use(faulty: Faulty, url: str) -> None:
        await failing(EngineClient(url, timeout_s=0.2), "timeout", "no answer within")
        assert len(faulty.generated) == 1 and faulty.aborted == [faulty.generated[0]["rid"]]

    against(lambda: Faulty("hang"), use)


def test_cancelled_call_aborts_its_request() -> None:
    async def use(faulty: Faulty, url: str) -> None:
        client = EngineClient(url)
        call = asyncio.create_task(client.generate([1], Sampling(), rid="mine"))
        await faulty.reached.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await client.close()
        assert faulty.aborted == ["mine"]

    against(lambda: Faulty("hang"), use)


def test_refused_connection_is_tried_until_somebody_listens() -> None:
    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        client = EngineClient(f"http://127.0.0.1:{port}", refused_s=20.0)
        call = asyncio.create_task(client.generate([1], Sampling()))
        await asyncio.sleep(0)  # the call starts before anybody listens
        faulty = Faulty(answer())
        app = web.Application()
        app.add_routes([web.post("/generate", faulty.generate)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        with pytest.raises(EngineError) as caught:
            await EngineClient(f"http://127.0.0.1:{port}", refused_s=0.0).model_info()
        assert caught.value.kind == "refused"
        await web.TCPSite(runner, "127.0.0.1", port).start()
        assert (await call).output_ids == [5, 2]
        await client.close()
        await runner.cleanup()
        with pytest.raises(EngineError) as again:
            await EngineClient(f"http://127.0.0.1:{port}", refused_s=0.0).generate([1], Sampling())
        assert again.value.kind == "refused"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("not JSON", "not an answer of SGLang's /generate"),
        ({"output_ids": [1]}, "not an answer of SGLang's /generate"),
        (answer(version="default"), "weight_version 'default' is not a number"),
        (answer(finish="content_filter"), "finish reason 'content_filter'"),
        (answer() | {"output_ids": [5, 3]}, r"log-probs are for ids \[5, 2\], the output is \[5, 3\]"),
        ([answer(), answer()], "2 generations came back, not 1"),
        ([], "0 generations came back, not 1"),
    ],
)
def test_answers_that_cannot_be_trusted_are_errors(body: object, message: str) -> None:
    async def use(_: Faulty, url: str) -> None:
        await failing(EngineClient(url), "protocol", message)

    against(lambda: Faulty(body), use)


@pytest.mark.parametrize(("body", "count"), [(answer(), 1), ([answer(), answer()], 2)])
def test_many_samples_come_as_an_object_or_a_list(body: object, count: int) -> None:
    async def use(faulty: Faulty, url: str) -> None:
        client = EngineClient(url)
        assert len(await client.generate_n([1], Sampling(), 2)) == count
        await client.close()
        assert faulty.generated[0]["sampling_params"]["n"] == 2

    against(lambda: Faulty(body), use)


def test_client_and_launcher_do_not_import_torch() -> None:
    code = "import sys, occamy.engines.client, occamy.engines.local.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
