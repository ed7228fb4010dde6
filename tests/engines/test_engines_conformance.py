"""The suite passes on the local engine, and finds each way in which an engine can break the contract."""

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from occamy.cli.main import main
from occamy.engines.conformance import Finding, check_engine
from occamy.engines.local.launch import EngineProcess, launch_engine
from occamy.engines.local.reference import load_reference
from occamy.engines.probe import Broken, Skipped, temperature_meaning
from occamy.nano.base import base_checkpoint

Change = Callable[[dict[str, Any], Any], Any]
"""(request body, answer or event) -> what the client gets instead; None drops an event."""


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "deterministic"])
def engine(request: pytest.FixtureRequest) -> Iterator[EngineProcess]:
    with launch_engine(base_checkpoint(), version=3, deterministic=request.param) as process:
        yield process


@pytest.fixture(scope="module")
def plain() -> Iterator[EngineProcess]:
    with launch_engine(base_checkpoint(), version=3) as process:
        yield process


async def findings(url: str, **options: Any) -> dict[str, Finding]:
    return {f.check: f async for f in check_engine(url, **options)}


def test_the_local_engine_keeps_the_contract(engine: EngineProcess) -> None:
    folder = base_checkpoint()
    found = asyncio.run(findings(engine.url, model=folder, reference=load_reference(folder), intrusive=True))
    assert {name: f.detail for name, f in found.items() if f.verdict != "pass"} == {}
    assert len(found) == 24
    assert "temperature-scaled" in found["log-probs, temperature"].detail


class Tampering:
    """Stands before a real engine and changes what it says."""

    def __init__(self, url: str, path: str, change: Change) -> None:
        self.url, self.path, self.change = url, path, change

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        mine = request.path == self.path
        try:
            body = json.loads(raw or b"{}")
        except ValueError:
            body = {}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self.url + request.path, data=raw) as answer,
        ):
            if answer.content_type != "text/event-stream":
                got = await answer.read()
                if mine and answer.content_type == "application/json":
                    changed = self.change(body, json.loads(got))
                    if isinstance(changed, web.Response):
                        return changed
                    got = json.dumps(changed).encode()
                return web.Response(body=got, status=answer.status, content_type=answer.content_type)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    changed = self.change(body, json.loads(line[6:]))
                    line = b"" if changed is None else b"data: " + json.dumps(changed).encode() + b"\n"
                elif line.startswith(b"data: [DONE]"):
                    line = line if self.change(body, "DONE") else b""
                await response.write(line)
            return response


def against(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], **options: Any) -> dict[str, Finding]:
    """Findings against an endpoint that answers with `handler`."""

    async def run() -> dict[str, Finding]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{tail:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        try:
            return await findings(f"http://127.0.0.1:{listener.getsockname()[1]}", **options)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def each(answer: Any) -> list[dict[str, Any]]:
    """The answer objects in an answer, event or list."""
    return [a for a in (answer if isinstance(answer, list) else [answer]) if isinstance(a, dict) and "meta_info" in a]


def shifted(body: Any, answer: Any) -> Any:
    for one in each(answer):
        entries = one["meta_info"]["output_token_logprobs"]
        values = [e[0] for e in entries]
        one["meta_info"]["output_token_logprobs"] = [
            [v, e[1], None] for v, e in zip(values[-1:] + values[:-1], entries, strict=True)
        ]
    return answer


def slightly_off(body: Any, answer: Any) -> Any:
    for one in each(answer):
        for entry in one["meta_info"]["output_token_logprobs"]:
            entry[0] -= 5e-4
    return answer


def without_stop_token(body: Any, answer: Any) -> Any:
    for one in each(answer):
        if (one["meta_info"]["finish_reason"] or {}).get("type") == "stop":
            one["output_ids"].pop()
            one["meta_info"]["output_token_logprobs"].pop()
            one["meta_info"]["completion_tokens"] -= 1
    return answer


def increments(body: Any, answer: Any) -> Any:
    if body.get("stream"):
        for one in each(answer):
            one["output_ids"] = one["output_ids"][-1:]
            one["meta_info"]["output_token_logprobs"] = one["meta_info"]["output_token_logprobs"][-1:]
    return answer


def no_done(body: Any, answer: Any) -> Any:
    return None if answer == "DONE" else answer


def other_version(body: Any, answer: Any) -> Any:
    for one in each(answer):
        one["meta_info"]["weight_version"] = "default"
    return answer


def too_long_is_cut(body: Any, answer: Any) -> Any:
    return web.json_response({"detail": "too long"}, status=422) if "error" in answer else answer


def reversed_batch(body: Any, answer: Any) -> Any:
    return answer[::-1] if isinstance(answer, list) else answer


def length_for_abort(body: Any, answer: Any) -> Any:
    for one in each(answer):
        if (one["meta_info"]["finish_reason"] or {}).get("type") == "abort":
            one["meta_info"]["finish_reason"] = {"type": "length", "length": 2000}
    return answer


def stop_unnamed(body: Any, answer: Any) -> Any:
    for one in each(answer):
        if (one["meta_info"]["finish_reason"] or {}).get("type") == "stop":
            del one["meta_info"]["finish_reason"]["matched"]
    return answer


@pytest.mark.parametrize(
    ("change", "check", "message"),
    [
        (shifted, "log-probs, teacher-forced", "from the engine's own teacher-forced pass"),
        (slightly_off, "log-probs, reference", r"off by 0\.000(49|5)\d* from the reference at temperature 1"),
        (without_stop_token, "stop token kept", "stop token .* is missing"),
        (stop_unnamed, "stop token kept", "not stop matched by"),
        (without_stop_token, "stop string", "whose last token completes"),
        (stop_unnamed, "stop string", "not stop matched by"),
        (increments, "stream", "do not start with"),
        (no_done, "stream", "does not end with data: .DONE."),
        (other_version, "weight version", "answers carry 'default'"),
        (too_long_is_cut, "too long", "HTTP 422"),
        (reversed_batch, "batch", "prompt_tokens is"),
        (length_for_abort, "abort", "ran to its end"),
    ],
)
def test_a_broken_engine_is_found_out(plain: EngineProcess, change: Change, check: str, message: str) -> None:
    folder = base_checkpoint()
    forward = Tampering(plain.url, "/generate", change)
    found = against(forward.handle, model=folder, reference=load_reference(folder))
    assert found[check].verdict == "fail"
    assert re.search(message, found[check].detail)
    assert found["information"].verdict == "pass" and found["tokenize"].verdict == "pass"


@pytest.mark.parametrize(
    ("path", "check", "message"),
    [
        ("/pause_generation", "pause and continue", "answered while the engine was paused"),
        ("/flush_cache", "prefix cache", "from the cache just after it was flushed"),
    ],
)
def test_a_control_without_effect_is_found_out(plain: EngineProcess, path: str, check: str, message: str) -> None:
    forward = Tampering(plain.url, "", lambda _, answer: answer)

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response({}) if request.path == path else await forward.handle(request)

    found = against(handle)
    assert [name for name, f in found.items() if f.verdict == "fail"] == [check]
    assert message in found[check].detail


def test_the_meaning_of_logprobs_is_told_from_differences() -> None:
    forced = [-1.0, -3.0, -2.0]
    scaled = [-0.4 - f / -2 + 0.5 for f in forced]  # any constant: only differences are known
    assert temperature_meaning(scaled, forced, 2.0, 1e-4) == "temperature-scaled"
    assert temperature_meaning(forced, forced, 2.0, 1e-4) == "original"
    with pytest.raises(Broken, match="neither"):
        temperature_meaning([-1.0, -2.5, -2.0], forced, 2.0, 1e-4)
    with pytest.raises(Skipped, match="about the same"):
        temperature_meaning([-1.0, -1.0], [-1.0, -1.001], 2.0, 1e-4)


def test_the_command_says_what_failed_with_its_exit_code(
    plain: EngineProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["engine", "conformance", "--url", plain.url, "--model", str(base_checkpoint())]) == 0
    out = capsys.readouterr().out
    assert "pass  stream" in out and "skip  out of vocabulary" in out and "keeps the contract" in out
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["engine", "conformance", "--url", f"http://127.0.0.1:{port}"]) == 1
    out = capsys.readouterr().out
    assert "fail  health" in out and "Cannot connect" in out and "1 checks failed" in out
    assert main(["engine", "conformance", "--url", plain.url, "--model", str(tmp_path)]) == 1
    assert "no config.json there" in capsys.readouterr().err
