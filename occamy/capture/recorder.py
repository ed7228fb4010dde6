"""The state machine of one episode: classifies each request and keeps token histories that only ever grow.

Pure with respect to I/O. Per request it hashes and tokenises the new messages only; what was sampled is never
tokenised again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from occamy.capture.messages import GivenCall, Message, canonical_message, chain_seed, extend_chain
from occamy.capture.render import Renderer
from occamy.capture.template import TemplateError
from occamy.capture.turn import Prefix, Turn
from occamy.contracts.capture import CaptureRules
from occamy.contracts.episode import QuarantineReason

ROOT = "root"


class ContextLimitError(ValueError):
    """The prompt, with the answer asked for, does not fit the model's context."""


class EngineAnswerError(ValueError):
    """An engine's answer cannot be recorded token by token; the episode is quarantined."""


@dataclass(slots=True)
class _Step:
    """A turn under way or answered. `attempts` maps attempt -> sampled ids."""

    key: bytes
    segment: _Segment
    ordinal: int
    prompt_tokens: int
    cached_tokens: int
    delta: list[int]
    continues: int
    opened_by: str
    attempts: dict[int, list[int]] = field(default_factory=dict)
    begun: int = 0
    in_flight: int = 0


@dataclass(slots=True)
class _Segment:
    """An append-only history; `ids` is P_t of its last step."""

    run: _Run
    index: int
    ids: list[int] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    name: str
    segments: list[_Segment] = field(default_factory=list)
    opened: int = 0

    def tip(self) -> _Step:
        return self.segments[-1].steps[-1]


@dataclass(frozen=True, slots=True)
class _Opening:
    """Where a new step goes. `parent` is the answered turn whose tokens it inherits, with the attempt."""

    prefix: Prefix
    opened_by: str
    run: str
    parent: tuple[_Step, int] | None = None
    new: Sequence[Message] = ()


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last request of a role, so that the next one is compared, not hashed again."""

    messages: list[Message]
    tools: list[Any]
    links: list[bytes]


@dataclass(frozen=True, slots=True)
class Call:
    """What to ask the sampler. Give it back to `finish` or `abandon`, once."""

    step: _Step
    attempt: int
    prefix: Prefix
    input_ids: list[int]
    cached_tokens: int
    max_new_tokens: int
    seed: int
    stop_ids: tuple[int, ...]
    history: bytes


class Recorder:
    """Records one episode. Not thread-safe.

    `turns` holds the recorded attempts in order of completion; `quarantine` the first reason found, if any.
    """

    def __init__(
        self, episode_id: str, renderer: Renderer, *, seed: int, rules: CaptureRules, context_limit: int
    ) -> None:
        self.episode_id = episode_id
        self.turns: list[Turn] = []
        self.quarantine: QuarantineReason | None = None
        self._renderer, self._seed, self._limit = renderer, seed, context_limit
        self._rules = rules
        self._runs: dict[str, _Run] = {}
        self._latest: dict[str, _Run] = {}
        self._requests: dict[bytes, _Step] = {}
        self._answers: dict[bytes, tuple[_Step, int]] = {}
        self._given: dict[str, GivenCall] = {}
        self._handed: dict[bytes, Message] = {}
        self._seen: dict[str, _Seen] = {}
        self._ordinals = 0
        self._names: dict[str, int] = {}

    def begin(
        self,
        role: str,
        messages: list[Message],
        tools: list[Any],
        *,
        rewrite: str | None = None,
        max_tokens: int | None = None,
        stop_ids: tuple[int, ...] = (),
    ) -> Call:
        """Classify a request and return the token ids to sample from.

        Raises ContextLimitError when the ids and `max_tokens` exceed the context, TemplateError when the template
        cannot append the new messages; either leaves the record as it was.
        """
        links = self._links(role, messages, tools)
        step = self._retried(links[-1], rewrite)
        if step is not None:
            new_tokens = self._fit(step.prompt_tokens, max_tokens)
            prefix, cached = Prefix.retry, step.prompt_tokens
        else:
            opening = self._classify(role, messages, links, rewrite)
            step, new_tokens = self._open(links[-1], opening, messages, tools, max_tokens)
            prefix, cached = opening.prefix, step.cached_tokens
            self._latest[role] = step.segment.run
            if prefix is Prefix.unexplained:
                self.set_quarantine(QuarantineReason.unexplained_prefix)
        attempt = step.begun
        step.begun += 1
        step.in_flight += 1
        return Call(
            step=step,
            attempt=attempt,
            prefix=prefix,
            input_ids=step.segment.ids[: step.prompt_tokens],
            cached_tokens=cached,
            max_new_tokens=new_tokens,
            seed=self._derive(step.ordinal, attempt) & 0x7FFFFFFF,
            stop_ids=(self._renderer.closing_id, *stop_ids),
            history=links[-1],
        )

    def finish(
        self, call: Call, output: list[int], logprobs: list[float], version: int, finish: str
    ) -> tuple[Turn, Message]:
        """Record the sampled ids. Returns the turn and the assistant message that they say, tool-call ids assigned.

        Raises EngineAnswerError, and quarantines, when ids and log-probs disagree, an id is out of vocabulary, or a
        log-prob is not finite.
        """
        step = call.step
        if bad := next((p for p in logprobs if not math.isfinite(p)), None):
            raise self._refuse(call, f"a log-prob is {bad}")
        try:
            self._renderer.check_vocabulary(output)
        except TemplateError as e:
            raise self._refuse(call, str(e)) from e
        if len(output) != len(logprobs):
            raise self._refuse(call, f"{len(output)} sampled ids came with {len(logprobs)} log-probs")
        message = self._message(call, output)
        step.in_flight -= 1
        step.attempts[call.attempt] = output
        self._answers[extend_chain(call.history, [message], self._given)[0]] = (step, call.attempt)
        turn = Turn(
            run=step.segment.run.name,
            segment=step.segment.index,
            ordinal=step.ordinal,
            attempt=call.attempt,
            continues=step.continues,
            prefix=call.prefix,
            opened_by=step.opened_by,
            delta=step.delta,
            prompt_tokens=step.prompt_tokens,
            cached_tokens=call.cached_tokens,
            output=output,
            logprobs=logprobs,
            version=version,
            finish=finish,
        )
        self.turns.append(turn)
        return turn, message

    def abandon(self, call: Call) -> None:
        """Forget a call that got no answer; a turn without any attempt leaves no trace."""
        step = call.step
        step.in_flight -= 1
        if step.attempts or step.in_flight:
            return
        segment, run = step.segment, step.segment.run
        if self._requests.get(step.key) is step:
            del self._requests[step.key]
        segment.steps.remove(step)
        del segment.ids[segment.steps[-1].prompt_tokens if segment.steps else 0 :]
        if not segment.steps:
            run.segments.remove(segment)
        if not run.segments:
            del self._runs[run.name]
            self._latest = {role: r for role, r in self._latest.items() if r is not run}

    def set_quarantine(self, reason: QuarantineReason) -> None:
        """Quarantine the episode; the first reason stays."""
        self.quarantine = self.quarantine or reason

    def _links(self, role: str, messages: list[Message], tools: list[Any]) -> list[bytes]:
        seen = self._seen.get(role)
        if seen and seen.tools == tools and messages[: len(seen.messages)] == seen.messages:
            new = messages[len(seen.messages) :]
            links = seen.links + extend_chain(seen.links[-1], new, self._given)
        else:
            links = extend_chain(chain_seed(role, tools), messages, self._given)
        self._seen[role] = _Seen(messages, tools, links)
        return links

    def _retried(self, key: bytes, rewrite: str | None) -> _Step | None:
        """The step this request repeats. A rewrite may restore an early prompt, so it repeats only its own opening."""
        step = self._requests.get(key)
        if step is None or rewrite is None:
            return step
        return step if step.opened_by == rewrite and step is step.segment.run.tip() else None

    def _classify(self, role: str, messages: list[Message], links: list[bytes], rewrite: str | None) -> _Opening:
        if rewrite is not None:
            if rewrite in self._rules.announced and role in self._latest:
                return _Opening(Prefix.rewrite, rewrite, self._latest[role].name)
            return self._stray()
        last = next((i for i in range(len(messages) - 1, -1, -1) if messages[i]["role"] == "assistant"), -1)
        parent, new = self._answers.get(links[last]) if last >= 0 else None, messages[last + 1 :]
        if last < 0 or (role == ROOT and ROOT not in self._runs):
            return self._start(role)
        if parent is None or not new or any(m["role"] not in self._renderer.family.appendable for m in new):
            return self._stray()
        run = parent[0].segment.run
        if parent[0] is run.tip():
            return _Opening(Prefix.continued, "", run.name, parent, new)
        return _Opening(Prefix.branch, "branch", self._name("branch"), parent, new)

    def _start(self, role: str) -> _Opening:
        if role == ROOT:
            return _Opening(Prefix.start, "start", ROOT) if ROOT not in self._runs else self._stray()
        return _Opening(Prefix.auxiliary if role.startswith("aux") else Prefix.start, "start", self._name(role))

    def _stray(self) -> _Opening:
        return _Opening(Prefix.unexplained, "unexplained", self._name("stray"))

    def _name(self, stem: str) -> str:
        """Propose the next free run id of a stem; it is taken when the run opens."""
        number = self._names.get(stem, 0)
        while f"{stem}-{number}" in self._runs:
            number += 1
        self._names[stem] = number
        return f"{stem}-{number}"

    def _open(
        self, key: bytes, opening: _Opening, messages: list[Message], tools: list[Any], max_tokens: int | None
    ) -> tuple[_Step, int]:
        """Add the step of a new turn, and its segment unless it continues one. Changes nothing if it raises."""
        history, delta, cached, continues = self._history(opening, messages, tools)
        new_tokens = self._fit(len(history) + len(delta), max_tokens)
        run = self._runs.setdefault(opening.run, _Run(opening.run))
        if opening.prefix is Prefix.continued:
            segment = run.segments[-1]
        else:
            segment = _Segment(run, run.opened)
            run.opened += 1
            run.segments.append(segment)
            delta, continues = history + delta, -1
            history = []
        segment.ids[:] = history + delta
        step = _Step(key, segment, self._ordinals, len(segment.ids), cached, delta, continues, opening.opened_by)
        self._ordinals += 1
        segment.steps.append(step)
        self._requests[key] = step
        return step, new_tokens

    def _history(
        self, opening: _Opening, messages: list[Message], tools: list[Any]
    ) -> tuple[list[int], list[int], int, int]:
        """Return (P_t ⊕ Y_t of the parent, new ids, tokens shared with the prompt and answer before, attempt used)."""
        renderer = self._renderer
        if opening.parent is None:
            ids = list(renderer.opening([self._as_handed(m) for m in messages], tools))
            renderer.check_vocabulary(ids)
            shared = self._shared(self._runs[opening.run], ids) if opening.prefix is Prefix.rewrite else 0
            return [], ids, shared, -1
        step, attempt = opening.parent
        output = step.attempts[attempt]
        history = step.segment.ids[: step.prompt_tokens] + output
        closed = bool(output) and output[-1] == renderer.closing_id
        delta = [] if closed else [renderer.closing_id]
        delta.extend(renderer.appended(opening.new))
        renderer.check_vocabulary(delta)
        return history, delta, len(history), attempt

    def _shared(self, run: _Run, ids: list[int]) -> int:
        """Length of the common prefix of `ids` and the run's last prompt and answer."""
        tip = run.tip()
        before = tip.segment.ids[: tip.prompt_tokens] + (tip.attempts[max(tip.attempts)] if tip.attempts else [])
        for i, (a, b) in enumerate(zip(before, ids, strict=False)):
            if a != b:
                return i
        return min(len(before), len(ids))

    def _as_handed(self, message: Message) -> Message:
        """Return a message for rendering: an echoed tool-call turn as it was handed out, ids and extra keys dropped."""
        calls = message.get("tool_calls")
        if message["role"] == "assistant" and calls:
            handed = self._handed.get(canonical_message(message, self._given), message)
            functions = [{"type": "function", "function": c["function"]} for c in handed["tool_calls"]]
            return {"role": "assistant", "content": handed.get("content"), "tool_calls": functions}
        return {"role": message["role"], "content": message.get("content") or ""}

    def _message(self, call: Call, output: list[int]) -> Message:
        visible = output[:-1] if output and output[-1] in call.stop_ids else output
        answer = self._renderer.parse(visible)
        message: Message = {"role": "assistant", "content": answer.content}
        if answer.calls:
            message["tool_calls"] = calls = []
            for i, parsed in enumerate(answer.calls):
                call_id = f"call{self._derive(call.step.ordinal, call.attempt, i):032x}"
                self._given[call_id] = GivenCall(parsed.name, parsed.arguments)
                function = {"name": parsed.name, "arguments": parsed.arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            self._handed[canonical_message(message, self._given)] = message
        return message

    def _derive(self, *place: int) -> int:
        """128 bits fixed by episode, seed and place: tool-call ids and sampling seeds repeat with the episode."""
        text = repr((self.episode_id, self._seed, place)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "big")

    def _fit(self, prompt: int, asked: int | None) -> int:
        """Return the new tokens that may be sampled after `prompt` ids. Raises ContextLimitError."""
        if prompt + (asked or 1) > self._limit:
            raise ContextLimitError(
                f"This model's maximum context length is {self._limit} tokens. However, you requested "
                f"{prompt + (asked or 1)} tokens ({prompt} in the messages, {asked or 1} in the completion). "
                "Please reduce the length of the messages or completion."
            )
        return asked or self._limit - prompt

    def _refuse(self, call: Call, why: str) -> EngineAnswerError:
        self.abandon(call)
        self.set_quarantine(QuarantineReason.token_mismatch)
        return EngineAnswerError(
            f"episode {self.episode_id}: {why}; the engine and the tokenizer do not belong together"
        )
