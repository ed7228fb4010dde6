"""Reads an OpenAI chat request without a model per message, and refuses by name what no backend can honour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from occamy.capture.messages import Message

REWRITES = ("summary_replacement", "history_pruning")
"""Rewrite kinds that a harness may declare in the header x-occamy-rewrite."""

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "tool_choice": ("auto", None),
    "parallel_tool_calls": (True, None),
    "top_logprobs": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "response_format": ({"type": "text"}, None),
    "store": (False, None),
}
_KNOWN = frozenset(
    {
        "model", "messages", "tools", "stream", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed",
        "stop", "logprobs", "user", "metadata", *_ONLY,
    }
)  # fmt: skip


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
class ChatRequest:
    """A valid request. Message contents are plain strings or None."""

    body: dict[str, Any]
    """The request as sent, contents flattened to text."""
    model: str
    messages: list[Message]
    tools: list[Any]
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    logprobs: bool


def parse_chat(raw: bytes) -> ChatRequest:
    """Read a chat-completions body. Raises ApiError 400 naming the parameter."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        raise ApiError(400, f"the body is not JSON: {e}", "invalid_json") from e
    if not isinstance(body, dict):
        raise _bad("body", "send a JSON object")
    if unknown := body.keys() - _KNOWN:
        name = min(unknown)
        raise ApiError(400, f"parameter {name!r} is not supported here", "unsupported_parameter", param=name)
    if body.get("stream"):
        raise ApiError(400, "streaming is not supported; send stream: false", "unsupported_value", param="stream")
    for name in body.keys() & _ONLY.keys():
        if body[name] not in _ONLY[name]:
            message = f"{name}: {body[name]!r} is not supported; leave it out or send {_ONLY[name][0]!r}"
            raise ApiError(400, message, "unsupported_value", param=name)
    return ChatRequest(
        body=body,
        model=str(body.get("model") or "policy"),
        messages=_messages(body.get("messages")),
        tools=_tools(body.get("tools")),
        max_tokens=_max_tokens(body),
        temperature=_number(body, "temperature", 0.0, 2.0),
        top_p=_number(body, "top_p", 0.0, 1.0),
        seed=_whole(body, "seed"),
        stop=_stop(body.get("stop")),
        logprobs=bool(body.get("logprobs")),
    )


def _bad(param: str, fix: str) -> ApiError:
    return ApiError(400, f"{param}: {fix}", "invalid_value", param=param)


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise _bad("messages", "send a non-empty list")
    for i, message in enumerate(messages):
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


def _max_tokens(body: dict[str, Any]) -> int | None:
    new, old = _whole(body, "max_completion_tokens"), _whole(body, "max_tokens")
    if new is not None and old is not None and new != old:
        raise _bad("max_tokens", f"{old} contradicts max_completion_tokens {new}; send one")
    value = old if new is None else new
    if value is not None and value < 1:
        raise _bad("max_tokens", f"{value} is too small; send 1 or more")
    return value


def _whole(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise _bad(name, f"{value!r} is not a whole number")


def _number(body: dict[str, Any], name: str, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise _bad(name, f"{value!r} is not a number from {low} to {high}")
    return float(value)


def _stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    items = [stop] if isinstance(stop, str) else stop
    if not isinstance(items, list) or not all(isinstance(s, str) and s for s in items):
        raise _bad("stop", "send a string or a list of strings")
    return tuple(items)
