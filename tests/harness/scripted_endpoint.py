"""An OpenAI-compatible endpoint that answers from a script, and a harness run against it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from occamy.contracts.task import Budget
from occamy.harness.agent import ComposedHarness
from occamy.harness.assignment import AgentRun, Assignment, Harness
from occamy.harness.client import open_http
from occamy.harness.compose import resolve
from occamy.harness.loading import load

TOOLS = [{"type": "function", "function": {"name": "crm_get", "parameters": {"type": "object"}}}]
REQUEST = "mark crm A01 as gold"
GET = ("crm_get", '{"id":"A01"}')
BAD = ("crm_bad", "{}")
TOO_LONG = (400, {"error": {"message": "maximum context length is 64", "code": "context_length_exceeded"}})

Brain = Callable[[dict[str, Any]], Any]
"""Request body -> step: a completion, (status, body), (status, body, seconds before it), or seconds to sleep."""


@dataclass(frozen=True)
class Result:
    content: str
    ok: bool = True
    error: str | None = None


def default_tool(name: str, arguments: str) -> Result:
    return Result("ok") if name != "crm_bad" else Result('{"error":"not_found"}', False, "not_found")


@dataclass
class Endpoint:
    """Answers requests from a list, whose last step repeats, or by a function; keeps what it was sent."""

    script: list[Any] | Brain
    bodies: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    rewrites: list[str | None] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    """Last part of the URL before /v1, per request."""

    async def answer(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = json.loads(raw)
        self.raw.append(raw)
        self.bodies.append(body)
        self.rewrites.append(request.headers.get("x-occamy-rewrite"))
        self.keys.append(request.headers.get("authorization"))
        self.runs.append(request.match_info["run"])
        step = self._step(body)
        if isinstance(step, float):
            await asyncio.sleep(step)
            step = text("late")
        status, body, *delay = step if isinstance(step, tuple) else (200, step)
        await asyncio.sleep(sum(delay))
        return web.Response(status=status, body=body if isinstance(body, bytes) else orjson.dumps(body))

    def _step(self, body: dict[str, Any]) -> Any:
        if not isinstance(self.script, list):
            return self.script(body)
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


def calls(*pairs: tuple[str, str], prompt: int = 10, output: int = 5, finish: str = "tool_calls") -> dict[str, Any]:
    tool_calls = [
        {"id": f"call{n}{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(pairs)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": tool_calls}
    return completion(message, prompt, output, finish)


def text(content: str, prompt: int = 10, output: int = 5, finish: str = "stop") -> dict[str, Any]:
    return completion({"role": "assistant", "content": content}, prompt, output, finish)


def completion(message: dict[str, Any], prompt: int, output: int, finish: str) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}


def composed(*middleware: dict[str, Any], **more: Any) -> Harness:
    return ComposedHarness(resolve({"name": "c", "middleware": list(middleware), **more}))


def contents(body: dict[str, Any]) -> list[str]:
    return [f"{m['role']}:{m['content']}" for m in body["messages"]]


def play(
    script: Sequence[Any] | Brain,
    harness: Harness | None = None,
    budget: Budget | None = None,
    tool: Callable[[str, str], Any] = default_tool,
) -> tuple[AgentRun, Endpoint, list[tuple[str, str]]]:
    """Run an agent against a script. Returns its run, the endpoint and what was dispatched."""
    endpoint = Endpoint(list(script) if isinstance(script, Sequence) else script)
    dispatched: list[tuple[str, str]] = []

    def dispatch(name: str, arguments: str) -> Any:
        dispatched.append((name, arguments))
        return tool(name, arguments)

    async def run() -> AgentRun:
        app = web.Application()
        app.router.add_post("/episodes/e/{run}/v1/chat/completions", endpoint.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        task = Assignment(
            request=REQUEST,
            tools=TOOLS,
            dispatch=dispatch,
            budget=budget or Budget(turns=20, tool_calls=20, tokens=1000),
            base_url=f"http://127.0.0.1:{port}/episodes/e/root/v1",
            api_key="key",
            model="nano",
            temperature=1.0,
            max_new_tokens=48,
            http=open_http(),
        )
        try:
            async with task.http:
                return await (harness or load("react")).run(task)
        finally:
            await runner.cleanup()

    return asyncio.run(run()), endpoint, dispatched
