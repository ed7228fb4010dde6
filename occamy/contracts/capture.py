"""What a harness declares about its requests, so that the recording proxy can explain each one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from occamy.contracts.record import Record
from occamy.contracts.task import Budget

RewriteKind = Literal["summary_replacement", "history_pruning"]
"""How a harness shortens its history: a summary replaces old messages, or old tool results are cut in place."""

MixedVersions = Literal["never", "between_turns", "within_turns"]
"""Where the weights may change inside an episode that trains."""


class Marked(Record):
    """A message that the harness writes or cuts itself, known by how its text begins or ends."""

    role: Literal["user", "assistant", "tool"]
    """Role it is sent under."""
    starts: str | None = Field(default=None, min_length=1)
    """First characters of its text."""
    ends: str | None = Field(default=None, min_length=1)
    """Last characters of its text."""

    @model_validator(mode="after")
    def _says_something(self) -> Marked:
        if self.starts is None and self.ends is None:
            raise ValueError("a mark needs `starts`, `ends` or both")
        return self


class Auxiliary(Record):
    """Housekeeping calls of one kind, sent to a run of their own."""

    run: str = Field(pattern=r"^aux[a-z0-9-]*$")
    """Last part of the base URL before ``/v1``."""
    purpose: Literal["summary", "title", "memory", "other"]
    """What it is for. Only a summary may train: it is written by the policy and changes what the policy sees."""
    asks: Marked | None = None
    """Last message of such a call where it comes on the root's address, from whatever history."""


class CaptureRules(Record):
    """The declaration of one harness. Whatever it does not explain quarantines the episode."""

    announced: tuple[RewriteKind, ...] = ()
    """Rewrites that the harness announces itself, in the header ``x-occamy-rewrite`` of the rewritten request."""
    summaries: tuple[Marked, ...] = ()
    """Messages that stand for cut history, or begin with what does. A request of known messages and a new one of these
    is a summary replacement."""
    pruned: tuple[Marked, ...] = ()
    """What stands in place of a message whose content was cut: a tool result by its call id, other messages by role
    and order. A request that differs from the history only by these is history pruning."""
    cut_arguments: str = ""
    """How a string inside an old tool call's arguments ends where the harness cut it; "" if it cuts none. Counts as
    pruning."""
    trailers: tuple[Marked, ...] = ()
    """Messages that the harness appends after a rewrite, and may leave out again later."""
    auxiliaries: tuple[Auxiliary, ...] = ()
    """Housekeeping calls, each kind in a run of its own."""
    subagents: bool = False
    """Whether children run, on the base URL of run ``sub``; told apart by their first messages."""
    tools_may_change: bool = False
    """Whether the tool list may change within a run; each change opens a segment."""
    appends: tuple[Literal["tool", "user"], ...] = ("tool", "user")
    """Roles of the messages that it adds after an assistant turn. One of another role is unexplained."""

    @model_validator(mode="after")
    def _each_run_has_one_purpose(self) -> CaptureRules:
        runs = [auxiliary.run for auxiliary in self.auxiliaries]
        if twice := next((run for run in runs if runs.count(run) > 1), None):
            raise ValueError(f"two auxiliaries have the run {twice!r}; give each kind of call a run of its own")
        return self


class EpisodeSetup(Record):
    """What an episode was opened with: enough, with its recorded turns, to go on with it after a crash."""

    sampled_by: Literal["policy", "teacher"]
    seed: int = 0
    """Fixes tool-call ids and sampling seeds."""
    rules: CaptureRules = CaptureRules()
    mixed_versions: MixedVersions = "between_turns"
    """Asynchronous training updates weights while episodes run, so by default only a turn must be of one version."""
    key_digest: str = ""
    """Digest of the API key, which itself is not kept."""
    budget: Budget | None = None
    """Turns and sampled tokens, of all runs together, after which calls are refused; None leaves it to the harness."""
