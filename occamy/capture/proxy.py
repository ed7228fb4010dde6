"""The OpenAI-compatible face of the recorder: routes, keys, errors. One event loop, no model on the hot path."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from occamy.capture.answer import Answered, chat_answer, text_answer
from occamy.capture.backends import Answer, Backend, EngineDownError, Hold
from occamy.capture.call import Call, ContextLimitError, EngineAnswerError
from occamy.capture.episodes import Episode, Episodes, SampledBy
from occamy.capture.metrics import CONTENT_TYPE, Metrics
from occamy.capture.render import Renderer
from occamy.capture.request import REWRITES, ApiError, ChatRequest, TextRequest, parse_chat, parse_text
from occamy.capture.stream import GONE, Delivery
from occamy.capture.template import TemplateError
from occamy.capture.turn import Exchange
from occamy.contracts.episode import QuarantineReason

_LOG = logging.getLogger(__name__)

_ROLE = re.compile(r"root|sub|aux[a-z0-9-]*")
_REWRITE_HEADER = "x-occamy-rewrite"

MAX_BODY = 64 << 20
"""Bytes of a request body (our choice: some ten times the JSON of a million tokens of text)."""


@dataclass(frozen=True, slots=True)
class _Incoming:
    """A call that is on record and about to be sampled."""

    episode: Episode
    call: Call
    request: ChatRequest | TextRequest
    started: float


class Proxy:
    """The endpoints that harnesses call."""

    def __init__(
        self,
        renderer: Renderer,
        episodes: Episodes,
        backends: dict[SampledBy, Backend],
        *,
        context_limit: int,
        hold_seconds: float,
        metrics: Metrics,
        delivery: Delivery,
    ) -> None:
        self._renderer, self._episodes, self._backends = renderer, episodes, backends
        self._limit, self._hold, self._metrics, self._delivery = context_limit, hold_seconds, metrics, delivery

    async def chat(self, request: Request) -> Response:
        """POST chat/completions."""
        return await self._guarded(self._chat(request), "messages")

    async def completions(self, request: Request) -> Response:
        """POST completions: a raw prompt, in a run of its own."""
        return await self._guarded(self._completions(request), "prompt")

    async def models(self, request: Request) -> Response:
        """GET models, GET models/{model}: the one model behind the episode, with its context in vLLM's and others'
        spelling."""
        return await self._guarded(self._models(request), "model")

    async def _chat(self, request: Request) -> Response:
        episode, role = self._authorise(request)
        started, raw = time.perf_counter(), await read_body(request)
        chat = parse_chat(raw, episode.bodies)
        rewrite = request.headers.get(_REWRITE_HEADER)
        if rewrite is not None and rewrite not in REWRITES:
            raise ApiError(400, f"{_REWRITE_HEADER}: {rewrite!r} is none of {', '.join(REWRITES)}", "invalid_value")
        episode.refuse_closed()
        episode.refuse_over_budget()
        wanted = chat.options.wanted
        with episode.beginning():
            call = episode.recorder.begin(role, chat.messages, chat.tools, rewrite=rewrite, wanted=wanted)
        episode.bodies.keep(chat.read)
        return await self._answer(request, _Incoming(episode, call, chat, started), chat_answer)

    async def _completions(self, request: Request) -> Response:
        episode, role = self._authorise(request)
        started, raw = time.perf_counter(), await read_body(request)
        asked = parse_text(raw)
        ids = self._renderer.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
        episode.refuse_closed()
        episode.refuse_over_budget()
        with episode.beginning():
            call = episode.recorder.begin_text(role, ids, wanted=asked.options.wanted)
        return await self._answer(request, _Incoming(episode, call, asked, started), text_answer)

    async def _models(self, request: Request) -> Response:
        episode, _ = self._authorise(request)
        model = {
            "id": episode.setup.sampled_by,
            "object": "model",
            "created": 0,
            "owned_by": "occamy",
            "max_model_len": self._limit,
            "context_length": self._limit,
        }
        return json_response(model if request.path_params.get("model") else {"object": "list", "data": [model]})

    async def _guarded(self, work: Coroutine[Any, Any, Response], param: str) -> Response:
        """Turn what is refused before it is sampled into an answer in OpenAI's error format."""
        try:
            return await work
        except ClientDisconnect:
            return Response(status_code=GONE)
        except ApiError as e:
            error = e
        except ContextLimitError as e:
            error = ApiError(400, str(e), "context_length_exceeded", param=param)
        except TemplateError as e:
            error = ApiError(400, str(e), "template_refused", param=param)
        except orjson.JSONEncodeError as e:
            error = ApiError(400, f"the body is nested too deeply to be recorded: {e}", "invalid_value", param=param)
        self._metrics.refused(error.code)
        return error_response(error)

    def _authorise(self, request: Request) -> tuple[Episode, str]:
        """Return the open episode and role of the path. Raises ApiError 401, 403 or 404."""
        episode = self._episodes.authorise(request.path_params["episode"], bearer(request))
        role: str = request.path_params["run"]
        if not _ROLE.fullmatch(role):
            raise ApiError(404, f"run {role!r} is none of root, sub, aux…", "unknown_run")
        return episode, role

    async def _answer(
        self, request: Request, incoming: _Incoming, render: Callable[[Answered, Callable[..., str]], bytes]
    ) -> Response:
        async def work() -> bytes:
            self._metrics.in_flight += 1
            try:
                with incoming.episode.asking():
                    answered = await self._complete(incoming)
                return render(answered, self._renderer.decode)
            except Exception as e:
                told = await self._told(incoming.episode, e)
                self._metrics.refused(told.code)
                raise told from e
            finally:
                self._metrics.in_flight -= 1

        return await self._delivery.deliver(request, asyncio.create_task(work()), incoming.request.options.stream)

    async def _complete(self, incoming: _Incoming) -> Answered:
        """Sample and record. A cancelled call leaves no trace, unless its answer was there already."""
        episode, call = incoming.episode, incoming.call
        recorder = episode.recorder
        hold = Hold(self._hold, self._metrics)
        try:
            async with episode.gate.inside(hold):
                backend = self._backends[episode.setup.sampled_by]
                answer = await backend.answer(recorder.episode_id, call, incoming.request, hold)
                episode.refuse_closed()
        except BaseException:
            recorder.abandon(call)
            raise
        return await self._record(incoming, answer)

    async def _record(self, incoming: _Incoming, answer: Answer) -> Answered:
        episode, call, options = incoming.episode, incoming.call, incoming.request.options
        recorder = episode.recorder
        turn, message = recorder.finish(call, answer.output, answer.logprobs, answer.version, answer.finish)
        if not answer.faithful:
            recorder.set_quarantine(QuarantineReason.token_mismatch)
        sampling = orjson.dumps(
            {
                "max_new_tokens": call.max_new_tokens,
                "seed": call.seed if options.seed is None else options.seed,
                "stop_token_ids": call.stop_ids,
                "stop": call.wanted.stop,
            }
        ).decode()
        seconds = time.perf_counter() - incoming.started
        exchange = Exchange(incoming.request.digest, call.history.hex(), sampling, answer.engine_cached_tokens, seconds)
        await self._episodes.add_turn(episode, turn, exchange)
        self._metrics.answered(turn.prefix, turn.prompt_tokens, turn.cached_tokens, len(turn.output), seconds)
        return Answered(recorder.episode_id, turn, message, options)

    async def _told(self, episode: Episode, error: Exception) -> ApiError:
        """What the harness is told when there is no answer: a fault of ours is never the policy's."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, TemplateError):
            return ApiError(400, str(error), "template_refused", param="messages")
        if isinstance(error, EngineAnswerError):
            await self._episodes.quarantine(episode, error.reason)
            ours = error.reason is QuarantineReason.token_mismatch
            return ApiError(500, str(error), "token_mismatch" if ours else "backend_failed")
        await self._episodes.quarantine(episode, QuarantineReason.infra_failed)
        if isinstance(error, EngineDownError):
            return ApiError(503, str(error), "engine_unavailable")
        _LOG.error("episode %s: the backend failed", episode.recorder.episode_id, exc_info=error)
        return ApiError(500, f"the backend failed: {error!r}", "backend_failed")


def build_app(proxy: Proxy, metrics: Metrics, episodes: Episodes) -> FastAPI:
    """Return the ASGI app. Plain routes: FastAPI's own ones cost a call more than the whole recorder."""

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.text(len(episodes)), headers={"content-type": CONTENT_TYPE})

    app = FastAPI(title="occamy capture", openapi_url=None, docs_url=None, redoc_url=None)
    base = "/episodes/{episode}/{run}/v1"
    app.add_route(f"{base}/chat/completions", proxy.chat, methods=["POST"])
    app.add_route(f"{base}/completions", proxy.completions, methods=["POST"])
    app.add_route(f"{base}/models", proxy.models, methods=["GET"])
    app.add_route(f"{base}/models/{{model:path}}", proxy.models, methods=["GET"])
    app.add_route("/healthz", _healthz, methods=["GET"])
    app.add_route("/metrics", show_metrics, methods=["GET"])
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _broken)
    return app


async def read_body(request: Request) -> bytes:
    """Return the request's body. Raises ApiError 413 as soon as it is larger than `MAX_BODY`."""
    told = request.headers.get("content-length", "")
    size, parts = 0, []
    if not (told.isdigit() and int(told) > MAX_BODY):
        async for part in request.stream():
            size += len(part)
            parts.append(part)
            if size > MAX_BODY:
                break
        else:
            return b"".join(parts)
    raise ApiError(413, f"the body is larger than {MAX_BODY} bytes", "request_too_large")


def bearer(request: Request) -> str | None:
    """Return the bearer token, if there is one."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else None


def json_response(body: Any, status: int = 200) -> Response:
    """Answer in JSON."""
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """Answer in OpenAI's error format."""
    return Response(error.body(), status_code=error.status, media_type="application/json")


async def _healthz(request: Request) -> Response:
    return json_response({"status": "ok"})


async def _no_route(request: Request, error: Exception) -> Response:
    """Harnesses probe for other servers' endpoints: a plain 404 tells them that these are not here."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    return error_response(ApiError(status, f"no {request.method} {request.url.path} here", "not_found"))


async def _broken(request: Request, error: Exception) -> Response:
    """A defect of ours, which uvicorn logs."""
    return error_response(ApiError(500, f"the proxy failed: {error!r}", "internal_error"))
