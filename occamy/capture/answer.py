"""Recorded turns as OpenAI answers: one JSON body, or the events of a stream. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import orjson

from occamy.capture.messages import Message
from occamy.capture.request import Options
from occamy.capture.stops import tokens_before_stop
from occamy.capture.turn import Turn

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Answered:
    """A turn on its way to the harness."""

    episode_id: str
    turn: Turn
    message: Message
    """The assistant message that the turn says; of a text completion, its content alone."""
    options: Options


def chat_answer(answered: Answered, decode: Callable[[Sequence[int]], str]) -> bytes:
    """Return the body of /v1/chat/completions: JSON, or all events when a stream was asked for."""
    if answered.options.stream:
        return b"".join(_chat_events(answered, decode))
    choice = {
        "index": 0,
        "message": answered.message,
        "finish_reason": _finish(answered),
        "logprobs": _chat_logprobs(answered, decode),
    }
    return orjson.dumps(
        _head(answered, "chatcmpl", "chat.completion") | {"choices": [choice], "usage": usage(answered)}
    )


def text_answer(answered: Answered, decode: Callable[[Sequence[int]], str]) -> bytes:
    """Return the body of /v1/completions: JSON, or all events when a stream was asked for."""
    choice = {
        "index": 0,
        "text": answered.message["content"],
        "finish_reason": answered.turn.finish,
        "logprobs": _text_logprobs(answered, decode),
    }
    head = _head(answered, "cmpl", "text_completion")
    if not answered.options.stream:
        return orjson.dumps(head | {"choices": [choice], "usage": usage(answered)})
    return b"".join(_events(head, [choice], answered))


def usage(answered: Answered) -> dict[str, Any]:
    """Return OpenAI's usage object. What was sampled of a stop string counts, though it is not shown."""
    prompt, sampled = answered.turn.prompt_tokens, len(answered.turn.output)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answered.turn.cached_tokens},
    }


def event(body: bytes) -> bytes:
    """Return one server-sent event."""
    return b"data: " + body + b"\n\n"


def _chat_events(answered: Answered, decode: Callable[[Sequence[int]], str]) -> Iterator[bytes]:
    """Role, reasoning, content, tool calls, end; each delta whole, since the turn was sampled before it is told."""
    message = answered.message
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls", ()))]
    choices = [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} for delta in deltas]
    end = {"delta": {}, "finish_reason": _finish(answered), "logprobs": _chat_logprobs(answered, decode)}
    head = _head(answered, "chatcmpl", "chat.completion.chunk")
    return _events(head, [*choices, {"index": 0, **end}], answered)


def _events(head: dict[str, Any], choices: list[dict[str, Any]], answered: Answered) -> Iterator[bytes]:
    told = {"usage": None} if answered.options.include_usage else {}
    for choice in choices:
        yield event(orjson.dumps(head | {"choices": [choice]} | told))
    if told:
        yield event(orjson.dumps(head | {"choices": [], "usage": usage(answered)}))
    yield DONE


def _head(answered: Answered, kind: str, name: str) -> dict[str, Any]:
    turn = answered.turn
    return {
        "id": f"{kind}-{answered.episode_id}-{turn.ordinal}-{turn.attempt}",
        "object": name,
        "created": int(time.time()),
        "model": answered.options.model,
    }


def _finish(answered: Answered) -> str:
    if answered.turn.finish == "length":
        return "length"
    return "tool_calls" if "tool_calls" in answered.message else "stop"


def _has_logprobs(answered: Answered) -> bool:
    """A teacher's turn has none."""
    return answered.options.logprobs and answered.turn.version >= 0


def _chat_logprobs(answered: Answered, decode: Callable[[Sequence[int]], str]) -> dict[str, Any] | None:
    """One entry per sampled token, stop token included, to where a stop string begins; `bytes` is null for a token that
    is no whole character."""
    if not _has_logprobs(answered):
        return None
    entries = []
    for token, logprob in _told(answered, decode):
        text = decode([token])
        spelled = None if "\ufffd" in text else list(text.encode())
        entries.append({"token": text, "logprob": float(logprob), "bytes": spelled, "top_logprobs": []})
    return {"content": entries}


def _text_logprobs(answered: Answered, decode: Callable[[Sequence[int]], str]) -> dict[str, Any] | None:
    if not _has_logprobs(answered):
        return None
    told = _told(answered, decode)
    texts = [decode([token]) for token, _ in told]
    offsets = list(accumulate(map(len, texts[:-1]), initial=0))[: len(texts)]
    logprobs = [float(logprob) for _, logprob in told]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def _told(answered: Answered, decode: Callable[[Sequence[int]], str]) -> list[tuple[int, float]]:
    """Sampled ids and log-probs that the harness may see: none that says something of a stop string."""
    turn = answered.turn
    size = tokens_before_stop(turn.output, answered.options.stop, decode)
    return list(zip(turn.output[:size], turn.logprobs[:size], strict=True))
