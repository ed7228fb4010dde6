"""The parts a white-box harness is composed of, as configuration: one frozen record per part."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from occamy.contracts.record import Record


class ReactLoop(Record):
    """l: call the model, run the calls it asks for, show it the results, until it answers in plain text."""

    kind: Literal["react"] = "react"


class PlanActLoop(Record):
    """l: ask for a plan in plain text first, then act as `react` does; the plan survives every rewrite of history.

    A planning turn that calls tools is taken as acting at once: its calls run and no plan is kept. The model is asked
    for a new plan, which replaces the old one, after `replan_after` failed calls in a row.
    """

    kind: Literal["plan_act"] = "plan_act"
    ask: str = Field(default="plan", min_length=1)
    """User message that asks for a plan. Our choice."""
    act: str = Field(default="work", min_length=1)
    """User message that follows a plan. Our choice."""
    replan_after: int = Field(default=3, ge=1)
    """Failed calls in a row after which a new plan is asked for. Our choice."""
    max_plans: int = Field(default=2, ge=1)
    """Plans asked for in all, the first included. Our choice."""


class Prompt(Record):
    """p: how the conversation begins."""

    layout: str = "plain"
    """Name of a text in ``layouts/`` that becomes the system message, skill packs included; `plain` sends the request
    alone. briefed: one line, the laptop's. handbook: role, manner of working and skills under headings. Our choice."""


class Tools(Record):
    """U: the tool set."""

    source: Literal["task"] = "task"
    """task: the tools that the task contract offers, in its order."""


class Recovery(Record):
    """Middleware: what happens after a refused prompt, a cut turn, or calls that keep failing."""

    kind: Literal["recovery"] = "recovery"
    context: Literal["end", "harness_summary", "pruning"] = "harness_summary"
    """After ``context_length_exceeded``. end: the episode is timed_out. Else history is rewritten so and the turn is
    tried once more; a second refusal ends the episode."""
    keep_last: int = Field(default=1, ge=1)
    """Last steps that this rewrite leaves as they are. Our choice."""
    cut_turns: int = Field(default=1, ge=0)
    """Turns per episode, cut at the token limit and without calls, after which the model is told to go on; later ones
    are final answers and fail. Our choice."""
    cut_message: str = Field(default="go on", min_length=1)
    """User message after such a turn."""
    failing_calls: int = Field(default=5, ge=2)
    """Failed calls in a row after which the model is told so, once; as many again end the episode as agent_failed.
    Our choice."""
    failing_message: str = Field(default="look again", min_length=1)
    """User message after so many failed calls."""


class Subagents(Record):
    """Middleware: offers a tool that hands a goal to a child, whose final text is the tool's result.

    Calls of it that stand side by side in one turn run at the same time. Children sample together and act on the
    world in the order of their numbers, round by round, so that timing never decides what the world becomes. A child
    that does not complete gives a typed error: its outcome.
    """

    kind: Literal["subagents"] = "subagents"
    name: str = Field(default="delegate", pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the tool."""
    description: str = "Hand a goal to an assistant of your own, who has the same tools, and get back what it reports."
    """What the model is told of the tool."""
    modes: tuple[Literal["isolated", "fork"], ...] = Field(default=("isolated",), min_length=1)
    """isolated: the child sees its goal only. fork: it starts from a copy of its parent's history before the turn
    that called it. With both, the model chooses; the first is what it gets when it does not."""
    share: float = Field(default=0.25, gt=0, le=1)
    """Part of the turns, calls and tokens its parent has left that a child is lent; what it does not use comes back.
    Children of one turn are lent theirs in order. Our choice."""
    max_parallel: int = Field(default=4, ge=1)
    """Children of one parent at the same time. Our choice."""
    max_children: int = Field(default=16, ge=1)
    """Children per episode. Our choice."""
    max_depth: int = Field(default=1, ge=1)
    """1: children cannot delegate. Our choice."""


class Compaction(Record):
    """Middleware: keeps the context within a budget by rewriting history, declared to the recording proxy."""

    kind: Literal["compaction"] = "compaction"
    mode: Literal["summary", "harness_summary", "pruning"]
    """summary: the policy writes a summary that replaces all but the last steps. harness_summary: the harness writes
    it, from the calls it has seen. pruning: old tool results are cut."""
    budget_tokens: int = Field(ge=32)
    """Context budget, tokens. The laptop uses 224, the paper 131,072."""
    trigger: float = Field(default=0.8, gt=0, le=1)
    """Rewrite when the expected prompt passes this share of the budget. Our choice."""
    keep_last: int = Field(default=2, ge=1)
    """Last steps (an assistant turn and its tool results) that a rewrite leaves as they are. Our choice."""
    max_times: int = Field(default=3, ge=1)
    """Rewrites per agent; after them the context grows until the proxy refuses it. Our choice."""
    characters_per_token: float = Field(default=2.5, gt=0)
    """To estimate what was appended since the last usage report. Our choice, for the nano vocabulary."""


class Budgets(Record):
    """Middleware: ends the episode as timed_out when a budget of the task (turns, calls, tokens, wall) is used up."""

    kind: Literal["budgets"] = "budgets"
    stall_seconds: float = Field(default=30.0, gt=0)
    """A model call pending this long, seconds, when wall time ends is an infrastructure fault instead; so is a tool
    call pending this long and after wall time ended. Our choice."""


class Trace(Record):
    """Middleware: notes each model turn (summaries included), tool call, recovery and subagent."""

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


Loop = Annotated[ReactLoop | PlanActLoop, Field(discriminator="kind")]

LOOPS: tuple[type[Record], ...] = (ReactLoop, PlanActLoop)
"""Every loop."""

Middleware = Annotated[
    Recovery | Subagents | Compaction | Budgets | Trace | Retry | Failures, Field(discriminator="kind")
]

CHAIN: tuple[type[Record], ...] = (Recovery, Subagents, Compaction, Budgets, Trace, Retry, Failures)
"""Outermost first. Compaction lies outside budgets and trace, so that summary turns are budgeted and traced; retry
lies inside, so that tries are not; subagents lie outside budgets, which a child keeps by itself."""


class Composition(Record):
    """What a composition file says: h = Compose(l, p, U, K, m_1..m_k)."""

    name: str
    """Name of the harness in reports."""
    loop: Loop = ReactLoop()
    prompt: Prompt = Prompt()
    tools: Tools = Tools()
    skills: tuple[str, ...] = ()
    """K: names of skill packs whose text joins the system message."""
    middleware: tuple[Middleware, ...] = ()
    """m: wrapped around every model turn and tool call, outermost first."""
