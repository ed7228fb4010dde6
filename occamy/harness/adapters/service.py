"""The launcher of agent services: programs that run elsewhere and drive an episode from there.

One request, ``POST {url}/runs``: request, model endpoint, tools and budget. Its answer comes when the run has ended.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import aiohttp
from pydantic import ValidationError

from occamy.contracts.episode import Outcome
from occamy.contracts.record import Record
from occamy.contracts.task import Budget
from occamy.harness.adapters.declaration import Service
from occamy.harness.adapters.ending import Ended
from occamy.harness.assignment import Assignment

if TYPE_CHECKING:
    from occamy.worlds.mcp import ToolAccess


class ModelAccess(Record):
    """Where the service samples."""

    base: str
    """Up to the run: the root agent calls ``{base}/root/v1``, a sub-task ``{base}/sub/v1``, and housekeeping the run
    that the adapter declares for it."""
    key: str
    name: str
    temperature: float
    max_new_tokens: int
    context_limit: int


class RunRequest(Record):
    """What a service is asked."""

    request: str
    """The user's words."""
    model: ModelAccess
    tools_url: str
    """MCP over streamable HTTP."""
    tools_key: str
    budget: Budget


class RunAnswer(Record):
    """What a service answers when its run has ended."""

    outcome: Outcome
    answer: str = ""
    error: str = ""


async def drive(service: Service, task: Assignment, access: ToolAccess) -> Ended:
    """Ask the service to play the episode and wait for its end. A service that fails is infra_failed."""
    url = os.environ.get(service.url_from, "")
    if not url:
        return Ended(Outcome.infra_failed, error=f"{service.url_from} is not set; give it the URL of the service")
    model = ModelAccess(
        base=task.base_url.removesuffix("/root/v1"),
        key=task.api_key,
        name=task.model,
        temperature=task.temperature,
        max_new_tokens=task.max_new_tokens,
        context_limit=task.context_limit,
    )
    asked = RunRequest(
        request=task.request, model=model, tools_url=access.url, tools_key=access.key, budget=task.budget
    )
    try:
        async with asyncio.timeout(task.budget.wall_seconds):
            return await _ask(task.http, f"{url}/runs", asked.model_dump(mode="json"))
    except TimeoutError:
        return Ended(Outcome.timed_out, error=f"wall time of {task.budget.wall_seconds:g} s is used up")


async def _ask(http: aiohttp.ClientSession, url: str, asked: dict[str, Any]) -> Ended:
    try:
        async with http.post(url, json=asked) as response:
            status, data = response.status, await response.read()
    except (aiohttp.ClientError, OSError) as e:
        return Ended(Outcome.infra_failed, error=f"{url}: {type(e).__name__}: {e}")
    try:
        said = RunAnswer.model_validate_json(data)
    except ValidationError:
        return Ended(Outcome.infra_failed, error=f"{url}: HTTP {status}, no run answer: {data[:200]!r}")
    return Ended(said.outcome, said.answer, said.error)
