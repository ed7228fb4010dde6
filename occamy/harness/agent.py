"""The white-box harness: runs a composition on one task against an OpenAI-compatible endpoint, to a typed outcome."""

from __future__ import annotations

from typing import Any

from occamy.contracts.capture import CaptureRules, RewriteKind
from occamy.contracts.episode import Outcome
from occamy.harness import parts
from occamy.harness.assignment import AgentRun, Assignment, Observation
from occamy.harness.client import ChatClient, ContextExceeded, EndpointError
from occamy.harness.compose import CompositionManifest
from occamy.harness.conversation import Call, Conversation, Reply, serialise_tools
from occamy.harness.middleware import (
    Act,
    BudgetEnded,
    Budgeting,
    Compacting,
    Stalled,
    Tracing,
    Turn,
    normalising,
    retrying,
)

_ANNOUNCED: dict[str, RewriteKind] = {"summary": "summary_replacement", "pruning": "history_pruning"}
"""Compaction mode -> rewrite kind announced to the recording proxy."""


class ComposedHarness:
    """h = Compose(l, p, U, K, m_1..m_k), ready to run."""

    def __init__(self, manifest: CompositionManifest) -> None:
        self.manifest = manifest
        self.digest = manifest.digest()
        compactions = (m for m in manifest.composition.middleware if isinstance(m, parts.Compaction))
        self.rules = CaptureRules(announced=tuple(_ANNOUNCED[m.mode] for m in compactions))

    async def run(self, task: Assignment) -> AgentRun:
        """Run the agent to its end. Never raises for what the model or the endpoint does: the outcome says it.

        completed: a final text. agent_failed: an empty or cut-off answer. timed_out: a budget, or the context limit, is
        used up. infra_failed: the endpoint failed after all retries, or stalled.
        """
        run = AgentRun()
        conversation = Conversation(self.manifest.system, task.request)
        turn, act, compacting = _chain(self.manifest.composition, task, run)
        try:
            reply = await _react(conversation, turn, act, task.max_new_tokens)
            if reply.finish_reason == "length":
                run.outcome, run.error = Outcome.agent_failed, "the final answer was cut at the token limit of a turn"
            elif not reply.text.strip():
                run.outcome, run.error = Outcome.agent_failed, "the final answer is empty"
            else:
                run.outcome, run.answer = Outcome.completed, reply.text
        except (BudgetEnded, ContextExceeded) as e:
            run.outcome, run.error = Outcome.timed_out, str(e)
        except (EndpointError, Stalled) as e:
            run.outcome, run.error = Outcome.infra_failed, str(e)
        run.compactions = compacting.times if compacting else 0
        return run


async def _react(conversation: Conversation, turn: Turn, act: Act, max_tokens: int) -> Reply:
    """The loop: sample, run the calls, show the results, until a turn asks for none."""
    while True:
        reply = await turn(conversation, max_tokens)
        conversation.say(reply)
        if not reply.calls:
            return reply
        for call in reply.calls:
            conversation.observe(call, act(call).content)


def _chain(composition: parts.Composition, task: Assignment, run: AgentRun) -> tuple[Turn, Act, Compacting | None]:
    """Compose the middleware around the bare model turn and the bare dispatch, innermost first."""
    turn, act = _bare_turn(task, run), _bare_act(task)
    compacting: Compacting | None = None
    for part in reversed(composition.middleware):
        match part:
            case parts.Failures():
                act = normalising(act)
            case parts.Retry():
                turn = retrying(part, turn)
            case parts.Budgets():
                budgeting = Budgeting(part, task.budget)
                turn, act = budgeting.turn(turn), budgeting.act(act)
            case parts.Compaction():
                compacting = Compacting(part)
                turn = compacting.turn(turn)
            case parts.Trace():
                tracing = Tracing(run.trace)
                turn, act = tracing.turn(turn), tracing.act(act)
    return turn, _counting(act, run), compacting


def _bare_turn(task: Assignment, run: AgentRun) -> Turn:
    client = ChatClient(task.http, task.base_url, task.api_key)
    settings: dict[str, Any] = {"model": task.model, "temperature": task.temperature}
    tools = serialise_tools(task.tools)
    if tools is not None:
        settings["tools"] = tools

    async def sample(conversation: Conversation, max_tokens: int) -> Reply:
        reply = await client.complete({**settings, "max_tokens": max_tokens}, conversation)
        conversation.rewrite = None
        conversation.measured(reply)
        run.turns += 1
        return reply

    return sample


def _bare_act(task: Assignment) -> Act:
    def dispatch(call: Call) -> Observation:
        return task.dispatch(call.name, call.arguments)

    return dispatch


def _counting(act: Act, run: AgentRun) -> Act:
    def counted(call: Call) -> Observation:
        observation = act(call)
        run.tool_calls += 1
        run.failed_calls += not observation.ok
        return observation

    return counted
