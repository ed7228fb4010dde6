"""Who answers a call: the policy's engine on token ids, or a teacher whose text is tokenised once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from occamy.capture.families.family import ParsedAnswer
from occamy.capture.recorder import Call
from occamy.capture.render import Renderer
from occamy.capture.request import ChatRequest
from occamy.engines.client import EngineClient, EngineError, Generation, Sampling

_PAUSE_SECONDS = 0.05
"""Between two tries at the same answer (our choice)."""


_PASSING = frozenset({"refused", "loading", "lost", "timeout", "failed"})
"""Engine errors after which the same call may be answered."""


class EngineDownError(RuntimeError):
    """The engine gave no answer before the deadline."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Sampled ids with their behaviour log-probs and weight version (-1 for a teacher)."""

    output: list[int]
    logprobs: list[float]
    version: int
    finish: str
    engine_cached_tokens: int = 0
    faithful: bool = True
    """False when a teacher's message cannot be said in the student's tokens."""


class Backend(Protocol):
    """Answers one call. Raises EngineDownError when it cannot in time."""

    async def answer(self, episode_id: str, call: Call, request: ChatRequest) -> Answer: ...


class Teacher(Protocol):
    """Writes demonstrations: given an OpenAI request, returns the OpenAI assistant message."""

    async def complete(self, episode_id: str, request: dict[str, Any]) -> dict[str, Any]: ...


class Gate:
    """Holds calls around weight updates, so that every answer is sampled under one weight version."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._idle = asyncio.Event()
        self._open.set()
        self._idle.set()
        self._inside = 0

    async def close(self) -> None:
        """Let nobody in and wait until everybody inside has left."""
        self._open.clear()
        await self._idle.wait()

    def open(self) -> None:
        """Let calls in again."""
        self._open.set()

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Wait until the gate is open and pass."""
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._idle.set()


class EngineBackend:
    """Samples from an engine. Holds the call while the gate is closed or the engine is down, up to a deadline."""

    def __init__(self, client: EngineClient, gate: Gate, hold_seconds: float) -> None:
        self._client, self._gate, self._hold = client, gate, hold_seconds

    async def answer(self, episode_id: str, call: Call, request: ChatRequest) -> Answer:
        """Sample Y_t. An answer that the engine aborts, or loses with its connection, is sampled again."""
        sampling = Sampling(
            temperature=request.temperature,
            top_p=request.top_p,
            max_new_tokens=call.max_new_tokens,
            stop_token_ids=call.stop_ids,
            seed=call.seed if request.seed is None else request.seed,
        )
        try:
            async with asyncio.timeout(self._hold):
                got = await self._sample(call.input_ids, sampling)
        except TimeoutError as e:
            raise EngineDownError(f"no answer from the engine within {self._hold:g} s") from e
        return Answer(got.output_ids, got.logprobs, got.weight_version, got.finish_reason, got.cached_tokens)

    async def _sample(self, input_ids: list[int], sampling: Sampling) -> Generation:
        """Ask until there is a whole answer. Raises EngineError when asking again cannot help."""
        while True:
            try:
                async with self._gate.inside():
                    got = await self._client.generate(input_ids, sampling)
                if got.finish_reason != "abort":
                    return got
            except EngineError as e:
                if e.kind not in _PASSING:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)


class TeacherBackend:
    """Asks a teacher and tokenises its message once, as the student would have to sample it."""

    def __init__(self, teacher: Teacher, renderer: Renderer) -> None:
        self._teacher, self._renderer = teacher, renderer

    async def answer(self, episode_id: str, call: Call, request: ChatRequest) -> Answer:
        """Return the teacher's turn in student tokens, closing token included, log-probs 0, version -1."""
        message = await self._teacher.complete(episode_id, request.body)
        output = list(self._renderer.answer({**message, "role": "assistant"}))
        said = self._renderer.parse(output[:-1])
        return Answer(output, [0.0] * len(output), -1, "stop", faithful=_says(said, message))


def _says(said: ParsedAnswer, message: dict[str, Any]) -> bool:
    """True if the tokens mean the message: same calls with equal argument values, or same text but for spaces."""
    calls = message.get("tool_calls") or []
    if not calls:
        return not said.calls and _bare(said.content) == _bare(message.get("content"))
    wanted = [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
    return len(wanted) == len(said.calls) and all(
        name == got.name and _same_json(arguments, got.arguments)
        for (name, arguments), got in zip(wanted, said.calls, strict=True)
    )


def _bare(text: str | None) -> str:
    return "".join((text or "").split())


def _same_json(a: str, b: str) -> bool:
    try:
        return bool(orjson.loads(a) == orjson.loads(b))
    except orjson.JSONDecodeError:
        return a == b
