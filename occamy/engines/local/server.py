"""HTTP face of the engine: SGLang's paths over one Scheduler. aiohttp takes less than half of FastAPI's time here."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from tokenizers import Tokenizer

from occamy.engines.config import EngineConfig
from occamy.engines.local.checkpoint import CheckpointError
from occamy.engines.local.model import Model
from occamy.engines.local.protocol import BadRequest, Generate, Limits, parse, parse_object, render
from occamy.engines.local.sampling import SamplingParams
from occamy.engines.local.scheduler import Scheduler, Sequence

Shown = tuple[Sequence, Sequence]
"""A sequence, and its state when it was reported."""

_PAUSE_MODES = ("abort", "retract", "in_place")
_HEALTH_S = 20.0


class EngineServer:
    """Routes requests to the generation thread and its results back to the requests that wait for them."""

    def __init__(self, model: Model, path: Path, version: str, config: EngineConfig) -> None:
        self._path, self._config = path, config
        self._scheduler = Scheduler(model, version, config, self._report)
        self._limits = Limits(model.spec.vocab, self._scheduler.context, model.spec.eos, lambda: self._tokenizer)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: dict[Sequence, asyncio.Queue[Shown]] = {}
        self._paused = False
        self._update = asyncio.Lock()
        self._thread = threading.Thread(target=self._scheduler.run, name="generation", daemon=True)

    @property
    def context(self) -> int:
        """Tokens of input plus output that a request may have."""
        return self._scheduler.context

    def app(self) -> web.Application:
        """The aiohttp application; starting it starts the generation thread."""
        app = web.Application(client_max_size=64 << 20, middlewares=[_errors])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/health", self._health),
                web.get("/health_generate", self._health_generate),
                web.get("/model_info", self._model_info),
                web.get("/get_model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/flush_cache", self._flush),
                web.post("/flush_cache", self._flush),
                web.post("/update_weights_from_disk", self._update_weights),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/abort_request", self._abort),
                web.post("/tokenize", self._tokenize),
            ]
        )
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)
        return app

    async def _start(self, _: web.Application) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def _stop(self, _: web.Application) -> None:
        self._scheduler.stop()
        await asyncio.to_thread(self._thread.join, 10.0)

    def _report(self, sequences: list[Sequence]) -> None:
        """Called on the generation thread: one wake-up of the event loop per step."""
        assert self._loop is not None
        # A streamed sequence goes on changing: hand over what it is now.
        shown = [(s, s if s.done else _copy(s)) for s in sequences]
        self._loop.call_soon_threadsafe(self._deliver, shown)

    def _deliver(self, sequences: list[Shown]) -> None:
        for original, sequence in sequences:
            waiter = self._waiters.get(original)
            if waiter is not None:
                waiter.put_nowait((original, sequence))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        call = parse(await request.read(), self._limits)
        async with self._submitted(call.sequences) as inbox:
            if call.stream:
                return await _stream(request, call, inbox)
            for _ in call.sequences:
                _check((await inbox.get())[1])
        answers = [render(s, call.logprobs) for s in call.sequences]
        return _json(answers if call.listed else answers[0])

    @asynccontextmanager
    async def _submitted(self, sequences: list[Sequence]) -> AsyncIterator[asyncio.Queue[Shown]]:
        """Queue `sequences`; yields the inbox of their states. What is unfinished at the end of the block is aborted:
        the client went away, or one of the batch failed, and nobody will read the rest."""
        inbox: asyncio.Queue[Shown] = asyncio.Queue()
        self._waiters |= dict.fromkeys(sequences, inbox)
        try:
            self._scheduler.submit(sequences)
            yield inbox
        finally:
            for sequence in sequences:
                del self._waiters[sequence]
            if unfinished := {s for s in sequences if not s.done}:
                self._scheduler.abort(unfinished.__contains__)

    async def _health(self, _: web.Request) -> web.Response:
        if self._scheduler.failure:
            return _json({"error": {"message": self._scheduler.failure.splitlines()[-1]}}, 503)
        return web.Response()

    async def _health_generate(self, _: web.Request) -> web.Response:
        """200 once a token was generated; 503 when none was within 20 s (SGLang's limit), as while paused."""
        params = SamplingParams(0.0, 1.0, -1, 1, frozenset(), 0)
        probe = Sequence("HEALTH_CHECK", "HEALTH_CHECK", array("i", [0]), params)
        try:
            async with asyncio.timeout(_HEALTH_S), self._submitted([probe]) as inbox:
                _check((await inbox.get())[1])
        except (TimeoutError, RuntimeError) as e:
            return _json({"error": {"message": str(e) or f"no token within {_HEALTH_S:g} s; paused or busy?"}}, 503)
        return web.Response()

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = parse_object(await request.read())
        prompt, special = body.get("prompt"), body.get("add_special_tokens", True)
        if not isinstance(prompt, str):
            raise BadRequest(f"prompt must be a text, not {type(prompt).__name__}")
        tokens = self._tokenizer.encode(prompt, add_special_tokens=special is True).ids
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": self._scheduler.context})

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """Of the first weights: others of the same vocabulary share it."""
        path = self._path / "tokenizer.json"
        if not path.is_file():
            raise BadRequest(f"{self._path} has no tokenizer.json; send token ids")
        return Tokenizer.from_file(str(path))

    async def _model_info(self, _: web.Request) -> web.Response:
        spec = self._scheduler.model.spec
        return _json(
            {
                "model_path": str(self._path),
                "tokenizer_path": str(self._path),
                "is_generation": True,
                "model_type": spec.family,
                "weight_version": self._scheduler.version,
                "vocab_size": spec.vocab,
                "context_length": self._scheduler.context,
            }
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        running, waiting = self._scheduler.load()
        state = {"running": running, "waiting": waiting, "paused": self._paused, **self._scheduler.counters}
        return _json(
            {
                "model_path": str(self._path),
                "weight_version": self._scheduler.version,
                **self._config.model_dump(),
                "context_length": self._scheduler.context,
                **state,
            }
        )

    async def _flush(self, _: web.Request) -> web.Response:
        await asyncio.wrap_future(self._scheduler.flush())
        return web.Response(text="Cache flushed.\n")

    async def _update_weights(self, request: web.Request) -> web.Response:
        """Load beside the running weights, let running sequences finish on the old ones, then swap and flush."""
        body = parse_object(await request.read())
        path = body.get("model_path")
        if not isinstance(path, str) or not path:
            raise BadRequest("model_path must name a checkpoint folder")
        if body.get("flush_cache", True) is not True:
            raise BadRequest("flush_cache = false would mix the keys of two weight versions; leave it out")
        if body.get("abort_all_requests", False) is True:
            self._scheduler.abort(lambda _: True)
        async with self._update:
            try:
                model = await asyncio.to_thread(self._load_same, Path(path))
            except (CheckpointError, OSError) as e:
                return _json({"success": False, "message": str(e)}, 400)
            version = body.get("weight_version")
            await asyncio.wrap_future(
                self._scheduler.replace(model, self._scheduler.version if version is None else str(version))
            )
            self._path = Path(path)
        return _json({"success": True, "message": f"Serving {path} as version {self._scheduler.version}."})

    def _load_same(self, path: Path) -> Model:
        model, old = type(self._scheduler.model).load(path), self._scheduler.model.spec
        changed = [k for k, v in vars(old).items() if getattr(model.spec, k) != v]
        if changed:
            raise CheckpointError(
                f"{path}: {changed[0]} is {getattr(model.spec, changed[0])!r}, the engine serves "
                f"{getattr(old, changed[0])!r}; start another engine for another architecture"
            )
        return model

    async def _pause(self, request: web.Request) -> web.Response:
        """Hold new sequences. "abort" (the default, as in SGLang) ends the others; other modes let them finish.

        SGLang's "retract" and "in_place" freeze started sequences and may end them on other weights. Here a sequence
        never sees two versions, so they run out, and the call returns when they have.
        """
        mode = parse_object(await request.read()).get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise BadRequest(f"mode {mode!r} is not one of {', '.join(_PAUSE_MODES)}")
        self._paused = True
        self._scheduler.hold(True)
        if mode == "abort":
            self._scheduler.abort(lambda _: True)
        await asyncio.wrap_future(self._scheduler.call_when_idle(lambda: None))
        return _json({"status": "ok", "message": "Generation paused successfully."})

    async def _continue(self, _: web.Request) -> web.Response:
        self._paused = False
        self._scheduler.hold(False)
        return _json({"status": "ok", "message": "Generation continued successfully."})

    async def _abort(self, request: web.Request) -> web.Response:
        body = parse_object(await request.read())
        if body.get("abort_all") is True:
            self._scheduler.abort(lambda _: True)
            return web.Response()
        rid = body.get("rid")
        if not isinstance(rid, str) or not rid:
            raise BadRequest("give rid, or abort_all: true")
        self._scheduler.abort(lambda s: rid in (s.rid, s.call))
        return web.Response()


async def _stream(request: web.Request, call: Generate, inbox: asyncio.Queue[Shown]) -> web.StreamResponse:
    """SSE: each event carries all ids so far; ends with [DONE]. Events that queued up while writing are merged.

    With many sequences each event has the `index` of its own, in the order of the request.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    index = {id(s): i for i, s in enumerate(call.sequences)}
    left = len(call.sequences)
    while left:
        latest = dict([await inbox.get()])
        while not inbox.empty():
            latest |= [inbox.get_nowait()]
        for original, state in latest.items():
            left -= state.done
            event: dict[str, Any] = {"error": {"message": state.error}} if state.error else render(state, call.logprobs)
            if call.listed:
                event["index"] = index[id(original)]
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _copy(s: Sequence) -> Sequence:
    return replace(s, output=list(s.output), logprobs=list(s.logprobs), tops=list(s.tops))


def _check(sequence: Sequence) -> None:
    if sequence.error:
        raise RuntimeError(sequence.error)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as e:
        return _json({"error": {"message": str(e)}}, 400)
    except RuntimeError as e:
        return _json({"error": {"message": str(e)}}, 500)
