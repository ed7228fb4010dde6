"""The parts a white-box harness is composed of, as configuration: one frozen record per part."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from occamy.contracts.record import Record


class ReactLoop(Record):
    """l: call the model, run the calls it asks for, show it the results, until it answers in plain text."""

    kind: Literal["react"] = "react"


class Prompt(Record):
    """p: how the conversation begins."""

    layout: Literal["plain", "briefed"] = "plain"
    """plain: the request alone, no system message. briefed: one system line, `work`, before it. Our choice."""


class Tools(Record):
    """U: the tool set."""

    source: Literal["task"] = "task"
    """task: the tools that the task contract offers, in its order."""


class Compaction(Record):
    """Middleware: keeps the context within a budget by rewriting history, declared to the recording proxy."""

    kind: Literal["compaction"] = "compaction"
    mode: Literal["summary", "pruning"]
    """summary: the policy writes a summary that replaces all but the last steps. pruning: old tool results are cut."""
    budget_tokens: int = Field(ge=32)
    """Context budget, tokens. The laptop uses 224, the paper 131,072."""
    trigger: float = Field(default=0.8, gt=0, le=1)
    """Rewrite when the expected prompt passes this share of the budget. Our choice."""
    keep_last: int = Field(default=2, ge=1)
    """Last steps (an assistant turn and its tool results) that a rewrite leaves as they are. Our choice."""
    max_times: int = Field(default=3, ge=1)
    """Rewrites per episode; after them the context grows until the proxy refuses it. Our choice."""
    characters_per_token: float = Field(default=2.5, gt=0)
    """To estimate what was appended since the last usage report. Our choice, for the nano vocabulary."""


class Budgets(Record):
    """Middleware: ends the episode as timed_out when a budget of the task (turns, calls, tokens, wall) is used up."""

    kind: Literal["budgets"] = "budgets"
    stall_seconds: float = Field(default=30.0, gt=0)
    """A model call pending this long, seconds, when wall time ends is an infrastructure fault instead. Our choice."""


class Trace(Record):
    """Middleware: notes each model turn (summaries included) and tool call."""

    kind: Literal["trace"] = "trace"


class Retry(Record):
    """Middleware: repeats a model call, byte for byte, after a transport error or a server error (5xx, 429)."""

    kind: Literal["retry"] = "retry"
    attempts: int = Field(default=3, ge=1)
    """Tries in all. Our choice."""
    backoff_seconds: float = Field(default=0.1, ge=0)
    """Pause before the second try, doubled each time, seconds. Our choice."""


class Failures(Record):
    """Middleware: a call whose arguments are no JSON object gets a typed error as its result and is not dispatched."""

    kind: Literal["failures"] = "failures"


Middleware = Annotated[Compaction | Budgets | Trace | Retry | Failures, Field(discriminator="kind")]

CHAIN: tuple[type[Record], ...] = (Compaction, Budgets, Trace, Retry, Failures)
"""Outermost first. Compaction lies outside, so that summary turns are budgeted and traced; retry lies inside, so that
tries are not."""


class Composition(Record):
    """What a composition file says: h = Compose(l, p, U, K, m_1..m_k)."""

    name: str
    """Name of the harness in reports."""
    loop: ReactLoop = ReactLoop()
    prompt: Prompt = Prompt()
    tools: Tools = Tools()
    skills: tuple[str, ...] = ()
    """K: names of skill packs whose text joins the system message."""
    middleware: tuple[Middleware, ...] = ()
    """m: wrapped around every model turn and tool call, outermost first."""
