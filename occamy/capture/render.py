"""Text to token ids and back under one pinned chat template. Renders suffixes, never a history that was sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
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


class Renderer:
    """A tokenizer folder's template, tokenizer and family. Pure; caches are bounded."""

    def __init__(self, tokenizer_dir: Path) -> None:
        """Load `tokenizer_dir`. Raises ValueError when it has no chat template or one that no family pins."""
        self._template = ChatTemplate(tokenizer_dir)
        self.family = find_family(self._template.text, str(tokenizer_dir))
        self._backend = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
        self.vocab_size = _vocab_size(tokenizer_dir, self._backend.get_vocab_size())
        """Ids at or above this never reach an engine."""
        closing = self.single_token(self.family.closing)
        if closing is None:
            raise ValueError(f"{tokenizer_dir}: closing token {self.family.closing!r} is not one token")
        self.closing_id: int = closing
        self._special = _special_text(self._backend)
        self._appended = lru_cache(maxsize=8192)(self._render_appended)
        self._opening = lru_cache(maxsize=512)(self._render_opening)

    def opening(self, messages: Sequence[Message], tools: Sequence[Any]) -> Ids:
        """Return the ids of a whole prompt, generation prompt included. Used once per segment.

        As in `appended` and `answer`, a special token's text inside a message is plain text: only the template may
        speak in special tokens, so no content can forge a role.
        """
        return self._opening(orjson.dumps([list(messages), list(tools)]))

    def appended(self, messages: Sequence[Message]) -> Ids:
        """Return the ids that follow a closed assistant turn: these messages and the generation prompt.

        Costs O(new text). Raises TemplateError when the template does not render them as a suffix.
        """
        return self._appended(tuple((m["role"], m.get("content") or "") for m in messages))

    def answer(self, message: Message) -> Ids:
        """Return the ids of an assistant turn as the policy would have to sample it, closing token included.

        Arguments that are JSON are spelled compactly, keys in the order given. Raises TemplateError when the template
        does not render the turn after its own generation prompt.
        """
        before = [{"role": "user", "content": _MARK}]
        head = self._render(before)
        text = self._render([*before, _compact(message)], generation_prompt=False)
        end = text.rfind(self.family.closing)
        if not text.startswith(head) or end < len(head):
            raise TemplateError(f"family {self.family.name}: an assistant turn does not follow the generation prompt")
        return self.encode(text[len(head) : end + len(self.family.closing)])

    def parse(self, ids: Sequence[int]) -> ParsedAnswer:
        """Read sampled ids, stop token removed, as content or tool calls."""
        return self.family.parse(self.decode(ids))

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, special tokens recognised, none added."""
        parts = text.split(_BREAK)
        return tuple(i for part in parts for i in self._backend.encode(part, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens shown."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def single_token(self, text: str) -> int | None:
        """Return the id of a text that is exactly one token that decodes to it, else None."""
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 and self.decode(ids) == text else None

    def check_vocabulary(self, ids: Sequence[int]) -> None:
        """Raise TemplateError naming the first id outside [0, vocab_size)."""
        if ids and (max(ids) >= self.vocab_size or min(ids) < 0):
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise TemplateError(f"token id {bad} is outside the model's vocabulary of {self.vocab_size}")

    def _render_opening(self, key: bytes) -> Ids:
        messages, tools = orjson.loads(key)
        return self.encode(self._render(messages, tools))

    def _render_appended(self, new: tuple[tuple[str, str], ...]) -> Ids:
        messages = [{"role": role, "content": content} for role, content in new]
        if new[0][0] == "tool":
            function = {"name": _MARK, "arguments": "{}"}
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
        spelled = orjson.dumps([messages, tools]).decode()
        if self._special.search(spelled):
            messages, tools = orjson.loads(self._special.sub(lambda start: start[0] + _BREAK, spelled))
        return self._template.render(messages, tools, generation_prompt=generation_prompt)


def _special_text(backend: Tokenizer) -> re.Pattern[str]:
    """Match the first character of each special token's text. The unknown token speaks for any text, so it may stay."""
    unknown = getattr(backend.model, "unk_token", None)
    texts = {t.content for t in backend.get_added_tokens_decoder().values() if t.special} - {unknown}
    return re.compile("|".join(f"{re.escape(t[0])}(?={re.escape(t[1:])})" for t in sorted(texts)) or "(?!)")


def _compact(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    spelled = [{"type": "function", "function": _compact_function(call["function"])} for call in calls]
    return {"role": message["role"], "content": message.get("content"), "tool_calls": spelled}


def _compact_function(function: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = orjson.dumps(orjson.loads(function["arguments"])).decode()
    except orjson.JSONDecodeError:
        arguments = function["arguments"]
    return {"name": function["name"], "arguments": arguments}


def _vocab_size(folder: Path, tokenizer_size: int) -> int:
    """Read the model's embedding rows from config.json; a bare tokenizer folder bounds ids by its own size."""
    config = folder / "config.json"
    if not config.is_file():
        return tokenizer_size
    size = json.loads(config.read_text()).get("vocab_size")
    if not isinstance(size, int):
        raise ValueError(f"{config}: no vocab_size; is this a causal language model's folder?")
    return size
