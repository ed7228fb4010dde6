"""Client of an SGLang-compatible engine: token ids in, sampled ids with log-probs and weight version out. No torch."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
import orjson

from occamy.engines.contract import (
    EngineError,
    ErrorKind,
    Generation,
    Sampling,
    Score,
    TokenIds,
    WrittenIds,
    generation,
    generations,
    message_of,
    parse_body,
    score,
    sse_events,
    wire_ids,
)

__all__ = ["EngineClient", "EngineError", "Generation", "PauseMode", "Sampling", "Score", "TokenIds"]

PauseMode = Literal["abort", "retract", "in_place"]
T = TypeVar("T")

_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_ABORT_S = 5.0
_KEEPALIVE_S = 4.0
"""Below the 5 s after which uvicorn (SGLang) closes an idle connection, so that no request goes out on a dying one."""


class EngineClient:
    """Calls one engine. All methods belong to the event loop of the first call.

    A sampled answer is never asked for twice at once: a request is sent again only when the connection was refused
    before anything was sent, when the engine says 503 "loading", or when a broken connection lost the answer and the
    engine has confirmed that the request is aborted. A stream is never asked for again once it was sent.
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

    async def generate(self, input_ids: WrittenIds, sampling: Sampling, rid: str | None = None) -> Generation:
        """Sample one answer to `input_ids`. Waits while this client is paused. Raises EngineError.

        A cancelled call aborts its request on the engine.
        """
        return (await self.generate_n(input_ids, sampling, 1, rid))[0]

    async def generate_n(
        self, input_ids: WrittenIds, sampling: Sampling, n: int, rid: str | None = None
    ) -> list[Generation]:
        """Sample up to `n` answers: an engine may answer n > 1 with a list or with one object. Raises EngineError."""
        body = _body(wire_ids(input_ids), sampling.wire(n))
        return await self._call(body, [rid], lambda answer: generations(answer, 1, n, f"{self.url}/generate"))

    async def generate_batch(
        self, inputs: Sequence[TokenIds], sampling: Sampling | Sequence[Sampling], rids: Sequence[str] | None = None
    ) -> list[Generation]:
        """Sample one answer to each of `inputs`, in one request, with one sampling for all or one for each.

        Raises EngineError; one bad input fails all.
        """
        each = [sampling] * len(inputs) if isinstance(sampling, Sampling) else list(sampling)
        names = [None] * len(inputs) if rids is None else list(rids)
        if not len(inputs) == len(each) == len(names):
            raise EngineError("rejected", f"{len(inputs)} inputs, {len(each)} samplings and {len(names)} rids")
        if not inputs:
            return []
        body = _body([wire_ids(ids) for ids in inputs], [one.wire() for one in each])
        count = len(inputs)
        return await self._call(body, names, lambda a: generations(a, count, count, f"{self.url}/generate"))

    async def score(self, input_ids: TokenIds, start: int = 0, rid: str | None = None) -> Score:
        """Log-probs of `input_ids` from position `start` on, by one teacher-forced pass. Raises EngineError.

        They are of the distribution at temperature 1. The engine samples one token more, which is thrown away, so the
        input must be shorter than the context by one.
        """
        body = _body(wire_ids(input_ids), Sampling(temperature=0.0, max_new_tokens=1).wire())
        body["logprob_start_len"] = start
        given = [int(i) for i in input_ids[start:]]
        return await self._call(body, [rid], lambda answer: score(answer, given, f"{self.url}/generate"))

    async def stream(
        self, input_ids: TokenIds, sampling: Sampling, rid: str | None = None
    ) -> AsyncGenerator[Generation, None]:
        """Yield the answer as it grows: each Generation holds everything so far, the last has its finish reason.

        Raises EngineError. Whatever ends the stream early (an error, a cancelled task, a consumer that closes the
        generator: use `contextlib.aclosing`) aborts the request on the engine; a broken stream is not asked for again.
        """
        await self._open.wait()
        body = _body(wire_ids(input_ids), sampling.wire()) | {"stream": True}
        with self._flight([rid]) as (name,):
            async with self._started(body | {"rid": name}) as response, aclosing(self._parts(response, name)) as parts:
                async for part in parts:
                    yield part

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
            raise EngineError("failed", f"{self.url}: weights {path} not loaded: {message_of(answer)}", status)

    async def flush_cache(self) -> None:
        """Drop the engine's prefix cache."""
        await self._post("/flush_cache", {})

    async def tokenize(self, text: str) -> list[int]:
        """The ids of `text` by the engine's own tokenizer, without special tokens. Raises EngineError."""
        status, answer = await self._request("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
        self._must_be_ok("/tokenize", status, answer)
        if not isinstance(answer, dict) or not isinstance(answer.get("tokens"), list):
            raise EngineError("protocol", f"{self.url}/tokenize answered {str(answer)[:200]!r}, no tokens", status)
        return [int(token) for token in answer["tokens"]]

    async def model_info(self) -> dict[str, Any]:
        """SGLang's /model_info: model_path, weight_version and more. Raises EngineError."""
        return await self._get_object("/model_info")

    async def server_info(self) -> dict[str, Any]:
        """SGLang's /server_info: settings and load. Raises EngineError."""
        return await self._get_object("/server_info")

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

    @contextmanager
    def _flight(self, rids: Sequence[str | None]) -> Iterator[list[str]]:
        """Count the call as in flight; yields its rids, made up where none was given."""
        names = [rid or uuid.uuid4().hex for rid in rids]
        for name in names:
            if name in self._sent or names.count(name) > 1:
                raise EngineError("rejected", f"rid {name!r} is already in flight; use another one")
        self._sent.update(zip(names, names, strict=True))
        self._idle.clear()
        try:
            yield names
        finally:
            for name in names:
                del self._sent[name]
            if not self._sent:
                self._idle.set()

    async def _call(self, body: dict[str, Any], rids: Sequence[str | None], parse: Callable[[Any], T]) -> T:
        await self._open.wait()
        with self._flight(rids) as names:
            patience = _Patience(self._timeout_s, self._refused_s)
            lost = 0
            while True:
                sent = [name if not lost else f"{name}_{lost}" for name in names]
                self._sent.update(zip(names, sent, strict=True))
                rid = sent if isinstance(body["sampling_params"], list) else sent[0]
                try:
                    status, answer = await self._request("POST", "/generate", body | {"rid": rid}, patience.left())
                    self._must_be_ok("/generate", status, answer)
                    return parse(answer)
                except asyncio.CancelledError:
                    await asyncio.shield(self._try_abort(sent))
                    raise
                except EngineError as e:
                    gone = await self._try_abort(sent) if e.kind in ("lost", "timeout") else False
                    lost += e.kind == "lost"
                    if not (patience.allows(e) or (e.kind == "lost" and gone and lost < self._attempts)):
                        raise
                    await patience.pause(e)

    @asynccontextmanager
    async def _started(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a streaming request; the response once its status is 200. Tries again while nothing was sampled."""
        patience, begun = _Patience(self._timeout_s, self._refused_s), False
        while True:
            try:
                async with self._sending("POST", "/generate", body, patience.left()) as response:
                    if response.status != 200:
                        self._must_be_ok("/generate", response.status, parse_body(await response.read()))
                    begun = True
                    yield response
                    return
            except asyncio.CancelledError:
                if not begun:
                    await asyncio.shield(self._try_abort([body["rid"]]))
                raise
            except EngineError as e:
                if begun or not patience.allows(e):
                    if not begun and e.kind in ("lost", "timeout"):
                        await self._try_abort([body["rid"]])
                    raise
                await patience.pause(e)

    async def _parts(self, response: aiohttp.ClientResponse, rid: str) -> AsyncGenerator[Generation, None]:
        """Parse the events of a stream. Aborts the request unless its last event and [DONE] came."""
        where, buffer, done = f"{self.url}/generate", bytearray(), False
        last: Generation | None = None
        try:
            async for data in response.content.iter_any():
                buffer += data
                for event in sse_events(buffer):
                    if event == b"[DONE]":
                        done = True
                        continue
                    parsed = parse_body(event)
                    if isinstance(parsed, dict) and "error" in parsed:
                        raise EngineError("failed", f"{where}: {message_of(parsed)}", 200)
                    part = generation(parsed, where, partial=True)
                    if last and (last.finish_reason != "unfinished" or not _extends(part.output_ids, last.output_ids)):
                        raise EngineError("protocol", f"{where}: an event does not extend the one before it", 200)
                    last = part
                    yield part
            if not done or last is None or last.finish_reason == "unfinished":
                raise EngineError("lost", f"{where}: the stream ended before its last event and [DONE]")
            rid = ""
        finally:
            if rid:
                await asyncio.shield(self._try_abort([rid]))

    async def _try_abort(self, rids: Sequence[str]) -> bool:
        """Has the engine confirmed that it no longer works on `rids`?"""
        left = list(rids)
        for pause in _BACKOFF_S:
            try:
                while left:
                    if (await self._request("POST", "/abort_request", {"rid": left[-1]}, _ABORT_S))[0] != 200:
                        return False
                    left.pop()
                return True
            except EngineError as e:
                if e.kind == "refused":
                    return True  # nobody listens any more: the process that had the request is gone
                if e.kind != "lost":
                    return False
            await asyncio.sleep(pause)  # a dying process breaks connections a moment before it refuses them
        return False

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        status, answer = await self._request("POST", path, body)
        self._must_be_ok(path, status, answer)

    async def _get_object(self, path: str) -> dict[str, Any]:
        status, answer = await self._request("GET", path, None)
        self._must_be_ok(path, status, answer)
        if not isinstance(answer, dict):
            raise EngineError("protocol", f"{self.url}{path} answered {str(answer)[:200]!r}, not an object", status)
        return answer

    async def _request(self, method: str, path: str, body: Any, timeout_s: float | None = None) -> tuple[int, Any]:
        """Send once. Returns (status, parsed JSON or text). Raises EngineError "refused", "lost" or "timeout"."""
        async with self._sending(method, path, body, timeout_s) as response:
            return response.status, parse_body(await response.read())

    @asynccontextmanager
    async def _sending(
        self, method: str, path: str, body: Any, timeout_s: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send once; what goes wrong up to the end of the block is an EngineError "refused", "lost" or "timeout"."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        limit = self._timeout_s if timeout_s is None else timeout_s
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        where, headers = f"{method} {self.url}{path}", {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=limit)
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                yield response
        except aiohttp.ClientConnectorError as e:
            raise EngineError("refused", f"{where}: nobody listens there ({e.os_error or e}); is the engine up?") from e
        except TimeoutError as e:
            raise EngineError("timeout", f"{where}: no answer within {limit:.1f} s") from e
        except (aiohttp.ClientError, OSError) as e:
            raise EngineError("lost", f"{where}: the connection broke after the request was sent ({e!r})") from e

    def _must_be_ok(self, path: str, status: int, answer: Any) -> None:
        if status == 200:
            return
        reason = message_of(answer)
        kind: ErrorKind = "rejected" if 400 <= status < 500 else "failed"
        if status == 503 and "loading" in reason.lower():
            kind = "loading"
        raise EngineError(kind, f"{self.url}{path}: HTTP {status}: {reason}", status)


class _Patience:
    """How long one call goes on trying: a deadline for all, and an earlier one for refused connections."""

    def __init__(self, timeout_s: float, refused_s: float) -> None:
        now = time.monotonic()
        self._deadline, self._refused_until, self._tries = now + timeout_s, now + refused_s, 0

    def left(self) -> float:
        """Seconds to the deadline, at least a millisecond."""
        return max(0.001, self._deadline - time.monotonic())

    def allows(self, e: EngineError) -> bool:
        """Is this an error after which nothing was sampled, and is there time to try again?"""
        return e.kind == "loading" or (e.kind == "refused" and time.monotonic() < self._refused_until)

    async def pause(self, e: EngineError) -> None:
        """Wait before the next try. Raises `e` when the deadline would pass meanwhile."""
        pause = _BACKOFF_S[min(self._tries, len(_BACKOFF_S) - 1)]
        self._tries += 1
        if time.monotonic() + pause >= self._deadline:
            raise e
        await asyncio.sleep(pause)


def _body(input_ids: Any, params: Any) -> dict[str, Any]:
    return {"input_ids": input_ids, "sampling_params": params, "return_logprob": True}


def _extends(now: list[int], before: list[int]) -> bool:
    return now[: len(before)] == before
