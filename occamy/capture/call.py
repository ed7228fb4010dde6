"""One call to the sampler: what is asked of it, and which answers cannot be what was sampled. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from occamy.capture.history import Ids, Step
from occamy.capture.render import Renderer
from occamy.capture.template import TemplateError
from occamy.capture.turn import Prefix
from occamy.contracts.episode import QuarantineReason

_ROUNDING = 1e-4
"""How far above 0 rounding may take a log-prob, nats (our choice, as in the conformance suite)."""


class ContextLimitError(ValueError):
    """The prompt, with the answer asked for, does not fit the model's context."""


class EngineAnswerError(ValueError):
    """An engine's answer cannot be recorded token by token; the episode is quarantined for `reason`."""

    def __init__(self, why: str, reason: QuarantineReason) -> None:
        super().__init__(why)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a request wants its answer sampled."""

    max_tokens: int | None = None
    """None takes what the context has room for."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer. They are looked for in the text as sampled: thinking and the markup of calls are part
    of it, what the prompt ends with is not."""
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Call:
    """What to ask the sampler. Give it back to `finish` or `abandon`, once."""

    step: Step
    attempt: int
    overlaps: bool
    """Whether another attempt at the turn was under way when this one was asked for."""
    prefix: Prefix
    input_ids: Ids
    """P_t, read-only and without a copy; `step.prompt_json()` is its JSON."""
    cached_tokens: int
    max_new_tokens: int
    seed: int
    stop_ids: tuple[int, ...]
    wanted: Wanted
    history: bytes
    tools: list[Any] | None
    """What the answer's calls are read by; None for a raw prompt, whose answer is all text."""


def check_answer(
    call: Call, output: Sequence[int], logprobs: Sequence[float], versions: array[int], renderer: Renderer
) -> None:
    """Raise EngineAnswerError when ids, log-probs and versions disagree in number, an id is out of vocabulary, a
    log-prob is not finite or above 0, or a policy sampled more ids than were asked for."""
    if not len(output) == len(logprobs) == len(versions):
        counts = f"{len(logprobs)} log-probs and {len(versions)} weight versions"
        raise EngineAnswerError(f"{len(output)} sampled ids came with {counts}", QuarantineReason.token_mismatch)
    try:
        renderer.check_vocabulary(output)
    except TemplateError as e:
        why = f"{e}; the engine and the tokenizer do not belong together"
        raise EngineAnswerError(why, QuarantineReason.token_mismatch) from e
    values = np.asarray(logprobs, np.float64)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values <= _ROUNDING)))
    if len(wrong):
        why = f"{values[wrong[0]]:g}, of sampled id {output[wrong[0]]}, is no log-prob; the engine is at fault"
        raise EngineAnswerError(why, QuarantineReason.infra_failed)
    if len(output) > call.max_new_tokens and versions[0] >= 0:
        why = f"{len(output)} sampled ids where max_new_tokens was {call.max_new_tokens}; the engine is at fault"
        raise EngineAnswerError(why, QuarantineReason.infra_failed)
