"""What a harness declares about its requests, so that the recording proxy can explain each one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from occamy.contracts.record import Record

RewriteKind = Literal["summary_replacement", "history_pruning"]
"""How a harness shortens its history: a summary replaces old messages, or old tool results are cut in place."""


class Marked(Record):
    """A message that the harness writes itself, known by how its text begins."""

    role: Literal["user", "assistant", "tool"]
    """Role it is sent under."""
    starts: str = Field(min_length=1)
    """First characters of its text."""


class Auxiliary(Record):
    """Housekeeping calls of one kind, sent to a run of their own."""

    run: str = Field(pattern=r"aux[a-z0-9-]*")
    """Last part of the base URL before ``/v1``."""
    purpose: Literal["summary", "title", "memory", "other"]
    """What it is for. Only a summary may train: it is written by the policy and changes what the policy sees."""


class CaptureRules(Record):
    """The declaration of one harness. Whatever it does not explain quarantines the episode."""

    announced: tuple[RewriteKind, ...] = ()
    """Rewrites that the harness announces itself, in the header ``x-occamy-rewrite`` of the rewritten request."""
    summaries: tuple[Marked, ...] = ()
    """Messages that stand for cut history. A request of known messages and a new one of these is a summary
    replacement."""
    pruned: tuple[Marked, ...] = ()
    """What stands in place of a message whose content was cut. A request that differs from the history only by these
    is history pruning."""
    trailers: tuple[Marked, ...] = ()
    """Messages that the harness appends after a rewrite."""
    auxiliaries: tuple[Auxiliary, ...] = ()
    """Housekeeping calls."""
    subagents: bool = False
    """Whether children run, on the base URL of run ``sub``; told apart by their first messages."""
    tools_may_change: bool = False
    """Whether the tool list may change within a run; each change opens a segment."""
