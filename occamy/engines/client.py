"""Client of an SGLang-compatible engine: token ids in, sampled ids with log-probs and weight version out. No torch."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import aiohttp

ErrorKind = Literal["start", "refused", "loading", "lost", "timeout", "rejected", "failed", "protocol"]
FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "retract", "in_place"]

_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_KEEPALIVE_S = 4.0
"""Below the 5 s after which uvicorn (SGLang) closes an idle connection, so that no request goes out on a dying one."""


class EngineError(RuntimeError):
    """A call to an engine failed.

    `kind` tells what the caller may do: "start" (the engine process cannot start), "refused" (nobody listens; nothing
    was sent), "loading" (it stayed 503), "lost" (the connection broke after sending, repeatedly), "timeout",
    "rejected" (HTTP 4xx: the request itself is wrong), "failed" (HTTP 5xx or success: false), "protocol" (an answer
    that is not SGLang's). `status` is the HTTP status, if there was one.
    """

    def __init__(self, kind: ErrorKind, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


@dataclass(frozen=True)
class Sampling:
    """How to sample. Defaults are our choice for a policy that calls tools."""

    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""
    max_new_tokens: int = 48
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """SGLang's `sampling_seed`: with the position it fixes each draw. None: the engine picks one."""

    def wire(self, n: int = 1) -> dict[str, Any]:
        """SGLang's `sampling_params`."""
        params: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": self.max_new_tokens,
            "stop_token_ids": list(self.stop_token_ids),
        }
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        if n != 1:
            params["n"] = n
        return params


@dataclass(frozen=True)
class Generation:
    """One sampled answer."""

    output_ids: list[int]
    """Sampled ids, the stop token included."""
    logprobs: list[float]
    """Log-prob of each id under the temperature-scaled distribution."""
    finish_reason: FinishReason
    weight_version: int
    """Version of the weights that sampled all of it."""
    cached_tokens: int
    """Prompt tokens that the engine's prefix cache served."""


class EngineClient:
    """Calls one engine. All methods belong to the event loop of the first call.

    A sampled answer is never asked for twice at once: a request is sent again only when the connection was refused
    before anything was sent, when the engine says 503 "loading", or when a broken connection lost the answer and the
    engine has confirmed that the request is aborted.
    """

    def __init__(self, url: str, timeout_s: float = 120.0, refused_s: float = 5.0, attempts: int = 3) -> None:
        """`timeout_s` bounds a whole call, `refused_s` how long a refused connection is tried again, `attempts` how
        often a request is sent whose answers got lost."""
        self.url = url.rstrip("/")
        self._timeout_s, self._refused_s, self._attempts = timeout_s, refused_s, attempts
        self._session: aiohttp.ClientSession | None = None
        self._sent: dict[str, str] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def generate(self, input_ids: list[int], sampling: Sampling, rid: str | None = None) -> Generation:
        """Sample one answer to `input_ids`. Waits while this client is paused. Raises EngineError.

        A cancelled call aborts its request on the engine.
        """
        return (await self.generate_n(input_ids, sampling, 1, rid))[0]

    async def generate_n(
        self, input_ids: list[int], sampling: Sampling, n: int, rid: str | None = None
    ) -> list[Generation]:
        """Sample up to `n` answers: an engine may answer n > 1 with a list or with one object. Raises EngineError."""
        await self._open.wait()
        name = rid or uuid.uuid4().hex
        if name in self._sent:
            raise EngineError("rejected", f"rid {name!r} is already in flight; use another one")
        self._sent[name] = name
        self._idle.clear()
        try:
            return await self._generate(input_ids, sampling.wire(n), n, name)
        finally:
            del self._sent[name]
            if not self._sent:
                self._idle.set()

    async def abort(self, rid: str | None = None) -> None:
        """End a request of any client by its rid, or all requests (None); they finish with reason "abort"."""
        await self._post("/abort_request", {"abort_all": True} if rid is None else {"rid": self._sent.get(rid, rid)})

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Hold this client's new generations, wait for those in flight, then pause the engine.

        What other clients have in flight ends as `mode` says: SGLang's "in_place" and "retract" may go on with other
        weights after an update (the local engine lets it finish first), "abort" ends it.
        """
        self._open.clear()
        try:
            await self._idle.wait()
            await self._post("/pause_generation", {"mode": mode})
        except BaseException:
            self._open.set()
            raise

    async def resume(self) -> None:
        """Undo `pause`."""
        await self._post("/continue_generation", {})
        self._open.set()

    async def update_weights_from_disk(self, path: Path | str, version: int) -> None:
        """Serve the checkpoint folder `path` (as the engine sees it) as weight version `version`.

        Raises EngineError of kind "failed" with the engine's reason when it goes on with the old weights.
        """
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": True}
        status, answer = await self._request("POST", "/update_weights_from_disk", body)
        if status != 200 or not (isinstance(answer, dict) and answer.get("success") is True):
            raise EngineError("failed", f"{self.url}: weights {path} not loaded: {_message(answer)}", status)

    async def flush_cache(self) -> None:
        """Drop the engine's prefix cache."""
        await self._post("/flush_cache", {})

    async def model_info(self) -> dict[str, Any]:
        """SGLang's /model_info: model_path, weight_version and more. Raises EngineError."""
        status, answer = await self._request("GET", "/model_info", None)
        self._must_be_ok("/model_info", status, answer)
        if not isinstance(answer, dict):
            raise EngineError(
                "protocol", f"{self.url}/model_info answered {str(answer)[:200]!r}, not an object", status
            )
        return answer

    async def wait_healthy(self, deadline_s: float) -> None:
        """Return once /health says 200. Raises EngineError of the last failure's kind after `deadline_s` seconds."""
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                status, answer = await self._request("GET", "/health", None, max(0.1, deadline - time.monotonic()))
                self._must_be_ok("/health", status, answer)
                return
            except EngineError:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _generate(self, input_ids: list[int], params: dict[str, Any], n: int, name: str) -> list[Generation]:
        deadline = time.monotonic() + self._timeout_s
        refused_until = time.monotonic() + self._refused_s
        lost = tries = 0
        while True:
            rid = self._sent[name] = name if not lost else f"{name}_{lost}"
            body = {"input_ids": input_ids, "sampling_params": params, "return_logprob": True, "rid": rid}
            try:
                status, answer = await self._request("POST", "/generate", body, deadline - time.monotonic())
                if status == 503 and "loading" in _message(answer).lower():
                    raise EngineError("loading", f"{self.url} is still loading: {_message(answer)}", status)
                self._must_be_ok("/generate", status, answer)
                return _generations(answer, n, f"{self.url}/generate")
            except asyncio.CancelledError:
                await asyncio.shield(self._try_abort(rid))
                raise
            except EngineError as e:
                if e.kind == "timeout":
                    await self._try_abort(rid)
                    raise
                if e.kind == "lost":
                    lost += 1
                    if not await self._try_abort(rid) or lost >= self._attempts:
                        raise
                elif not (e.kind == "loading" or (e.kind == "refused" and time.monotonic() < refused_until)):
                    raise
                pause = _BACKOFF_S[min(tries, len(_BACKOFF_S) - 1)]
                if time.monotonic() + pause >= deadline:
                    raise
            tries += 1
            await asyncio.sleep(pause)

    async def _try_abort(self, rid: str) -> bool:
        """Has the engine confirmed that it no longer works on `rid`?"""
        try:
            status, _ = await self._request("POST", "/abort_request", {"rid": rid}, 5.0)
        except EngineError as e:
            return e.kind == "refused"  # nobody listens any more: the process that had the request is gone
        return status == 200

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        status, answer = await self._request("POST", path, body)
        self._must_be_ok(path, status, answer)

    async def _request(self, method: str, path: str, body: Any, timeout_s: float | None = None) -> tuple[int, Any]:
        """Send once. Returns (status, parsed JSON or text). Raises EngineError "refused", "lost" or "timeout"."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            )
        limit = self._timeout_s if timeout_s is None else timeout_s
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        where = f"{method} {self.url}{path}"
        try:
            timeout = aiohttp.ClientTimeout(total=limit)
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                return response.status, _parse(await response.read())
        except aiohttp.ClientConnectorError as e:
            raise EngineError("refused", f"{where}: nobody listens there ({e.os_error or e}); is the engine up?") from e
        except TimeoutError as e:
            raise EngineError("timeout", f"{where}: no answer within {limit:.1f} s") from e
        except (aiohttp.ClientError, OSError) as e:
            raise EngineError("lost", f"{where}: the connection broke after the request was sent ({e!r})") from e

    def _must_be_ok(self, path: str, status: int, answer: Any) -> None:
        if status != 200:
            kind: ErrorKind = "rejected" if 400 <= status < 500 else "failed"
            raise EngineError(kind, f"{self.url}{path}: HTTP {status}: {_message(answer)}", status)


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def _message(answer: Any) -> str:
    """The reason in an error body: {"error": {"message"}}, {"message"} or plain text."""
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return str(answer)[:500]


def _generations(answer: Any, n: int, where: str) -> list[Generation]:
    items = answer if isinstance(answer, list) else [answer]
    if not 1 <= len(items) <= n:
        raise EngineError("protocol", f"{where}: {len(items)} generations came back for n = {n}", 200)
    return [_generation(item, where) for item in items]


def _generation(item: Any, where: str) -> Generation:
    try:
        meta = item["meta_info"]
        reason, ids = meta["finish_reason"]["type"], [int(i) for i in item["output_ids"]]
        logprobs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
        scored = [int(entry[1]) for entry in meta["output_token_logprobs"]]
        version, cached = meta["weight_version"], int(meta.get("cached_tokens") or 0)
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise EngineError(
            "protocol", f"{where}: not an answer of SGLang's /generate ({e!r}): {str(item)[:200]}", 200
        ) from e
    if reason not in get_args(FinishReason):
        raise EngineError(
            "protocol", f"{where}: finish reason {reason!r} is not one of {', '.join(get_args(FinishReason))}", 200
        )
    if scored != ids:
        raise EngineError("protocol", f"{where}: log-probs are for ids {scored}, the output is {ids}", 200)
    try:
        return Generation(ids, logprobs, reason, int(version), cached)
    except (TypeError, ValueError) as e:
        raise EngineError(
            "protocol", f"{where}: weight_version {version!r} is not a number; start the engine with one", 200
        ) from e
