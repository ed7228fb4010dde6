"""The records of an engine call and the parsing of SGLang's answers. No HTTP, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import orjson
from numpy.typing import NDArray

ErrorKind = Literal["start", "refused", "loading", "lost", "timeout", "rejected", "failed", "protocol"]
FinishReason = Literal["stop", "length", "abort"]
TokenIds = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids as a list, a tuple, an `array.array` or a one-dimensional numpy array of integers."""
WrittenIds = TokenIds | orjson.Fragment
"""Token ids, or their JSON array, which is sent as it is."""


class EngineError(RuntimeError):
    """A call to an engine failed.

    `kind` tells what the caller may do: "start" (the engine process cannot start), "refused" (nobody listens; nothing
    was sent), "loading" (it stayed 503), "lost" (the connection broke after sending), "timeout", "rejected" (HTTP 4xx:
    the request itself is wrong), "failed" (HTTP 5xx, success: false, or an error inside a stream), "protocol" (an
    answer that is not SGLang's). `status` is the HTTP status, if there was one.
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
    stop: tuple[str, ...] = ()
    """Texts that end the answer, wherever in it they begin. As with a stop token, the output ids go on to the token
    that completes one; the engine needs its tokenizer for it."""
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
        if self.stop:
            params["stop"] = list(self.stop)
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        if n != 1:
            params["n"] = n
        return params


@dataclass(frozen=True)
class Generation:
    """One sampled answer, or (streaming) what there is of it so far."""

    output_ids: list[int]
    """Sampled ids, the stop token included, or the token that completes a stop string."""
    logprobs: list[float]
    """Log-prob of each id under the temperature-scaled distribution."""
    finish_reason: FinishReason | Literal["unfinished"]
    """"unfinished" only for the parts of a stream before its last."""
    weight_version: int
    """Version of the weights that sampled all of it."""
    cached_tokens: int
    """Prompt tokens that the engine's prefix cache served."""


@dataclass(frozen=True)
class Score:
    """A teacher-forced pass over given tokens."""

    logprobs: list[float | None]
    """Log-prob (temperature 1) of each token from the start of scoring on; the first has none."""
    weight_version: int


def wire_ids(ids: WrittenIds) -> Any:
    """What orjson writes fastest: lists and JSON as they are, arrays without a detour over Python integers.

    Raises EngineError "rejected" for an array that is not of integers or not one-dimensional.
    """
    if isinstance(ids, list | tuple | orjson.Fragment):
        return ids
    array = np.ascontiguousarray(ids)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise EngineError("rejected", f"input_ids are {array.dtype} of shape {array.shape}; give integers in one row")
    return array


def parse_body(raw: bytes) -> Any:
    """A body as JSON, or as text when it is none."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw.decode(errors="replace")


def message_of(answer: Any) -> str:
    """The reason in an error body: {"error": {"message"}}, {"message"} or plain text."""
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return str(answer)[:500]


def generations(answer: Any, least: int, most: int, where: str) -> list[Generation]:
    """Parse an answer: one object, or a list of `least` to `most` objects. Raises EngineError "protocol"."""
    items = answer if isinstance(answer, list) else [answer]
    if not least <= len(items) <= most:
        wanted = str(most) if least == most else f"{least} to {most}"
        raise EngineError("protocol", f"{where}: {len(items)} generations came back, not {wanted}", 200)
    return [generation(item, where) for item in items]


def generation(item: Any, where: str, partial: bool = False) -> Generation:
    """Parse one object of /generate; `partial` allows one without a finish reason. Raises EngineError "protocol"."""
    try:
        meta = item["meta_info"]
        ended = meta["finish_reason"]
        reason: Any = "unfinished" if partial and ended is None else ended["type"]
        ids = [int(i) for i in item["output_ids"]]
        logprobs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
        scored = [int(entry[1]) for entry in meta["output_token_logprobs"]]
        version, cached = meta["weight_version"], int(meta.get("cached_tokens") or 0)
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise _not_ours(where, e, item) from e
    if reason != "unfinished" and reason not in get_args(FinishReason):
        known = ", ".join(get_args(FinishReason))
        raise EngineError("protocol", f"{where}: finish reason {reason!r} is not one of {known}", 200)
    if scored != ids:
        raise EngineError("protocol", f"{where}: log-probs are for ids {scored}, the output is {ids}", 200)
    return Generation(ids, logprobs, reason, _version(version, where), cached)


def score(item: Any, given: list[int], where: str) -> Score:
    """Parse the log-probs of the input tokens `given`. Raises EngineError "protocol"."""
    try:
        entries = item["meta_info"]["input_token_logprobs"]
        ids = [int(entry[1]) for entry in entries]
        logprobs = [None if entry[0] is None else float(entry[0]) for entry in entries]
        version = item["meta_info"]["weight_version"]
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise _not_ours(where, e, item) from e
    if ids != given:
        raise EngineError("protocol", f"{where}: log-probs are for {len(ids)} ids, not for the {len(given)} given", 200)
    return Score(logprobs, _version(version, where))


def sse_events(buffer: bytearray) -> Iterator[bytes]:
    """Take the whole events out of `buffer` and yield the data of each; an event that is not whole stays."""
    while (end := buffer.find(b"\n\n")) >= 0:
        event = bytes(buffer[:end])
        del buffer[: end + 2]
        if event.startswith(b"data:"):
            yield event[5:].strip()


def _version(version: Any, where: str) -> int:
    try:
        return int(version)
    except (TypeError, ValueError) as e:
        raise EngineError(
            "protocol", f"{where}: weight_version {version!r} is not a number; start the engine with one", 200
        ) from e


def _not_ours(where: str, e: Exception, item: Any) -> EngineError:
    return EngineError("protocol", f"{where}: not an answer of SGLang's /generate ({e!r}): {str(item)[:200]}", 200)
