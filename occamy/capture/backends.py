"""Who answers a call: the policy's engine on token ids, or a teacher whose text is tokenised once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from occamy.capture.call import Call
from occamy.capture.families.family import ParsedAnswer
from occamy.capture.metrics import Metrics
from occamy.capture.render import Renderer
from occamy.capture.request import ApiError, ChatRequest, TextRequest
from occamy.engines.client import EngineClient, EngineError, Sampling

_PAUSE_SECONDS = 0.05
"""Between two tries at the same answer (our choice)."""

_PASSING = frozenset({"refused", "loading", "lost", "failed"})
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

    async def answer(self, episode_id: str, call: Call, request: ChatRequest | TextRequest, hold: Hold) -> Answer: ...


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
        self._closing = asyncio.Lock()

    async def close(self, seconds: float) -> None:
        """Let nobody in and wait until everybody inside has left. Opens again and raises TimeoutError after that."""
        async with self._closing:
            self._open.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._idle.wait()
            except BaseException:
                self._open.set()
                raise

    def open(self) -> None:
        """Let calls in again."""
        self._open.set()

    @asynccontextmanager
    async def inside(self, hold: Hold) -> AsyncIterator[None]:
        """Wait until the gate is open and pass. Raises EngineDownError at the deadline of `hold`."""
        while not self._open.is_set():
            await hold.until(self._open.wait())
        self._inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._idle.set()


class Hold:
    """How long one call has waited for something other than its answer. The clock starts at its first wait."""

    def __init__(self, seconds: float, metrics: Metrics) -> None:
        self._seconds, self._metrics, self._deadline = seconds, metrics, 0.0

    async def until(self, ready: Coroutine[Any, Any, Any], why: BaseException | None = None) -> None:
        """Wait for `ready`. Raises EngineDownError, from `why`, when the call has been held too long."""
        now = asyncio.get_running_loop().time()
        self._deadline = self._deadline or now + self._seconds
        self._metrics.held += 1
        try:
            async with asyncio.timeout_at(self._deadline):
                await ready
        except TimeoutError as e:
            waited = f"no answer from the engine within {self._seconds:g} s"
            raise EngineDownError(f"{waited}: {why}" if why else f"{waited}: calls are paused") from why or e
        finally:
            self._metrics.held -= 1


class EngineBackend:
    """Samples from an engine. Holds the call while the gate is closed or the engine is down."""

    def __init__(self, client: EngineClient, gate: Gate) -> None:
        self._client, self._gate = client, gate

    async def answer(self, episode_id: str, call: Call, request: ChatRequest | TextRequest, hold: Hold) -> Answer:
        """Sample Y_t. An answer that the engine aborts, or loses with its connection, is sampled again.

        Raises EngineDownError at the deadline of `hold` or when the engine works longer on one answer than its client
        allows, EngineError when asking again cannot help.
        """
        options = request.options
        sampling = Sampling(
            temperature=options.temperature,
            top_p=options.top_p,
            max_new_tokens=call.max_new_tokens,
            stop_token_ids=call.stop_ids,
            stop=call.wanted.stop,
            seed=call.seed if options.seed is None else options.seed,
        )
        prompt = orjson.Fragment(call.step.prompt_json())
        while True:
            failure: EngineError | None = None
            try:
                async with self._gate.inside(hold):
                    got = await self._client.generate(prompt, sampling)
                if got.finish_reason != "abort":
                    return Answer(
                        got.output_ids, got.logprobs, got.weight_version, got.finish_reason, got.cached_tokens
                    )
            except EngineError as e:
                if e.kind == "timeout":
                    raise EngineDownError(str(e)) from e
                if e.kind not in _PASSING:
                    raise
                failure = e
            await hold.until(asyncio.sleep(_PAUSE_SECONDS), failure)


class TeacherBackend:
    """Asks a teacher and tokenises its message once, as the student would have to sample it."""

    def __init__(self, teacher: Teacher, renderer: Renderer) -> None:
        self._teacher, self._renderer = teacher, renderer

    async def answer(self, episode_id: str, call: Call, request: ChatRequest | TextRequest, hold: Hold) -> Answer:
        """Return the teacher's turn in student tokens, closing token included, log-probs 0, version -1.

        Raises ApiError 400 for a raw prompt.
        """
        if not isinstance(request, ChatRequest):
            raise ApiError(400, "a teacher answers chat completions only", "unsupported_value", param="prompt")
        asked = {key: value for key, value in request.body.items() if not key.startswith("stream")}
        message = await self._teacher.complete(episode_id, asked)
        output = list(self._renderer.answer({**message, "role": "assistant"}))
        said = self._renderer.parse(output[:-1], request.tools)
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
