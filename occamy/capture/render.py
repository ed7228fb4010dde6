"""Text to token ids and back under one pinned chat template. Renders suffixes, never a history that was sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from occamy.capture.families import find_family
from occamy.capture.families.family import ParsedAnswer
from occamy.capture.messages import Message
from occamy.capture.template import ChatTemplate, TemplateError

Ids = tuple[int, ...]

_MARK = "previousanswer"
"""Stands for the assistant turn before the appended messages; never reaches the token ids."""
_BREAK = "\ufdd0"
"""A Unicode noncharacter where text is cut before it is tokenised, so that no special token is read across it."""
_CACHED_OPENINGS = 64
"""Prompts kept as ids; the episodes of a group share theirs (our choice, as the next two)."""
_CACHED_APPENDS = 1024
_CACHED_CHARACTERS = 1024
"""Longer appended texts are not kept: they hardly ever come twice, and memory would be theirs."""


class Renderer:
    """A tokenizer folder's template, tokenizer and family. Pure; caches are bounded."""

    def __init__(self, tokenizer_dir: Path) -> None:
        """Load `tokenizer_dir`.

        Raises ValueError when it has no chat template or one that no family pins, or when a token that the family
        relies on is not one token of this tokenizer.
        """
        self._template = ChatTemplate(tokenizer_dir)
        self.family = find_family(self._template.text, str(tokenizer_dir))
        self._backend = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = _vocab_size(tokenizer_dir, self._backend.get_vocab_size())
        """Ids at or above this never reach an engine."""
        self.closing_id = self._one_token(self.family.closing, tokenizer_dir)
        for text in self.family.control:
            self._one_token(text, tokenizer_dir)
        more = (self.single_token(text) for text in self.family.stops)
        self.stop_ids: Ids = (self.closing_id, *(i for i in more if i is not None))
        """Ids that end what the policy samples, the closing token first."""
        self._special, self._in_tools = self._special_text()
        self._appended = lru_cache(_CACHED_APPENDS)(self._render_appended)
        self._opening = lru_cache(_CACHED_OPENINGS)(self._render_opening)
        self._prefill = self._find_prefill(tokenizer_dir)

    def opening(self, messages: Sequence[Message], tools: Sequence[Any]) -> Ids:
        """Return the ids of a whole prompt, generation prompt included. Used once per segment.

        As in `appended` and `answer`, a special token's text inside a message is plain text: only the template may
        speak in special tokens, so no content can forge a role. Of a message only role, content, tool calls and
        `reasoning_content` are rendered.
        """
        return self._opening(orjson.dumps([list(messages), list(tools)]))

    def appended(self, messages: Sequence[Message]) -> Ids:
        """Return the ids that follow a closed assistant turn: these messages and the generation prompt.

        They begin with what the template puts after the closing token (ChatML: a newline). Costs O(new text). Raises
        TemplateError when the template does not render them as a suffix.
        """
        new = tuple((m["role"], m.get("content") or "") for m in messages)
        short = sum(len(content) for _, content in new) <= _CACHED_CHARACTERS
        return self._appended(new) if short else self._render_appended(new)

    def answer(self, message: Message) -> Ids:
        """Return the ids of an assistant turn as the policy would have to sample it, closing token included.

        Arguments that are JSON objects are spelled by the template. What the template cannot say is left out:
        reasoning where the generation prompt gives it no room, and text beside a call in Llama 3. Raises
        TemplateError when the template does not render the turn after its own generation prompt.
        """
        before: Message = {"role": "user", "content": _MARK}
        head = self._render([before])
        said = {**message, "tool_calls": _spelled(message.get("tool_calls") or (), only_objects=False)}
        for spoken in (said, {**said, "reasoning_content": None}):
            text = self._render([before, spoken], generation_prompt=False)
            end = text.rfind(self.family.closing)
            if text.startswith(head) and end >= len(head):
                return self.encode(text[len(head) : end + len(self.family.closing)])
        raise TemplateError(f"family {self.family.name}: an assistant turn does not follow the generation prompt")

    def parse(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> ParsedAnswer:
        """Read sampled ids, stop token removed, as reasoning, content and tool calls.

        `tools` are the request's; without them Qwen3.5's arguments are all text.
        """
        return self.parse_text(self.decode(ids), tools)

    def parse_text(self, text: str, tools: Sequence[Any] = ()) -> ParsedAnswer:
        """Read sampled text as `parse` reads ids."""
        return self.family.parse(self._prefill + text, tools)

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, special tokens recognised, none added."""
        parts = self._backend.encode_batch_fast(text.split(_BREAK), add_special_tokens=False)
        return tuple(chain.from_iterable(part.ids for part in parts))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens shown."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def single_token(self, text: str) -> int | None:
        """Return the id of a text that is exactly one token that decodes to it, else None."""
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 and self.decode(ids) == text else None

    def check_vocabulary(self, ids: Sequence[int]) -> None:
        """Raise TemplateError naming the first id that is no whole number in [0, vocab_size)."""
        try:
            fits = not ids or (max(ids) < self.vocab_size and min(ids) >= 0)
        except TypeError:
            raise TemplateError(f"{type(ids).__name__} {list(ids)[:4]!r} holds no token ids") from None
        if not fits:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise TemplateError(f"token id {bad} is outside the model's vocabulary of {self.vocab_size}")

    def _one_token(self, text: str, source: Path) -> int:
        token = self.single_token(text)
        if token is None:
            raise ValueError(f"{source}: {text!r} is not one token, as family {self.family.name} needs")
        return token

    def _special_text(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """What is cut in any message, and in a tool's. The unknown token speaks for any text, so it may stay."""
        family = self.family
        unknown = getattr(self._backend.model, "unk_token", None)
        added = self._backend.get_added_tokens_decoder().values()
        special = {t.content for t in added if t.special} - {unknown} | family.control | {family.closing}
        return _cuts(special), _cuts(special | ({t.content for t in added} & family.delimiters))

    def _find_prefill(self, source: Path) -> str:
        """Return what the generation prompt writes of the answer itself."""
        if not self.family.header:
            return ""
        _, header, prefill = self._render([{"role": "user", "content": _MARK}]).rpartition(self.family.header)
        if not header:
            raise ValueError(f"{source}: the generation prompt lacks {self.family.header!r} of {self.family.name}")
        return prefill

    def _render_opening(self, key: bytes) -> Ids:
        messages, tools = orjson.loads(key)
        return self.encode(self._render(messages, tools))

    def _render_appended(self, new: tuple[tuple[str, str], ...]) -> Ids:
        messages = [{"role": role, "content": content} for role, content in new]
        if new[0][0] == "tool":
            function = {"name": _MARK, "arguments": {}}
            previous: Message = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
        else:
            previous = {"role": "assistant", "content": _MARK}
        text = self._render([{"role": "user", "content": "x"}, previous, *messages])
        mark = text.find(_MARK)
        end = text.find(self.family.closing, mark)
        if mark < 0 or end < 0:
            raise TemplateError(f"family {self.family.name}: roles {[r for r, _ in new]} do not follow a closed turn")
        return self.encode(text[end + len(self.family.closing) :])

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, generation_prompt: bool = True) -> str:
        """Render with every special token's text inside messages and tools cut in two."""
        said = [self._spoken(message) for message in messages]
        return self._template.render(
            said, _cut(tools, self._special), generation_prompt=generation_prompt, variables=self.family.variables
        )

    def _spoken(self, message: Message) -> Message:
        """Keep what templates read, in the form they read it."""
        said: Message = {"role": message["role"], "content": message.get("content") or ""}
        if calls := message.get("tool_calls"):
            if self.family.arguments == "object":
                calls = _spelled(calls, only_objects=True)
            said["tool_calls"] = [{"type": "function", "function": call["function"]} for call in calls]
        if isinstance(message.get("reasoning_content"), str):
            said["reasoning_content"] = message["reasoning_content"]
        cut: Message = _cut(said, self._in_tools if message["role"] == "tool" else self._special)
        return cut


def _spelled(calls: Iterable[Any], *, only_objects: bool) -> list[Any]:
    """Return calls with arguments that are a JSON object's text as that object.

    Other text, as only a broken call has it, stays, or with `only_objects` becomes the value of one argument.
    """
    spelled = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if isinstance(arguments, str):
            value = _json_or_none(arguments)
            if isinstance(value, dict):
                arguments = value
            elif only_objects:
                arguments = {"arguments": arguments}
        spelled.append({"type": "function", "function": {"name": name, "arguments": arguments}})
    return spelled


def _json_or_none(text: str) -> Any:
    """None also for what is nested deeper than orjson writes (254 levels): templates recurse, and so do we."""
    try:
        value = orjson.loads(text)
        orjson.dumps(value)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    return value


def _cuts(texts: Iterable[str]) -> re.Pattern[str]:
    """Match the first character of each text."""
    tails: dict[str, list[str]] = {}
    for text in sorted(texts):
        tails.setdefault(text[0], []).append(re.escape(text[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in tails.items()) or "(?!)")


def _cut(value: Any, texts: re.Pattern[str]) -> Any:
    """Return a JSON value with a break after each match in its strings."""
    if isinstance(value, str):
        return texts.sub(lambda start: start[0] + _BREAK, value)
    if isinstance(value, dict):
        return {_cut(key, texts): _cut(item, texts) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cut(item, texts) for item in value]
    return value


def _vocab_size(folder: Path, tokenizer_size: int) -> int:
    """Read the model's embedding rows from config.json; a bare tokenizer folder bounds ids by its own size."""
    config = folder / "config.json"
    if not config.is_file():
        return tokenizer_size
    read = json.loads(config.read_text())
    size = read.get("vocab_size", read.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise ValueError(f"{config}: no vocab_size; is this a causal language model's folder?")
    return size
