"""What the messages of an episode are in token ids, and what sampled ids say in messages. Never renders what was
sampled inside a segment."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from occamy.capture.incoming import Request
from occamy.capture.messages import GivenCall, Message, fingerprint
from occamy.capture.render import Renderer
from occamy.contracts.capture import CaptureRules


class Dialogue:
    """Renders requests and reads answers of one episode. `given` are the tool calls handed out so far, by id."""

    def __init__(self, renderer: Renderer, rules: CaptureRules) -> None:
        self.given: dict[str, GivenCall] = {}
        self._renderer, self._rules = renderer, rules
        self._handed: dict[bytes, Message] = {}

    def fingerprint(self, message: Message) -> bytes:
        """Return what identifies a message in a history."""
        return fingerprint(message, self.given, self._rules)

    def whole(self, request: Request) -> array[int]:
        """Return the ids of a whole prompt. Raises TemplateError."""
        ids = array("i", self._renderer.opening([self._as_handed(m) for m in request.messages], request.tools))
        self._renderer.check_vocabulary(ids)
        return ids

    def appended(self, output: Sequence[int], request: Request) -> array[int]:
        """Return the ids that follow an answer: its closing token, if it lacks one, and the messages after the last
        assistant turn. Raises TemplateError."""
        closed = bool(output) and output[-1] == self._renderer.closing_id
        ids = array("i", () if closed else (self._renderer.closing_id,))
        ids.extend(self._renderer.appended(request.messages[request.last_answer() + 1 :]))
        self._renderer.check_vocabulary(ids)
        return ids

    def read(self, text: str, tools: Sequence[Any], call_ids: Iterable[str]) -> Message:
        """Return the assistant message that sampled text says, stop token removed. Its calls take ids in order."""
        answer = self._renderer.parse_text(text, tools)
        message: Message = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for i, call in zip(call_ids, answer.calls, strict=False)
            ]
        return message

    def hand_out(self, message: Message) -> bytes:
        """Remember an assistant message, so that its echo is known. Returns its fingerprint."""
        for call in message.get("tool_calls", ()):
            self.given[call["id"]] = GivenCall(call["function"]["name"], call["function"]["arguments"])
        print_ = self.fingerprint(message)
        if message.get("tool_calls"):
            self._handed[print_] = message
        return print_

    def _as_handed(self, message: Message) -> Message:
        """Return a message for rendering: an echoed tool-call turn as it was handed out, ids and extra keys dropped."""
        shown: Message = {"role": message["role"], "content": message.get("content") or ""}
        if message["role"] == "assistant" and message.get("tool_calls"):
            handed = self._handed.get(self.fingerprint(message), message)
            shown["content"] = handed.get("content")
            shown["tool_calls"] = [{"type": "function", "function": c["function"]} for c in handed["tool_calls"]]
        if message.get("reasoning_content"):
            shown["reasoning_content"] = message["reasoning_content"]
        return shown
