"""What the conformance suite is made of: raw calls to an engine, and pure checks of what came back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import orjson

from occamy.engines.contract import message_of, parse_body, sse_events

Answer = dict[str, Any]
Meaning = Literal["temperature-scaled", "original"]


class Broken(Exception):
    """The engine does not keep the contract; the text says how."""


class Skipped(Exception):
    """A check that cannot be made here; the text says why."""


@dataclass(frozen=True)
class Stream:
    """A streamed answer."""

    content_type: str
    events: list[Any]
    """Parsed data of each event but [DONE]."""
    done: bool
    """The last event was [DONE]."""


class Probe:
    """Raw HTTP to one engine, and what the suite knows of it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, tolerance: float) -> None:
        """`tolerance` bounds the difference between two log-probs of the same token."""
        self._session, self.url, self.tolerance = session, url.rstrip("/"), tolerance
        self.info: Answer = {}
        """/model_info, once read."""
        self.vocab = 40
        """Ids below are in the vocabulary; a guess that fits every model until the engine or a folder says more."""
        self.context: int | None = None
        """Tokens of input plus output, where known."""
        self.decode: Callable[[Sequence[int]], str] | None = None
        """Text of token ids, where the model's tokenizer is known."""

    def prompt(self, shift: int = 0, length: int = 20) -> list[int]:
        """Some token ids; another `shift` gives others."""
        return [3 + (7 * i + 11 * shift + i * i * shift) % (min(self.vocab, 40) - 3) for i in range(length)]

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send once. Returns (status, parsed JSON or text)."""
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        async with self._session.request(method, self.url + path, data=data, headers=headers) as response:
            return response.status, parse_body(await response.read())

    async def generate(self, input_ids: Any, params: Any, **more: Any) -> Any:
        """POST /generate with log-probs. Raises Broken when the status is not 200."""
        status, answer = await self.call("POST", "/generate", _body(input_ids, params) | more)
        if status != 200:
            raise Broken(f"HTTP {status}: {message_of(answer)}")
        return answer

    async def one(self, input_ids: list[int], params: Any, **more: Any) -> Answer:
        """One answer, checked for its shape. Raises Broken."""
        answer = await self.generate(input_ids, params, **more)
        return whole(answer, input_ids)

    async def streamed(self, input_ids: list[int], params: Any, abort_after: int = 0, **more: Any) -> Stream:
        """A streamed answer; after `abort_after` events its `rid` is aborted."""
        body = _body(input_ids, params) | {"stream": True} | more
        buffer, events, done = bytearray(), list[Any](), False
        async with self._session.post(self.url + "/generate", json=body) as response:
            if response.status != 200:
                raise Broken(f"HTTP {response.status}: {message_of(parse_body(await response.read()))}")
            async for data in response.content.iter_any():
                buffer += data
                for event in sse_events(buffer):
                    done = event == b"[DONE]"
                    if not done:
                        events.append(parse_body(event))
                    if len(events) == abort_after:
                        await self.call("POST", "/abort_request", {"rid": body["rid"]})
                        abort_after = 0
            return Stream(response.headers.get("Content-Type", ""), events, done)


def _body(input_ids: Any, params: Any) -> Answer:
    return {"input_ids": input_ids, "sampling_params": params, "return_logprob": True}


def whole(answer: Any, prompt: Sequence[int]) -> Answer:
    """`answer` itself, when it is one well-formed object for `prompt`. Raises Broken naming the first fault."""
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        raise Broken(f"not an object with meta_info: {str(answer)[:120]}")
    meta, ids = answer["meta_info"], answer.get("output_ids")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise Broken(f"output_ids {str(ids)[:80]} are not token ids")
    for key, expected in (("prompt_tokens", len(prompt)), ("completion_tokens", len(ids))):
        if meta.get(key) != expected:
            raise Broken(f"meta_info.{key} is {meta.get(key)!r}, not {expected}")
    if type(meta.get("cached_tokens")) is not int:
        raise Broken(f"meta_info.cached_tokens is {meta.get('cached_tokens')!r}, not a number of tokens")
    for key in ("id", "weight_version"):
        if not isinstance(meta.get(key), str):
            raise Broken(f"meta_info.{key} is {meta.get(key)!r}, not a text")
    finish = meta.get("finish_reason")
    if not isinstance(finish, dict) or finish.get("type") not in ("stop", "length", "abort"):
        raise Broken(f"finish_reason is {finish!r}; its type is stop, length or abort")
    logprobs_of(answer)
    return answer


def logprobs_of(answer: Answer) -> list[float]:
    """The log-prob of each output token. Raises Broken when they are not those of output_ids, or not log-probs."""
    return [_logprob(entry) for entry in _entries(answer, "output_token_logprobs", answer["output_ids"])]


def input_logprobs_of(answer: Answer, tokens: Sequence[int]) -> list[float]:
    """The log-prob of each of `tokens` but the first, which has none. Raises Broken."""
    entries = _entries(answer, "input_token_logprobs", list(tokens))
    if entries[0][0] is not None:
        raise Broken(f"input_token_logprobs start with {entries[0][0]!r}; the first token has none (null)")
    return [_logprob(entry) for entry in entries[1:]]


def drift(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest difference of two rows of log-probs. Raises Broken when their lengths differ."""
    if len(one) != len(other):
        raise Broken(f"{len(one)} log-probs against {len(other)}")
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)


def check_stream(stream: Stream, ids: Sequence[int]) -> str:
    """Is it the cumulative stream of an answer with these output ids? Returns what was seen. Raises Broken."""
    if not stream.content_type.startswith("text/event-stream"):
        raise Broken(f"content type {stream.content_type!r}, not text/event-stream")
    if not stream.done:
        raise Broken("the stream does not end with data: [DONE]")
    if not stream.events:
        raise Broken("no events")
    before: list[int] = []
    for i, event in enumerate(stream.events):
        now = event.get("output_ids") if isinstance(event, dict) else None
        if not isinstance(now, list):
            raise Broken(f"event {i} has no output_ids: {str(event)[:120]}")
        if now[: len(before)] != before:
            raise Broken(f"event {i} holds ids {now}, which do not start with the {before} of the event before it")
        if len(logprobs_of(event)) < len(now):
            raise Broken(f"event {i} has fewer log-probs than ids")
        ended = event["meta_info"].get("finish_reason") is not None
        if ended != (i == len(stream.events) - 1):
            raise Broken(f"event {i} of {len(stream.events)} has finish_reason {event['meta_info']['finish_reason']}")
        before = now
    if before != list(ids):
        raise Broken(f"streamed ids {before} are not the {list(ids)} of the same call without a stream")
    return f"{len(stream.events)} events, cumulative"


def temperature_meaning(
    sampled: Sequence[float], forced: Sequence[float], temperature: float, tolerance: float
) -> Meaning:
    """What log-probs mean that were reported for tokens sampled at one position at `temperature` ≠ 1.

    `sampled` are the reported ones, `forced` those of the same tokens at temperature 1. The constant of a scaled
    distribution is not known, but differences of its log-probs are those at temperature 1 divided by the temperature.
    Raises Broken when they are neither, Skipped when the tokens are too alike to tell.
    """
    if max(forced) - min(forced) < 100 * tolerance:
        raise Skipped("all tokens sampled at one position have about the same log-prob")
    if drift(sampled, forced) <= tolerance:
        return "original"
    scaled = [(f - forced[0]) / temperature for f in forced]
    off = drift([s - sampled[0] for s in sampled], scaled)
    if off > 2 * tolerance:
        raise Broken(f"neither those of temperature 1 nor those of {temperature:g}: off by {off:.2g}")
    return "temperature-scaled"


def _entries(answer: Answer, key: str, ids: list[int]) -> list[Any]:
    entries = answer["meta_info"].get(key)
    if not isinstance(entries, list) or not all(isinstance(e, list) and len(e) == 3 for e in entries):
        raise Broken(f"{key} is not a list of [log-prob, id, text]: {str(entries)[:120]}")
    if [e[1] for e in entries] != ids:
        raise Broken(f"{key} are for ids {[e[1] for e in entries]}, not for {ids}")
    return entries


def _logprob(entry: list[Any]) -> float:
    value = entry[0]
    if not isinstance(value, int | float) or math.isnan(value) or value > 1e-4:
        raise Broken(f"{value!r} of token {entry[1]} is not a log-prob")
    return float(value)
