"""Continuous batching on one thread: admits requests, runs one flat batch per step, never mixes weight versions."""

from __future__ import annotations

import sys
import threading
import traceback
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from occamy.engines.config import EngineConfig
from occamy.engines.local.model import Chunk, FlatBatch, Model
from occamy.engines.local.prefix import BLOCK, PrefixCache
from occamy.engines.local.sampling import SamplingParams, SamplingTable, Tops, likeliest


@dataclass(eq=False, slots=True)
class Sequence:
    """One generation, from submission to its end. Only the scheduler's thread writes it after `submit`."""

    rid: str
    call: str
    """rid of the /generate call that it belongs to: a batch or n > 1 gives each sequence a rid of its own."""
    tokens: array[int]
    """Input ids."""
    params: SamplingParams
    stream: bool = False
    """Report it after every token, not only at its end."""
    score_from: int | None = None
    """First input token of interest for `input_logprobs`; None computes none."""
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Tops] = field(default_factory=list)
    """The likeliest tokens at each position of the output; empty lists unless `params.top` asks for them."""
    input_logprobs: list[float] = field(default_factory=list)
    """Log-probs at temperature 1 of the input tokens after `score_from`."""
    input_tops: list[Tops] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    """SGLang's finish_reason, once ended: type "stop" (with "matched"), "length" (with "length") or "abort"."""
    error: str = ""
    """Why the engine failed on it; empty for every ordinary end."""
    version: str = ""
    """Weight version that sampled all of its tokens."""
    cached: int = 0
    """Input tokens whose keys and values were re-used."""
    row: int = -1
    computed: int = 0

    @property
    def done(self) -> bool:
        """It will not change any more."""
        return self.finish is not None or bool(self.error)


class Scheduler:
    """Owns the model, its cache and the sequences. Thread-safe methods: all public ones but `step`."""

    def __init__(
        self, model: Model, version: str, config: EngineConfig, report: Callable[[list[Sequence]], None]
    ) -> None:
        """`report` gets, on the generation thread after a step, the sequences that ended or (streaming) grew."""
        self.model, self.version, self._config, self._report = model, version, config, report
        self.context = min(config.context_length or model.spec.max_positions, model.spec.max_positions)
        rows = config.max_running + config.cached_rows
        self._cache = PrefixCache(model.new_cache(rows, self.context))
        self._table = SamplingTable(rows)
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._change = threading.Condition()
        self._aborts: list[Callable[[Sequence], bool]] = []
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._holding = self._stopping = False
        self.failure = ""
        """Traceback that ended the generation thread, empty while it is well."""
        self.counters = {"steps": 0, "input_tokens": 0, "cached_tokens": 0, "output_tokens": 0}

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue sequences. Raises RuntimeError when the generation thread has died."""
        with self._change:
            if self.failure:
                raise RuntimeError(f"generation stopped: {self.failure.splitlines()[-1]}")
            self._waiting.extend(sequences)
            self._change.notify()

    def abort(self, which: Callable[[Sequence], bool]) -> None:
        """End every waiting or running sequence that `which` picks with finish type "abort", before the next step."""
        with self._change:
            self._aborts.append(which)
            self._change.notify()

    def hold(self, on: bool) -> None:
        """On: start no further sequence; the running ones finish. Off: go on."""
        with self._change:
            self._holding = on
            self._change.notify()

    def call_when_idle(self, action: Callable[[], None]) -> Future[None]:
        """Run `action` on the generation thread once nothing runs; no sequence starts before. Resolves when it ran."""
        done: Future[None] = Future()
        with self._change:
            if self.failure:
                raise RuntimeError(f"generation stopped: {self.failure.splitlines()[-1]}")
            self._calls.append((action, done))
            self._change.notify()
        return done

    def replace(self, model: Model, version: str) -> Future[None]:
        """Serve another model of the same spec once running sequences are done; drops all cached prefixes."""

        def swap() -> None:
            self.model, self.version = model, version
            self._cache.flush()

        return self.call_when_idle(swap)

    def flush(self) -> Future[None]:
        """Drop all cached prefixes once nothing runs."""
        return self.call_when_idle(self._cache.flush)

    def load(self) -> tuple[int, int]:
        """(running, waiting) sequences."""
        return len(self._running), len(self._waiting)

    def stop(self) -> None:
        """End `run` after the current step."""
        with self._change:
            self._stopping = True
            self._change.notify()

    def run(self) -> None:
        """The generation thread. A failure inside fails every sequence and ends it; `failure` then says why."""
        try:
            with torch.inference_mode():
                while self._wait():
                    self.step()
        except Exception:
            self._fail(traceback.format_exc())

    def step(self) -> None:
        """Apply aborts and calls, admit what fits, and advance every running sequence by one batch."""
        ended = self._apply_aborts()
        self._apply_calls()
        self._admit()
        if self._running:
            ended += self._advance()
        if ended:
            self._report(ended)

    def _wait(self) -> bool:
        """Sleep until there is something to do. False when the engine is to stop."""
        with self._change:
            self._change.wait_for(self._has_work)
            return not self._stopping

    def _has_work(self) -> bool:
        startable = self._waiting and not self._holding
        return bool(self._stopping or self._running or startable or self._aborts or self._calls)

    def _apply_aborts(self) -> list[Sequence]:
        with self._change:
            tests, self._aborts = self._aborts, []
            if not tests:
                return []
            picked = [s for s in (*self._running.values(), *self._waiting) if any(test(s) for test in tests)]
            gone = {id(s) for s in picked}
            self._waiting = deque(s for s in self._waiting if id(s) not in gone)
        for sequence in picked:
            sequence.finish = {"type": "abort", "message": "Aborted by request"}
            if sequence.row >= 0:
                self._retire(sequence)
            else:
                sequence.version = self.version
        return picked

    def _apply_calls(self) -> None:
        while self._calls and not self._running:
            action, done = self._calls.popleft()
            action()
            done.set_result(None)

    def _admit(self) -> None:
        """Start waiting sequences in order. One whose prompt another row is just computing waits a step."""
        if self._holding or self._calls:
            return
        later: list[Sequence] = []
        while self._waiting and len(self._running) < self._config.max_running:
            with self._change:
                sequence = self._waiting.popleft()
            source, shared = self._cache.match(sequence.tokens)
            keep = 0
            if source >= 0:
                useful = min(shared, len(sequence.tokens) - 1)
                if sequence.score_from is not None:  # what is to be scored is to be computed
                    useful = min(useful, sequence.score_from)
                keep = min(useful, self._cache.rows[source].computed)
                if self._cache.rows[source].busy and useful - keep >= BLOCK:
                    later.append(sequence)
                    continue
            row = self._cache.claim(source if keep else -1, keep, len(self._running) + 1)
            self._cache.extend(row, sequence.tokens[keep:])
            sequence.row, sequence.computed, sequence.cached, sequence.version = row, keep, keep, self.version
            self._table.set(row, sequence.params)
            self._running[row] = sequence
            self.counters["input_tokens"] += len(sequence.tokens)
            self.counters["cached_tokens"] += keep
        with self._change:
            self._waiting.extendleft(reversed(later))

    def _advance(self) -> list[Sequence]:
        batch, sampled = self._plan()
        wanted = np.array([index for index, _ in sampled], dtype=np.int64)
        scored = [(self._running[c.row], *span) for c in batch.chunks if (span := self._scored(c))]
        asked = np.concatenate([wanted, *(np.arange(first, first + count) for _, first, count in scored)])
        logits = self.model.forward(batch, self._cache.data, asked)
        self._score(scored, logits[len(wanted) :])
        self.counters["steps"] += 1
        for chunk in batch.chunks:
            self._computed(chunk.row, chunk.count)
        for row in batch.rows[: batch.decode].tolist():
            self._computed(row, 1)
        if not sampled:
            return []
        drawn = self._table.sample(logits[: len(wanted)], batch.rows[wanted], batch.positions[wanted] + 1)
        self.counters["output_tokens"] += len(sampled)
        each = zip(sampled, *drawn, strict=True)
        return [s for (_, s), token, logprob, top in each if self._take(s, token, logprob, top)]

    def _scored(self, chunk: Chunk) -> tuple[int, int] | None:
        """(first index, count) of those tokens of the flat batch whose logits score an input token after them."""
        sequence = self._running[chunk.row]
        if sequence.score_from is None:
            return None
        first = max(chunk.position, sequence.score_from)
        count = min(chunk.position + chunk.count, len(sequence.tokens) - 1) - first
        return (chunk.start + first - chunk.position, count) if count > 0 else None

    def _score(self, scored: list[tuple[Sequence, int, int]], logits: Tensor) -> None:
        """Read the log-probs of input tokens from the logits [tokens, vocab] before them."""
        at = 0
        for sequence, _, count in scored:
            done = (sequence.score_from or 0) + len(sequence.input_logprobs) + 1
            logprobs = logits[at : at + count].log_softmax(dim=-1)
            target = torch.tensor(sequence.tokens[done : done + count], dtype=torch.int64)
            sequence.input_logprobs += logprobs.gather(1, target[:, None])[:, 0].tolist()
            if sequence.params.top:
                sequence.input_tops += [likeliest(row, sequence.params.top) for row in logprobs]
            at += count

    def _plan(self) -> tuple[FlatBatch, list[tuple[int, Sequence]]]:
        """The flat batch of this step, and (index of its last token, sequence) for each that samples."""
        single: list[Sequence] = []
        prompts: list[Sequence] = []
        for row in sorted(self._running):
            sequence = self._running[row]
            left = len(sequence.tokens) + len(sequence.output) - sequence.computed
            (single if left == 1 else prompts).append(sequence)
        tokens = [s.output[-1] if s.output else s.tokens[-1] for s in single]
        positions = [s.computed for s in single]
        rows = [s.row for s in single]
        sampled = list(enumerate(single))
        budget, chunks = self._config.prefill_tokens, []
        for s in prompts:
            count = min(budget, len(s.tokens) - s.computed)
            if not count:
                break
            budget -= count
            chunks.append(Chunk(len(tokens), count, s.row, s.computed))
            tokens.extend(s.tokens[s.computed : s.computed + count])
            positions.extend(range(s.computed, s.computed + count))
            rows.extend([s.row] * count)
            if s.computed + count == len(s.tokens):
                sampled.append((len(tokens) - 1, s))
        flat = FlatBatch(np.array(tokens), np.array(positions), np.array(rows), len(single), chunks)
        return flat, sampled

    def _computed(self, row: int, count: int) -> None:
        sequence = self._running[row]
        sequence.computed += count
        self._cache.rows[row].computed = sequence.computed

    def _take(self, sequence: Sequence, token: int, logprob: float, top: Tops) -> bool:
        """Add a sampled token. True when the sequence is to be reported."""
        if logprob != logprob:
            sequence.error = (
                f"weights of version {sequence.version} gave logits that are not finite; serve another checkpoint"
            )
            self._retire(sequence)
            self._cache.erase(sequence.row)
            return True
        sequence.output.append(token)
        sequence.logprobs.append(logprob)
        sequence.tops.append(top)
        if len(sequence.output) >= sequence.params.max_new_tokens:  # first, as in SGLang
            sequence.finish = {"type": "length", "length": len(sequence.output)}
        elif token in sequence.params.stop:
            sequence.finish = {"type": "stop", "matched": token}
        elif (strings := sequence.params.strings) and (text := strings.completed(sequence.output)):
            sequence.finish = {"type": "stop", "matched": text}
        if sequence.finish:
            self._retire(sequence)
        return sequence.stream or sequence.finish is not None

    def _retire(self, sequence: Sequence) -> None:
        del self._running[sequence.row]
        self._cache.extend(sequence.row, array("i", sequence.output))
        self._cache.release(sequence.row)

    def _fail(self, why: str) -> None:
        print(why, file=sys.stderr, flush=True)
        with self._change:
            self.failure = why
            lost = [*self._waiting, *self._running.values()]
            self._waiting.clear()
            calls, self._calls = self._calls, deque()
        reason = f"generation stopped: {why.splitlines()[-1]}"
        for _, done in calls:
            done.set_exception(RuntimeError(reason))
        for sequence in lost:
            sequence.error = reason
        self._running.clear()
        self._report(lost)
