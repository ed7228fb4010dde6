"""A tokenizer folder's chat template, rendered the way transformers renders it, without loading transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_NO_VARIABLES: Mapping[str, Any] = {}


class TemplateError(ValueError):
    """The template cannot express what was asked of it."""


class ChatTemplate:
    """A compiled template. `text` is its source, what a family pins by digest."""

    def __init__(self, tokenizer_dir: Path) -> None:
        """Read ``chat_template.jinja``, else the entry of ``tokenizer_config.json``.

        Raises ValueError naming the folder when there is no single template or it does not compile.
        """
        path = tokenizer_dir / "tokenizer_config.json"
        config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        separate = tokenizer_dir / "chat_template.jinja"
        text = separate.read_text() if separate.is_file() else config.get("chat_template")
        if not isinstance(text, str):
            raise ValueError(f"{tokenizer_dir}: no single chat template; save one with the tokenizer")
        self.text = text
        self._specials = {k: _token(v) for k, v in config.items() if k.endswith("_token") and v is not None}
        try:
            self._template = _environment().from_string(text)
        except JinjaError as e:
            raise ValueError(f"{tokenizer_dir}: the chat template does not compile: {e}") from e

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        *,
        generation_prompt: bool,
        variables: Mapping[str, Any] = _NO_VARIABLES,
    ) -> str:
        """Return the text of a conversation; `variables` are further names that the template reads.

        Raises TemplateError when the template refuses it, or fails on it: its code comes with the model.
        """
        names = {**self._specials, **variables, "messages": messages, "tools": tools or None}
        try:
            return self._template.render(names, add_generation_prompt=generation_prompt)
        except JinjaError as e:
            raise TemplateError(f"the chat template refuses these messages: {e}") from e
        except Exception as e:
            raise TemplateError(f"the chat template fails on these messages: {e!r}") from e


def _environment() -> ImmutableSandboxedEnvironment:
    """The names and whitespace rules that published templates rely on (transformers' documentation)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> NoReturn:
    raise JinjaError(message)


def _token(entry: Any) -> Any:
    """A special token is a string, or an object that carries it."""
    return entry["content"] if isinstance(entry, dict) else entry
