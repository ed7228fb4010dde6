"""OpenAI chat completions over HTTP, as far as a harness needs them: one POST, typed errors, no retries of its own."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
from yarl import URL

from occamy.harness.conversation import Call, Conversation, Reply

REWRITE_HEADER = "x-occamy-rewrite"
_RETRYABLE = (408, 425, 429)
_HELD = "engine_unavailable"  # the recording proxy waited for the engine already


class EndpointError(RuntimeError):
    """The endpoint did not serve a well-formed request: an infrastructure fault."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable
        """True when the same request may succeed later."""


class ContextExceeded(RuntimeError):
    """The prompt is longer than the endpoint's context limit."""


class ChatClient:
    """Calls one endpoint for one episode."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str, api_key: str) -> None:
        self._http = http
        self._url = URL(base_url + "/chat/completions", encoded=True)
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    async def complete(self, settings: dict[str, Any], conversation: Conversation) -> Reply:
        """Sample one assistant turn. `settings` holds everything of the request but the messages.

        Raises ContextExceeded, and EndpointError for every other failure.
        """
        body = orjson.dumps({**settings, "messages": conversation.messages()})
        headers = self._headers
        if conversation.rewrite is not None:
            headers = headers | {REWRITE_HEADER: conversation.rewrite}
        try:
            async with self._http.post(self._url, data=body, headers=headers) as response:
                status, data = response.status, await response.read()
        except (aiohttp.ClientError, OSError) as e:
            raise EndpointError(f"{self._url}: {type(e).__name__}: {e}", retryable=True) from e
        if status != 200:
            raise _failure(status, data, self._url)
        return _parse(data, self._url)


def open_http() -> aiohttp.ClientSession:
    """An HTTP session for many concurrent episodes: no cookies, no connection cap, no timeout (budgets watch time)."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
    )


def _parse(data: bytes, url: URL) -> Reply:
    try:
        answer = orjson.loads(data)
        choice, usage = answer["choices"][0], answer["usage"]
        message = choice["message"]
        calls = tuple(
            Call(_text(c["id"]), _text(c["function"]["name"]), _text(c["function"]["arguments"]))
            for c in message.get("tool_calls") or ()
        )
        return Reply(
            text=_text(message.get("content") or ""),
            calls=calls,
            finish_reason=_text(choice["finish_reason"]),
            prompt_tokens=int(usage["prompt_tokens"]),
            output_tokens=int(usage["completion_tokens"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise EndpointError(f"{url}: answer is no chat completion ({e!r}): {data[:200]!r}", retryable=False) from e


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _failure(status: int, data: bytes, url: URL) -> Exception:
    try:
        error = orjson.loads(data)["error"]
        code, message = str(error.get("code")), str(error.get("message"))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        code, message = "", data[:200].decode(errors="replace")
    if status == 400 and code == "context_length_exceeded":
        return ContextExceeded(message)
    retryable = (status >= 500 and code != _HELD) or status in _RETRYABLE
    return EndpointError(f"{url}: HTTP {status}: {message}", retryable=retryable)
