"""Reads OpenAI requests without a model per message, and refuses by name what no backend can honour."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import orjson

from occamy.capture.bodies import Bodies, Body
from occamy.capture.call import Wanted
from occamy.capture.messages import Message

REWRITES = ("summary_replacement", "history_pruning")
"""Rewrite kinds that a harness may declare in the header x-occamy-rewrite."""

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
}
"""Parameters with the values at which they change nothing."""
_NEUTRAL_CHAT = _NEUTRAL | {
    "tool_choice": ("auto", None),
    "parallel_tool_calls": (True, None),
    "top_logprobs": (0, None),
    "response_format": ({"type": "text"}, None),
}
_NEUTRAL_TEXT = _NEUTRAL | {"best_of": (1, None), "echo": (False, None), "suffix": ("", None), "logprobs": (0, None)}
_HINTS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "reasoning_effort", "reasoning", "think", "options", "verbosity",
    }
)  # fmt: skip
"""What harnesses (Hermes 0.19, OpenClaw 2026.9) send to whatever endpoint they have: bookkeeping, caching and wishes
that a server may leave unheard. None can change a prompt or a sampled token here."""
_READ = frozenset({"model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options"})
_KNOWN_CHAT = _READ | _HINTS | _NEUTRAL_CHAT.keys() | {"messages", "tools", "max_completion_tokens", "logprobs"}
_KNOWN_TEXT = _READ | _HINTS | _NEUTRAL_TEXT.keys() | {"prompt"}
_MOST_STOPS = 4
"""OpenAI's limit."""
_LEAST_TEMPERATURE = 1e-6
"""Our choice: SGLang takes the likeliest token below it, as at 0, and logits divided by much less leave float32."""
_TEXT_TOKENS = 16
"""OpenAI's default of max_tokens for text completions."""


class ApiError(Exception):
    """An answer in OpenAI's error format."""

    def __init__(self, status: int, message: str, code: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> bytes:
        """Return the JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return orjson.dumps({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})


@dataclass(frozen=True, slots=True)
class Options:
    """How to sample and how to answer."""

    model: str
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    logprobs: bool
    stream: bool
    include_usage: bool
    """Whether the last chunk of a stream tells the usage."""

    @property
    def wanted(self) -> Wanted:
        """How to sample, but for the seed."""
        return Wanted(self.max_tokens, self.stop, self.temperature, self.top_p)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A valid chat request. Message contents are plain strings or None."""

    body: dict[str, Any]
    """The request as sent, contents flattened to text."""
    options: Options
    messages: list[Message]
    tools: list[Any]
    digest: str
    """sha256 of the raw body, hexadecimal."""
    read: Body = field(compare=False, repr=False)
    """The body, for `Bodies.keep` once the request is on record."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A valid request of /v1/completions."""

    options: Options
    prompt: str | list[int]
    """Text, special tokens recognised, or token ids."""
    digest: str
    """sha256 of the raw body, hexadecimal."""


def parse_chat(raw: bytes, bodies: Bodies) -> ChatRequest:
    """Read a chat-completions body. Raises ApiError 400 naming the parameter.

    `bodies` are those on record: of one that goes on from some only the new messages are read and checked.
    """
    read = _read(raw, bodies)
    body = _object(read.value, _KNOWN_CHAT, _NEUTRAL_CHAT)
    options = _options(body, _max_tokens(body), _flag(body, "logprobs"))
    messages, tools = _messages(body.get("messages"), read.old), _tools(body.get("tools"))
    return ChatRequest(body, options, messages, tools, read.digest, read)


def parse_text(raw: bytes) -> TextRequest:
    """Read a body of /v1/completions: one prompt. Raises ApiError 400 naming the parameter."""
    read = _read(raw, Bodies())
    body = _object(read.value, _KNOWN_TEXT, _NEUTRAL_TEXT)
    asked = _positive("max_tokens", _whole(body, "max_tokens"))
    return TextRequest(
        _options(body, _TEXT_TOKENS if asked is None else asked, body.get("logprobs") is not None),
        _prompt(body.get("prompt")),
        read.digest,
    )


def _read(raw: bytes, bodies: Bodies) -> Body:
    try:
        return bodies.read(raw)
    except orjson.JSONDecodeError as e:
        raise ApiError(400, f"the body is not JSON: {e}", "invalid_json") from e


def _object(body: Any, known: Set[str], neutral: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise _bad("body", "send a JSON object")
    if unknown := body.keys() - known:
        name = min(unknown)
        raise ApiError(400, f"parameter {name!r} is not supported here", "unsupported_parameter", param=name)
    for name in body.keys() & neutral.keys():
        if body[name] not in neutral[name]:
            message = f"{name}: {body[name]!r} is not supported; leave it out or send {neutral[name][0]!r}"
            raise ApiError(400, message, "unsupported_value", param=name)
    return body


def _options(body: dict[str, Any], max_tokens: int | None, logprobs: bool) -> Options:
    if body.get("top_p") == 0:
        raise _bad("top_p", "0 leaves no token; send temperature 0 for the likeliest one")
    stream, options = _flag(body, "stream"), body.get("stream_options") or {}
    if not isinstance(options, dict) or (options and not stream):
        raise _bad("stream_options", "send an object, together with stream: true")
    return Options(
        model=str(body.get("model") or "policy"),
        max_tokens=max_tokens,
        temperature=_temperature(body),
        top_p=_number(body, "top_p", 0.0, 1.0),
        seed=_whole(body, "seed"),
        stop=_stop(body.get("stop")),
        logprobs=logprobs,
        stream=stream,
        include_usage=_flag(options, "include_usage"),
    )


def _bad(param: str, fix: str) -> ApiError:
    return ApiError(400, f"{param}: {fix}", "invalid_value", param=param)


def _messages(messages: Any, checked: int) -> list[Message]:
    """Check and normalise messages, of which the first ones were checked before."""
    if not isinstance(messages, list) or not messages:
        raise _bad("messages", "send a non-empty list")
    for i, message in enumerate(messages[checked:], checked):
        if not isinstance(message, dict) or str(message.get("role")) not in _ROLES:
            raise _bad(f"messages[{i}]", f"needs a role out of {sorted(_ROLES)}")
        if message["role"] == "developer":
            message["role"] = "system"
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            message["content"] = _flatten(content, i)
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
            raise _bad(f"messages[{i}].tool_calls", "send a list of calls, each with a function's name and arguments")
    return messages


def _is_call(call: Any) -> bool:
    if not isinstance(call, dict) or not isinstance(call.get("id"), str | None):
        return False
    function = call.get("function")
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | dict)
    )


def _flatten(content: Any, index: int) -> str:
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise _bad(f"messages[{index}].content", "send text or a list of text parts")


def _tools(tools: Any) -> list[Any]:
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(
        isinstance(t, dict) and isinstance(t.get("function"), dict) for t in tools
    ):
        raise _bad("tools", "send a list of function tools")
    return tools


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(i) is int and 0 <= i < 1 << 31 for i in prompt):
        return prompt
    raise _bad("prompt", "send one non-empty text or list of token ids")


def _max_tokens(body: dict[str, Any]) -> int | None:
    new, old = _whole(body, "max_completion_tokens"), _whole(body, "max_tokens")
    if new is not None and old is not None and new != old:
        raise _bad("max_tokens", f"{old} contradicts max_completion_tokens {new}; send one")
    return _positive("max_tokens", old if new is None else new)


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise _bad(name, f"{value} is too small; send 1 or more")
    return value


def _whole(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise _bad(name, f"{value!r} is not a whole number")


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise _bad(name, f"{value!r} is not true or false")


def _number(body: dict[str, Any], name: str, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise _bad(name, f"{value!r} is not a number from {low} to {high}")
    return float(value)


def _temperature(body: dict[str, Any]) -> float:
    value = _number(body, "temperature", 0.0, 2.0)
    if 0 < value < _LEAST_TEMPERATURE:
        raise _bad("temperature", f"{value!r} cannot be told from 0; send 0, or {_LEAST_TEMPERATURE} and more")
    return value


def _stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    items = [stop] if isinstance(stop, str) else stop
    if not isinstance(items, list) or not all(isinstance(s, str) and s for s in items) or len(items) > _MOST_STOPS:
        raise _bad("stop", f"{str(stop)[:80]!r}; send a text that is not empty, or a list of up to {_MOST_STOPS}")
    if any("\ufffd" in s for s in items):
        raise _bad("stop", "U+FFFD stands for bytes that are no text, so no answer can be searched for it")
    return tuple(items)
