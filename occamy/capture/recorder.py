"""The state machine of one episode: classifies each request and keeps token histories that only ever grow.

Pure with respect to I/O. Per request it hashes and tokenises the new messages only; what was sampled is never
tokenised again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, Self

import orjson

from occamy.capture.call import Call, ContextLimitError, EngineAnswerError, Wanted, check_answer
from occamy.capture.dialogue import Dialogue
from occamy.capture.history import Attempt, Step, split_prints
from occamy.capture.incoming import Key, Reader, Request, read_text
from occamy.capture.messages import Message, extend_chain
from occamy.capture.render import Renderer
from occamy.capture.runs import Opening, Runs
from occamy.capture.stops import before_stop
from occamy.capture.template import TemplateError
from occamy.capture.turn import Prefix, Turn
from occamy.contracts.capture import CaptureRules, MixedVersions
from occamy.contracts.episode import QuarantineReason

_ANY = Wanted()


class Recorder:
    """Records one episode. Not thread-safe.

    `turns` holds the recorded attempts in order of completion; `quarantine` the first reason found, if any. `answered`
    counts the turns that have an attempt, `sampled` the tokens of all attempts.
    """

    def __init__(
        self,
        episode_id: str,
        renderer: Renderer,
        *,
        seed: int,
        rules: CaptureRules,
        context_limit: int,
        mixed_versions: MixedVersions = "between_turns",
    ) -> None:
        self.episode_id = episode_id
        self.turns: list[Turn] = []
        self.answered = self.sampled = 0
        self.quarantine: QuarantineReason | None = None
        self._renderer, self._seed, self._limit = renderer, seed, context_limit
        self._rules, self._mixed = rules, mixed_versions
        self._dialogue = Dialogue(renderer, rules)
        self._requests: dict[Key, list[Step]] = {}
        self._runs = Runs(rules, renderer.family.appendable, self._dialogue.given)
        self._reader = Reader(rules, self._dialogue.given)
        self._versions: set[int] = set()
        self._ordinals = 0

    @classmethod
    def restore(
        cls,
        episode_id: str,
        renderer: Renderer,
        turns: Iterable[Turn],
        quarantine: QuarantineReason | None,
        *,
        seed: int,
        rules: CaptureRules,
        context_limit: int,
        mixed_versions: MixedVersions = "between_turns",
    ) -> Self:
        """Return a recorder that goes on after `turns`, given in order of completion.

        It answers as the one that recorded them would, had it abandoned the calls that were in flight.
        """
        recorder = cls(
            episode_id, renderer, seed=seed, rules=rules, context_limit=context_limit, mixed_versions=mixed_versions
        )
        recorded = list(turns)
        outputs = {(turn.ordinal, turn.attempt): turn.output for turn in recorded}
        steps: dict[int, Step] = {}
        for turn in sorted(recorded, key=lambda turn: turn.ordinal):  # a later step may have been answered first
            if turn.ordinal not in steps:
                steps[turn.ordinal] = recorder._replay_step(turn, outputs)
        for turn in recorded:
            recorder._replay(turn, steps[turn.ordinal])
        recorder._ordinals = max(steps, default=-1) + 1
        recorder.quarantine = quarantine or recorder.quarantine
        return recorder

    def begin(
        self,
        role: str,
        messages: list[Message],
        tools: list[Any],
        *,
        rewrite: str | None = None,
        wanted: Wanted = _ANY,
    ) -> Call:
        """Classify a request and return the token ids to sample from.

        Raises ContextLimitError when the ids and the tokens that are wanted exceed the context, TemplateError when the
        template cannot append the new messages; either leaves the record as it was.
        """
        request = self._reader.read(role, messages, tools)
        step = self._retried(request, rewrite)
        if step is not None:
            return self._call(step, Prefix.retry, self._fit(step.prompt_tokens, wanted), wanted, tools)
        opening = self._runs.classify(request, rewrite)
        if opening.source is None or opening.anew:
            delta = self._dialogue.whole(request)
        else:
            step, attempt = opening.source
            delta = self._dialogue.appended(step.attempts[attempt].output, request)
        return self._open(request, opening, delta, wanted, tools)

    def begin_text(self, role: str, prompt: Sequence[int], *, wanted: Wanted = _ANY) -> Call:
        """Take a raw prompt, which opens a run of its own; as a second start of the root run it is unexplained.

        Raises as `begin` does, and TemplateError for an empty prompt.
        """
        if not len(prompt):
            raise TemplateError("the prompt is empty; nothing predicts a first token")
        ids = array("i", prompt)
        request = read_text(role, ids)
        step = self._retried(request, None)
        if step is not None:
            return self._call(step, Prefix.retry, self._fit(step.prompt_tokens, wanted), wanted, None)
        self._renderer.check_vocabulary(ids)
        return self._open(request, self._runs.start(role), ids, wanted, None)

    def finish(
        self,
        call: Call,
        output: Sequence[int],
        logprobs: Sequence[float],
        version: int | Sequence[int],
        finish: str,
    ) -> tuple[Turn, Message]:
        """Record the sampled ids. Returns the turn and the assistant message that they say, tool-call ids assigned.

        The message ends before a stop string, and the turn then counts as stopped; its ids are all that were sampled.
        `version` is the weight version of the answer, or of each id. Raises EngineAnswerError, and quarantines, as
        `check_answer` does.
        """
        step = call.step
        versions = array("i", [version] * len(output) if isinstance(version, int) else version)
        try:
            check_answer(call, output, logprobs, versions, self._renderer)
        except EngineAnswerError as e:
            self.abandon(call)
            self.set_quarantine(e.reason)
            raise EngineAnswerError(f"episode {self.episode_id}: {e}", e.reason) from e
        text = self._renderer.decode(output[:-1] if len(output) and output[-1] in call.stop_ids else output)
        shown = before_stop(text, call.wanted.stop)
        message = self._message(call, shown)
        step.in_flight -= 1
        segment, run = step.segment, step.segment.run
        turn = Turn(
            run=run.name,
            role=run.role,
            summary=run.summary,
            segment=segment.index,
            ordinal=step.ordinal,
            repeats=step.repeats,
            continues=step.continues,
            parent=step.parent,
            opened_by=step.opened_by,
            delta=step.delta,
            prompt_tokens=step.prompt_tokens,
            tools=segment.tools,
            heard=step.heard,
            attempt=call.attempt,
            overlaps=call.overlaps,
            prefix=call.prefix,
            cached_tokens=call.cached_tokens,
            temperature=call.wanted.temperature,
            top_p=call.wanted.top_p,
            output=array("i", output),
            logprobs=array("f", logprobs),
            versions=versions,
            finish=finish if shown == text else "stop",
            said=orjson.dumps(message),
        )
        self._keep(step, turn, message)
        return turn, message

    def abandon(self, call: Call) -> None:
        """Forget a call that got no answer; a turn without any attempt leaves no trace."""
        step = call.step
        step.in_flight -= 1
        step.begun -= call.attempt == step.begun - 1
        if step.attempts or step.in_flight:
            return
        self._requests[step.key].remove(step)
        self._ordinals -= step.ordinal == self._ordinals - 1
        self._runs.drop(step)

    def set_quarantine(self, reason: QuarantineReason) -> None:
        """Quarantine the episode; the first reason stays."""
        self.quarantine = self.quarantine or reason

    def _retried(self, request: Request, rewrite: str | None) -> Step | None:
        """The step this request repeats. A rewrite may restore an early prompt, so it repeats only its own opening; a
        child that begins as one before it, which has gone on since, is a child of its own."""
        same = self._requests.get(request.key)
        if not same:
            return None
        step = same[-1]
        at_tip = step is step.segment.run.tip()
        if rewrite is not None:
            return step if at_tip and step.opened_by == rewrite else None
        return step if at_tip or request.role != "sub" or step.opened_by != "start" else None

    def _open(
        self,
        request: Request,
        opening: Opening,
        delta: array[int],
        wanted: Wanted,
        tools: list[Any] | None,
    ) -> Call:
        """Add the step of a new turn, and its segment unless it continues one. Changes nothing if it raises."""
        prompt, answer = opening.inherited()
        size = len(prompt) + len(answer)
        new_tokens = self._fit(size + len(delta), wanted)
        run = self._runs.open(opening, request)
        cached = size or run.shared(delta)
        same = self._requests.setdefault(request.key, [])
        if opening.prefix is Prefix.continued:
            segment = run.segments[-1]
            known = segment.steps[-1].messages
            segment.ids.regrow(len(prompt), answer, delta)
        else:
            segment, known = run.open(request.tools_digest), 0
            delta = array("i", prompt.tobytes()) + answer + delta
            segment.ids.regrow(0, delta)
        segment.known = request.prints
        step = Step(
            key=request.key,
            repeats=same[-1].repeats + 1 if same else 0,
            segment=segment,
            ordinal=self._ordinals,
            prompt_tokens=len(segment.ids),
            cached_tokens=cached,
            delta=delta,
            continues=opening.continues,
            parent=opening.parent(),
            opened_by=opening.opened_by,
            heard=b"".join(request.prints[known:]),
            messages=len(request.prints),
        )
        segment.steps.append(step)
        same.append(step)
        self._ordinals += 1
        self._runs.hear(request.role, request.links[known:])
        if opening.prefix is Prefix.unexplained:
            self.set_quarantine(QuarantineReason.unexplained_prefix)
        return self._call(step, opening.prefix, new_tokens, wanted, tools)

    def _call(self, step: Step, prefix: Prefix, new_tokens: int, wanted: Wanted, tools: list[Any] | None) -> Call:
        attempt, overlaps = step.begun, step.in_flight > 0
        step.begun += 1
        step.in_flight += 1
        return Call(
            step=step,
            attempt=attempt,
            overlaps=overlaps,
            prefix=prefix,
            input_ids=step.prompt(),
            cached_tokens=step.prompt_tokens if prefix is Prefix.retry else step.cached_tokens,
            max_new_tokens=new_tokens,
            seed=self._derive(step, attempt) & 0x7FFFFFFF,
            stop_ids=self._renderer.stop_ids,
            wanted=wanted,
            history=step.key[-1],
            tools=tools,
        )

    def _keep(self, step: Step, turn: Turn, message: Message) -> None:
        """Take an answer into the record."""
        print_ = self._dialogue.hand_out(message)
        self.answered += not step.attempts
        self.sampled += len(turn.output)
        step.attempts[turn.attempt] = Attempt(turn.output, print_)
        self._runs.answered(turn.role, extend_chain(step.key[-1], [print_])[0], step, turn.attempt)
        self.turns.append(turn)
        self._check_versions(turn)

    def _check_versions(self, turn: Turn) -> None:
        """Quarantine when weights changed where the recipe does not allow it."""
        sampled = set(turn.versions)
        self._versions |= sampled
        mixed = sampled if self._mixed == "between_turns" else self._versions
        if self._mixed != "within_turns" and len(mixed) > 1:
            self.set_quarantine(QuarantineReason.mixed_weight_versions)

    def _replay(self, turn: Turn, step: Step) -> None:
        """Take a stored answer into the record."""
        step.begun = max(step.begun, turn.attempt + 1)
        if turn.prefix is Prefix.unexplained:
            self.set_quarantine(QuarantineReason.unexplained_prefix)
        self._keep(step, turn, orjson.loads(turn.said))

    def _replay_step(self, turn: Turn, outputs: dict[tuple[int, int], array[int]]) -> Step:
        """Add the step of a stored turn. All steps before it are there; `outputs` are by ordinal and attempt."""
        run = self._runs.restore(turn.run, turn.role, turn.summary)
        prints = split_prints(turn.heard)
        if turn.opened_by:
            segment = run.open(turn.tools)
            segment.index = turn.segment  # those between that nobody answered are gone
            links = extend_chain(b"", prints)
            segment.ids.regrow(0, turn.delta)
            segment.known = prints
        else:
            segment = run.segments[-1]
            last = segment.steps[-1]
            links = extend_chain(last.key[-1], prints)
            segment.ids.regrow(last.prompt_tokens, outputs[last.ordinal, turn.continues], turn.delta)
            segment.known = segment.known[: last.messages] + prints
        step = Step(
            key=(turn.role, turn.tools, links[-1]),
            repeats=turn.repeats,
            segment=segment,
            ordinal=turn.ordinal,
            prompt_tokens=turn.prompt_tokens,
            cached_tokens=turn.cached_tokens,
            delta=turn.delta,
            continues=turn.continues,
            parent=turn.parent,
            opened_by=turn.opened_by,
            heard=turn.heard,
            messages=len(segment.known),
        )
        segment.steps.append(step)
        self._requests.setdefault(step.key, []).append(step)
        self._runs.hear(turn.role, links)
        return step

    def _message(self, call: Call, text: str) -> Message:
        if call.tools is None:
            return {"role": "assistant", "content": text}
        call_ids = (f"call{self._derive(call.step, call.attempt, i):032x}" for i in count())
        return self._dialogue.read(text, call.tools, call_ids)

    def _derive(self, step: Step, *place: int) -> int:
        """128 bits fixed by episode, seed, history and place: tool-call ids and sampling seeds repeat with the
        episode, in whatever order its agents ask."""
        text = repr((self.episode_id, self._seed, step.key, step.repeats, place)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "big")

    def _fit(self, prompt: int, wanted: Wanted) -> int:
        """Return the new tokens that may be sampled after `prompt` ids. Raises ContextLimitError."""
        asked = wanted.max_tokens
        if prompt + (asked or 1) > self._limit:
            raise ContextLimitError(
                f"This model's maximum context length is {self._limit} tokens. However, you requested "
                f"{prompt + (asked or 1)} tokens ({prompt} in the messages, {asked or 1} in the completion). "
                "Please reduce the length of the messages or completion."
            )
        return asked or self._limit - prompt
