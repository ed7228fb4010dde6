"""The OpenAI-compatible face of the recorder: routes, keys, errors, usage. One event loop, no model on the hot path."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import sqlite3
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from fastapi import FastAPI, Request, Response

from occamy.capture.backends import Answer, Backend, EngineDownError
from occamy.capture.messages import Message
from occamy.capture.recorder import Call, ContextLimitError, EngineAnswerError, Recorder
from occamy.capture.render import Renderer
from occamy.capture.request import REWRITES, ApiError, ChatRequest, parse_chat
from occamy.capture.segments import CapturedEpisode, capture_episode
from occamy.capture.store import Store
from occamy.capture.template import TemplateError
from occamy.capture.turn import Exchange, Turn
from occamy.contracts.capture import CaptureRules
from occamy.contracts.episode import QuarantineReason

_LOG = logging.getLogger(__name__)

SampledBy = Literal["policy", "teacher"]

_ROLE = re.compile(r"root|sub|aux[a-z0-9]*")
_REWRITE_HEADER = "x-occamy-rewrite"


@dataclass(slots=True)
class _Episode:
    recorder: Recorder
    key: str
    sampled_by: SampledBy
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False


class Proxy:
    """Open episodes and the two endpoints that harnesses call. `open` and `close` may be called from any thread."""

    def __init__(
        self, renderer: Renderer, store: Store, backends: dict[SampledBy, Backend], context_limit: int
    ) -> None:
        self._renderer, self._store, self._backends, self._limit = renderer, store, backends, context_limit
        self._episodes: dict[str, _Episode] = {}
        self._keys: dict[str, str] = {}

    def open(self, episode_id: str, *, sampled_by: SampledBy, seed: int, rules: CaptureRules) -> str:
        """Start an episode and return its key. Raises ValueError on an id that is open or finished, or a sampler that
        this proxy lacks."""
        if sampled_by not in self._backends:
            raise ValueError(f"episode {episode_id}: no {sampled_by} behind this proxy; pass its engine URL or teacher")
        if episode_id in self._episodes:
            raise ValueError(f"episode {episode_id} is open already; close it first")
        self._store.open_episode(episode_id, sampled_by)
        key = secrets.token_hex(16)
        recorder = Recorder(episode_id, self._renderer, seed=seed, rules=rules, context_limit=self._limit)
        self._keys[key] = episode_id
        self._episodes[episode_id] = _Episode(recorder, key, sampled_by)
        return key

    def close(self, episode_id: str) -> CapturedEpisode:
        """End an episode; calls still in flight are dropped. Raises KeyError when it is not open."""
        if episode_id not in self._episodes:
            raise KeyError(f"episode {episode_id} is not open")
        episode = self._episodes.pop(episode_id)
        self._keys.pop(episode.key, None)
        recorder = episode.recorder
        with episode.lock:
            episode.closed = True
            self._store.close_episode(episode_id, recorder.quarantine)
        return capture_episode(episode_id, episode.sampled_by, recorder.turns, recorder.quarantine)

    async def chat(self, request: Request) -> Response:
        """POST chat/completions."""
        try:
            episode, role = self._authorise(request)
            return Response(await self._complete(episode, role, request), media_type="application/json")
        except ApiError as e:
            return _error(e)
        except ContextLimitError as e:
            return _error(ApiError(400, str(e), "context_length_exceeded", param="messages"))
        except TemplateError as e:
            return _error(ApiError(400, str(e), "template_refused", param="messages"))

    async def models(self, request: Request) -> Response:
        """GET models: the one model behind the episode."""
        try:
            episode, _ = self._authorise(request)
        except ApiError as e:
            return _error(e)
        model = {"id": episode.sampled_by, "object": "model", "created": 0, "owned_by": "occamy"}
        return Response(orjson.dumps({"object": "list", "data": [model]}), media_type="application/json")

    def _authorise(self, request: Request) -> tuple[_Episode, str]:
        """Return the open episode and role of the path. Raises ApiError 401, 403 or 404."""
        episode_id, role = request.path_params["episode"], request.path_params["run"]
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        owner = self._keys.get(key) if scheme.lower() == "bearer" else None
        if owner is None:
            raise ApiError(401, "no open episode has this key; send it as a bearer token", "invalid_api_key")
        if owner != episode_id:
            raise ApiError(403, f"this key does not open episode {episode_id!r}", "wrong_episode")
        if not _ROLE.fullmatch(role):
            raise ApiError(404, f"run {role!r} is none of root, sub, aux…", "unknown_run")
        return self._episodes[episode_id], role

    async def _complete(self, episode: _Episode, role: str, request: Request) -> bytes:
        raw = await request.body()
        started = time.perf_counter()
        chat = parse_chat(raw)
        recorder = episode.recorder
        rewrite = request.headers.get(_REWRITE_HEADER)
        if rewrite is not None and rewrite not in REWRITES:
            raise ApiError(400, f"{_REWRITE_HEADER}: {rewrite!r} is none of {', '.join(REWRITES)}", "invalid_value")
        stop_ids = tuple(self._stop_id(text) for text in chat.stop)
        with episode.lock:
            _refuse_closed(episode)
            call = recorder.begin(
                role, chat.messages, chat.tools, rewrite=rewrite, max_tokens=chat.max_tokens, stop_ids=stop_ids
            )
        try:
            answer = await self._backends[episode.sampled_by].answer(recorder.episode_id, call, chat)
        except BaseException as e:
            recorder.abandon(call)
            raise _unanswered(recorder, e) from e
        with episode.lock:
            turn, message = self._record(episode, call, answer, chat, hashlib.sha256(raw).hexdigest(), started)
        return self._response(recorder.episode_id, turn, message, chat)

    def _record(
        self, episode: _Episode, call: Call, answer: Answer, chat: ChatRequest, digest: str, started: float
    ) -> tuple[Turn, Message]:
        recorder = episode.recorder
        if episode.closed:
            recorder.abandon(call)
            _refuse_closed(episode)
        try:
            turn, message = recorder.finish(call, answer.output, answer.logprobs, answer.version, answer.finish)
        except EngineAnswerError as e:
            raise ApiError(500, str(e), "token_mismatch") from e
        if not answer.faithful:
            recorder.set_quarantine(QuarantineReason.token_mismatch)
        sampling = orjson.dumps(
            {
                "temperature": chat.temperature,
                "top_p": chat.top_p,
                "max_new_tokens": call.max_new_tokens,
                "seed": call.seed if chat.seed is None else chat.seed,
                "stop_token_ids": call.stop_ids,
            }
        ).decode()
        seconds = time.perf_counter() - started
        exchange = Exchange(digest, call.history.hex(), sampling, answer.engine_cached_tokens, seconds)
        try:
            self._store.add_turn(recorder.episode_id, turn, exchange)
        except sqlite3.Error as e:
            recorder.set_quarantine(QuarantineReason.incomplete_capture)
            raise ApiError(500, f"the turn could not be stored: {e}", "capture_failed") from e
        return turn, message

    def _stop_id(self, text: str) -> int:
        token = self._renderer.single_token(text)
        if token is None:
            raise ApiError(400, f"stop: {text!r} is not one token of this model", "unsupported_value", param="stop")
        return token

    def _response(self, episode_id: str, turn: Turn, message: Message, chat: ChatRequest) -> bytes:
        finish = "length" if turn.finish == "length" else "tool_calls" if "tool_calls" in message else "stop"
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        if chat.logprobs and turn.version >= 0:
            choice["logprobs"] = {"content": self._logprobs(turn)}
        prompt, sampled = turn.prompt_tokens, len(turn.output)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
        }
        return orjson.dumps(
            {
                "id": f"chatcmpl-{episode_id}-{turn.ordinal}-{turn.attempt}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": chat.model,
                "choices": [choice],
                "usage": usage,
            }
        )

    def _logprobs(self, turn: Turn) -> list[dict[str, Any]]:
        texts = [self._renderer.decode([i]) for i in turn.output]
        return [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, turn.logprobs, strict=True)
        ]


def build_app(proxy: Proxy) -> FastAPI:
    """Return the ASGI app. Plain routes: FastAPI's own ones cost a call more than the whole recorder."""
    app = FastAPI(title="occamy capture", openapi_url=None, docs_url=None, redoc_url=None)
    base = "/episodes/{episode}/{run}/v1"
    app.add_route(f"{base}/chat/completions", proxy.chat, methods=["POST"])
    app.add_route(f"{base}/models", proxy.models, methods=["GET"])
    app.add_route("/healthz", _healthz, methods=["GET"])
    return app


async def _healthz(request: Request) -> Response:
    return Response(b'{"status":"ok"}', media_type="application/json")


def _refuse_closed(episode: _Episode) -> None:
    if episode.closed:
        raise ApiError(404, f"episode {episode.recorder.episode_id} is closed", "episode_closed")


def _unanswered(recorder: Recorder, error: BaseException) -> BaseException:
    """What the harness is told when nobody answered: a fault of ours is never the policy's."""
    if isinstance(error, TemplateError) or not isinstance(error, Exception):
        return error
    recorder.set_quarantine(QuarantineReason.infra_failed)
    if isinstance(error, EngineDownError):
        return ApiError(503, str(error), "engine_unavailable")
    _LOG.exception("episode %s: the backend failed", recorder.episode_id, exc_info=error)
    return ApiError(500, f"the backend failed: {error!r}", "backend_failed")


def _error(error: ApiError) -> Response:
    return Response(error.body(), status_code=error.status, media_type="application/json")
