"""What any harness is given and gives back, and what every harness is to the rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from occamy.contracts.capture import CaptureRules
from occamy.contracts.episode import Outcome
from occamy.contracts.record import Record
from occamy.contracts.task import Budget

if TYPE_CHECKING:  # half a second of imports that most harnesses do without
    from occamy.sandboxes.protocol import Sandbox
    from occamy.worlds.mcp import ToolServer


class Observation(Protocol):
    """Result of a tool call."""

    @property
    def content(self) -> str:
        """What the model sees."""

    @property
    def ok(self) -> bool:
        """False for a typed error."""

    @property
    def error(self) -> str | None:
        """The typed error."""


class Watched(Protocol):
    """What the recording proxy sees of a program."""

    @property
    def pending(self) -> float:
        """Seconds that the oldest model call has been waiting for its answer, 0 when none is."""

    @property
    def idle(self) -> float:
        """Seconds since the last model call ended."""

    @property
    def used_up(self) -> str:
        """What of the budget a call was refused for, "" while none was."""

    @property
    def too_long(self) -> str:
        """Why the last call was refused, if the context limit was why, else ""."""


@dataclass(frozen=True)
class Programs:
    """Agent programs that a sandbox has of its own, in the image of its pod."""

    python: str
    """The Python that they may run on."""
    folder: str
    """Holds one folder per program."""


@dataclass(frozen=True)
class Outside:
    """Where a harness acts that is a program of its own."""

    episode_id: str
    sandbox: Sandbox
    """Its workspace is the world's."""
    programs: Programs | None
    """None where it sees those of this machine."""
    tools: ToolServer
    """Serves the world's tools to it."""
    watch: Callable[[], Watched]
    """Asks the recording proxy what the program is doing."""


@dataclass(frozen=True)
class Assignment:
    """What one run of an agent is given."""

    request: str
    """The user's words."""
    tools: Sequence[dict[str, Any]]
    """OpenAI tool schemas."""
    dispatch: Callable[[str, str], Observation]
    """Runs a tool by name and raw JSON arguments; never raises for the agent's mistakes."""
    budget: Budget
    base_url: str
    """Endpoint of this run, up to and with ``/v1``."""
    api_key: str
    model: str
    """Model name sent with each request."""
    temperature: float
    max_new_tokens: int
    """Most tokens sampled per turn."""
    http: aiohttp.ClientSession
    """Connections of the rollout's event loop."""
    context_limit: int = 0
    """Prompt plus answer, tokens, that the endpoint takes; 0 when unknown."""
    outside: Outside | None = None
    """None for a harness that runs in this process."""
    tools_may_block: bool = True
    """False where `dispatch` answers out of memory: a call then needs no thread that could be given up."""


@dataclass
class AgentRun:
    """How a run went."""

    outcome: Outcome = Outcome.infra_failed
    answer: str = ""
    """Final plain text, "" unless completed."""
    error: str = ""
    """Why it did not complete."""
    turns: int = 0
    """Model turns that came back, summary turns included."""
    tool_calls: int = 0
    failed_calls: int = 0
    """Calls answered with a typed error."""
    compactions: int = 0
    children: int = 0
    """Subagents that ran. Their tool calls count as this run's, their turns do not."""
    trace: list[dict[str, Any]] = field(default_factory=list)
    """Events of the trace middleware, in order."""


class Harness(Protocol):
    """An agent program with its configuration resolved: white-box compositions and black-box adapters alike."""

    @property
    def manifest(self) -> Record:
        """What runs, in full; written before the rollout."""

    @property
    def digest(self) -> str:
        """Digest of the manifest; stands in every episode record."""

    @property
    def rules(self) -> CaptureRules:
        """What it declares about its requests."""

    async def run(self, task: Assignment) -> AgentRun:
        """Run the agent to its end. Never raises for what the model or the endpoint does: the outcome says it."""
