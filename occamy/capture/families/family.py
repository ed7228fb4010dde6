"""What a chat-template family declares, so that new messages can be appended on token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class ParsedCall(NamedTuple):
    """One tool call read from sampled text."""

    name: str
    arguments: str
    """Raw text after the name: JSON if the model wrote it well, anything if not."""


class ParsedAnswer(NamedTuple):
    """Sampled text, read: plain content or tool calls."""

    content: str | None
    calls: tuple[ParsedCall, ...]


@dataclass(frozen=True)
class TemplateFamily:
    """Pinned facts about one chat template."""

    name: str
    """Short name, for messages and lineage."""
    template_digests: frozenset[str]
    """``sha256:<hex>`` over the UTF-8 text of each chat template that behaves as declared here."""
    closing: str
    """The one token that closes an assistant turn; also the stop token."""
    appendable: frozenset[str]
    """Roles whose messages may follow an assistant turn inside a segment."""
    parse: Callable[[str], ParsedAnswer]
    """Reads an assistant turn's text, closing token removed."""
