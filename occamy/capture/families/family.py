"""What a chat-template family declares, so that new messages can be appended on token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol


class ParsedCall(NamedTuple):
    """One tool call read from sampled text."""

    name: str
    arguments: str
    """JSON if the model wrote it well, the raw text after the name if not."""


class ParsedAnswer(NamedTuple):
    """Sampled text, read: reasoning, then plain content, then tool calls."""

    content: str | None
    """None only next to tool calls."""
    calls: tuple[ParsedCall, ...]
    reasoning: str | None = None
    """None if the model did not think."""


class Parser(Protocol):
    """Reads an assistant turn's text, closing token removed, whatever the template put there itself included."""

    def __call__(self, text: str, tools: Sequence[Any] = ()) -> ParsedAnswer:
        """`tools` are the request's, for families whose calls do not show the types of their arguments."""
        ...


@dataclass(frozen=True)
class TemplateFamily:
    """Pinned facts about chat templates that behave alike: what their text cannot tell.

    A new template joins by its digest once `make test` passes with it; a new family is one file beside this one.
    """

    name: str
    """Short name, for messages and lineage."""
    template_digests: frozenset[str]
    """``sha256:<hex>`` over the UTF-8 text of each chat template that behaves as declared here."""
    closing: str
    """The one token that closes an assistant turn; also the stop token."""
    appendable: frozenset[str]
    """Roles whose messages may follow an assistant turn inside a segment."""
    parse: Parser
    header: str = ""
    """What opens an assistant turn. The generation prompt's text after it (``<think>``) belongs to the answer."""
    control: frozenset[str] = frozenset()
    """The other tokens that mark roles. Each is one token, and none is ever read from a message."""
    delimiters: frozenset[str] = frozenset()
    """Texts around a tool's result. Where they are tokens, they are never read from a tool's message."""
    stops: tuple[str, ...] = ()
    """Further tokens that end what the policy samples, where the tokenizer has them."""
    arguments: Literal["text", "object"] = "text"
    """How the template takes a call's arguments: JSON text as it stands, or the object, which it spells itself."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Fixed values of template variables."""
