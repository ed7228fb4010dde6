"""The white-box harness: runs a composition on one task against an OpenAI-compatible endpoint, to a typed outcome."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from occamy.contracts.capture import CaptureRules, RewriteKind
from occamy.contracts.episode import Outcome
from occamy.harness import parts
from occamy.harness.assignment import AgentRun, Assignment, Observation
from occamy.harness.budgets import BudgetEnded, Budgeting, Purse, Stalled
from occamy.harness.client import ChatClient, ContextExceeded, EndpointError
from occamy.harness.compose import CompositionError, CompositionManifest
from occamy.harness.conversation import Call, Conversation, Reply, serialise_tools
from occamy.harness.dispatch import ToolBroken, dispatching
from occamy.harness.loops import Chain, play
from occamy.harness.middleware import Act, Compacting, Event, Tracing, Turn, normalising
from occamy.harness.recovery import CallsKeepFailing, Recovering, retrying
from occamy.harness.subagents import ChildFailed, Delegating, Family, child_url

_LOG = logging.getLogger(__name__)

_ANNOUNCED: dict[str, RewriteKind] = {
    "summary": "summary_replacement",
    "harness_summary": "summary_replacement",
    "pruning": "history_pruning",
}
"""How history is rewritten -> the rewrite kind announced to the recording proxy."""


class ComposedHarness:
    """h = Compose(l, p, U, K, m_1..m_k), ready to run."""

    def __init__(self, manifest: CompositionManifest) -> None:
        self.manifest = manifest
        self.digest = manifest.digest()
        self.rules = _rules(manifest.composition)

    async def run(self, task: Assignment) -> AgentRun:
        """Run the agent to its end. Never raises for what the model, the endpoint or a tool does: the outcome says it.

        completed: a final text. agent_failed: an empty or cut-off answer, or calls that keep failing. timed_out: a
        budget, or the context limit, is used up. infra_failed: the endpoint failed after all retries or stalled, a
        tool raised or hung, or this harness itself failed. Raises CompositionError when the task has a tool of the
        name under which this composition delegates.
        """
        taken = {tool["function"]["name"] for tool in task.tools}
        for part in self.manifest.composition.middleware:
            if isinstance(part, parts.Subagents) and part.name in taken:
                raise CompositionError(f"the task has a tool {part.name!r} of its own; set another name of subagents")
        agent = _Agent(self.manifest, task, Purse(task.budget))
        return await agent.play(Conversation(self.manifest.system, task.request))


def _rules(composition: parts.Composition) -> CaptureRules:
    announced: list[RewriteKind] = []
    for part in composition.middleware:
        match part:
            case parts.Compaction():
                announced.append(_ANNOUNCED[part.mode])
            case parts.Recovery() if part.context != "end":
                announced.append(_ANNOUNCED[part.context])
    subagents = any(isinstance(part, parts.Subagents) for part in composition.middleware)
    return CaptureRules(announced=tuple(dict.fromkeys(announced)), subagents=subagents)


@dataclass(frozen=True)
class _Agent:
    """One agent of an episode: the root, or a child."""

    manifest: CompositionManifest
    task: Assignment
    purse: Purse
    depth: int = 0
    family: Family = field(default_factory=Family)
    stepped: Callable[[Turn], Turn] | None = None
    """Keeps a child's turns in step with those beside it."""

    async def play(self, conversation: Conversation) -> AgentRun:
        run = AgentRun()
        try:
            chain = self._chain(conversation, run)
            reply = await play(self.manifest.composition.loop, conversation, chain, self.task.max_new_tokens)
            if reply.finish_reason == "length":
                run.outcome, run.error = Outcome.agent_failed, "the final answer was cut at the token limit of a turn"
            elif not reply.text.strip():
                run.outcome, run.error = Outcome.agent_failed, "the final answer is empty"
            else:
                run.outcome, run.answer = Outcome.completed, reply.text
        except CallsKeepFailing as e:
            run.outcome, run.error = Outcome.agent_failed, str(e)
        except (BudgetEnded, ContextExceeded) as e:
            run.outcome, run.error = Outcome.timed_out, str(e)
        except (EndpointError, Stalled, ToolBroken, ChildFailed) as e:
            run.outcome, run.error = Outcome.infra_failed, str(e)
        except Exception as e:
            _LOG.exception("the harness failed")
            run.outcome, run.error = Outcome.infra_failed, f"the harness failed: {type(e).__name__}: {e}"
        run.compactions = conversation.rewrites
        return run

    def _chain(self, conversation: Conversation, run: AgentRun) -> Chain:
        """Compose the middleware around the bare model turn and the bare tool call, innermost first."""
        middleware = self.manifest.composition.middleware
        events: list[Event] = run.trace if any(isinstance(m, parts.Trace) for m in middleware) else []
        tools = list(self.task.tools)
        delegate: str | None = None
        act = dispatching(self.task)
        turns: list[Callable[[Turn], Turn]] = []
        for part in reversed(middleware):
            match part:
                case parts.Failures():
                    act = normalising(act)
                case parts.Retry():
                    turns.append(partial(retrying, part))
                case parts.Trace():
                    tracing = Tracing(events)
                    turns.append(tracing.turn)
                    act = tracing.act(act)
                case parts.Budgets():
                    budgeting = Budgeting(part, self.purse)
                    turns.append(budgeting.turn)
                    act = budgeting.act(act)
                case parts.Compaction():
                    turns.append(Compacting(part).turn)
                case parts.Subagents():
                    delegating = self._delegating(part, conversation, run, events)
                    delegate = part.name
                    tools += delegating.schemas()
                    act = delegating.act(act)
                case parts.Recovery():
                    recovering = Recovering(part, events)
                    turns.append(recovering.turn)
                    act = recovering.act(act)
        turn = self._bare_turn(tools, run)
        for wrap in turns:
            turn = wrap(turn)
        if self.stepped is not None:
            turn = self.stepped(turn)
        return Chain(turn, _counting(act, run), delegate)

    def _delegating(
        self, part: parts.Subagents, conversation: Conversation, run: AgentRun, events: list[Event]
    ) -> Delegating:
        async def spawn(child: Conversation, purse: Purse, stepped: Callable[[Turn], Turn]) -> AgentRun:
            task = dataclasses.replace(self.task, base_url=child_url(self.task.base_url))
            return await _Agent(self.manifest, task, purse, self.depth + 1, self.family, stepped).play(child)

        return Delegating(
            part,
            system=self.manifest.system,
            conversation=conversation,
            purse=self.purse,
            run=run,
            depth=self.depth,
            family=self.family,
            spawn=spawn,
            events=events,
        )

    def _bare_turn(self, tools: Sequence[dict[str, Any]], run: AgentRun) -> Turn:
        task = self.task
        client = ChatClient(task.http, task.base_url, task.api_key)
        settings: dict[str, Any] = {"model": task.model, "temperature": task.temperature}
        serialised = serialise_tools(tools)
        if serialised is not None:
            settings["tools"] = serialised

        async def sample(conversation: Conversation, max_tokens: int) -> Reply:
            reply = await client.complete({**settings, "max_tokens": max_tokens}, conversation)
            conversation.rewrite = None
            conversation.measured(reply)
            run.turns += 1
            return reply

        return sample


def _counting(act: Act, run: AgentRun) -> Act:
    async def counted(call: Call) -> Observation:
        observation = await act(call)
        run.tool_calls += 1
        run.failed_calls += not observation.ok
        return observation

    return counted
