"""The admin API of a proxy: open, read, pause, resume and close episodes. Its own key; harnesses never get it."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Literal
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError

from occamy.capture.backends import Gate
from occamy.capture.episodes import Episodes
from occamy.capture.proxy import bearer, error_response, json_response, read_body
from occamy.capture.request import ApiError
from occamy.capture.turn import Turn
from occamy.contracts.capture import CaptureRules, EpisodeSetup, MixedVersions
from occamy.contracts.record import Record
from occamy.contracts.task import Budget

BASE = "/admin/episodes/{episode}"


class OpenRequest(Record):
    """Body of POST /admin/episodes/{id}."""

    sampled_by: Literal["policy", "teacher"] = "policy"
    """Who answers its calls."""
    seed: int
    """Fixes sampling seeds and tool-call ids."""
    rules: CaptureRules = CaptureRules()
    """What the harness declares."""
    mixed_versions: MixedVersions = "between_turns"
    """Where the weights may change inside it."""
    budget: Budget | None = None
    """Turns and sampled tokens after which its calls are refused."""


def add_admin(app: FastAPI, key: str, episodes: Episodes, gate: Gate, pause_seconds: float) -> None:
    """Add the admin routes to `app`; `gate` holds all calls of the proxy.

    A pause waits for calls in flight, at most `pause_seconds`.
    """
    admin = _Admin(episodes, gate, pause_seconds)

    def add(path: str, method: str, handler: Callable[[Request], Awaitable[Response]]) -> None:
        async def guarded(request: Request) -> Response:
            if not hmac.compare_digest((bearer(request) or "").encode(), key.encode()):
                return error_response(ApiError(401, "the admin API needs the admin key", "invalid_api_key"))
            try:
                return await handler(request)
            except ApiError as e:
                return error_response(e)
            except KeyError as e:
                return error_response(ApiError(404, str(e.args[0]), "episode_not_open"))
            except TimeoutError:
                message = f"calls in flight did not finish within {pause_seconds:g} s; nothing is paused"
                return error_response(ApiError(503, message, "still_sampling"))

        app.add_route(path, guarded, methods=[method])

    add("/admin/episodes", "GET", admin.list)
    add(BASE, "POST", admin.open)
    add(BASE, "GET", admin.read)
    add(f"{BASE}/close", "POST", admin.close)
    add(f"{BASE}/pause", "POST", admin.pause)
    add(f"{BASE}/resume", "POST", admin.resume)
    add("/admin/pause", "POST", admin.pause)
    add("/admin/resume", "POST", admin.resume)


class _Admin:
    def __init__(self, episodes: Episodes, gate: Gate, pause_seconds: float) -> None:
        self._episodes, self._gate, self._seconds = episodes, gate, pause_seconds

    async def list(self, request: Request) -> Response:
        """The open episodes' ids."""
        return json_response({"episodes": self._episodes.ids()})

    async def open(self, request: Request) -> Response:
        """Start an episode; the answer has its key. An id that was captured before is not taken again."""
        episode_id = request.path_params["episode"]
        try:
            asked = OpenRequest.model_validate_json(await read_body(request))
        except ValidationError as e:
            raise ApiError(400, str(e), "invalid_value", param="body") from e
        try:
            if await self._is_captured(episode_id):
                raise ValueError(f"episode {episode_id} was captured already; choose another id")
            key = await self._episodes.open(episode_id, EpisodeSetup(**dict(asked)))
        except ValueError as e:
            raise ApiError(409, str(e), "episode_not_new") from e
        path = f"/episodes/{quote(episode_id, safe='')}/root/v1"
        return json_response({"episode_id": episode_id, "api_key": key, "path": path}, 201)

    async def read(self, request: Request) -> Response:
        """What an episode, open or closed, has on record."""
        episode_id = request.path_params["episode"]
        turns, quarantine = await self._episodes.turns(episode_id)
        state = {
            "episode_id": episode_id,
            "open": episode_id in self._episodes.ids(),
            "quarantine": quarantine,
            "classes": Counter(turn.prefix.value for turn in turns),
            "turns": [_turn(turn) for turn in turns],
        }
        return json_response(state)

    async def close(self, request: Request) -> Response:
        """End an episode for good; the store keeps its turns."""
        captured = await self._episodes.close(request.path_params["episode"])
        segments = [
            {
                "run": segment.run,
                "index": segment.index,
                "closed_by": segment.closed_by,
                "tokens": len(segment.tokens),
                "targets": int(segment.mask.sum()),
            }
            for segment in captured.segments
        ]
        summary = {"episode_id": captured.episode_id, "quarantine": captured.quarantine, "segments": segments}
        return json_response(summary)

    async def pause(self, request: Request) -> Response:
        """Hold new calls and wait until no call is being sampled: of one episode, or of all."""
        await self._gate_of(request).close(self._seconds)
        return json_response({"paused": True})

    async def resume(self, request: Request) -> Response:
        """Let held calls go on."""
        self._gate_of(request).open()
        return json_response({"paused": False})

    async def _is_captured(self, episode_id: str) -> bool:
        try:
            turns, _ = await self._episodes.turns(episode_id)
        except KeyError:
            return False
        return bool(turns)

    def _gate_of(self, request: Request) -> Gate:
        episode_id = request.path_params.get("episode")
        return self._gate if episode_id is None else self._episodes.get(episode_id).gate


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "run": turn.run,
        "segment": turn.segment,
        "ordinal": turn.ordinal,
        "attempt": turn.attempt,
        "class": turn.prefix,
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "sampled_tokens": len(turn.output),
        "finish": turn.finish,
        "version": turn.version,
    }
