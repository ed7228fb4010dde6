"""The runs of one episode, and the table of prefix classes: where in them a request belongs."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

import numpy as np

from occamy.capture.history import Ids, Run, Step
from occamy.capture.incoming import Request
from occamy.capture.messages import GivenCall, is_marked
from occamy.capture.rewrites import overlap, recognise
from occamy.capture.turn import Prefix
from occamy.contracts.capture import CaptureRules

ROOT = "root"
_SUB = "sub"


@dataclass(frozen=True, slots=True)
class Opening:
    """Where a new step goes."""

    prefix: Prefix
    opened_by: str
    run: str
    continues: int = -1
    """Attempt of the run's last step that the request holds."""
    source: tuple[Step, int] | None = None
    """Answered step, with the attempt, that the prompt goes on from; without, it is rendered."""
    anew: bool = False
    """Whether it is rendered all the same, as a fork's with other tools than its source."""

    def inherited(self) -> tuple[Ids, array[int]]:
        """Return P_t and Y_t of the source, empty where the prompt is rendered."""
        if self.source is None or self.anew:
            return np.empty(0, np.int32), array("i")
        step, attempt = self.source
        return step.prompt(), step.attempts[attempt].output

    def parent(self) -> tuple[int, int] | None:
        """Return ordinal and attempt of the source, if it is a turn of another run."""
        if self.source is None or self.prefix is Prefix.continued:
            return None
        step, attempt = self.source
        return step.ordinal, attempt


class Runs:
    """All runs of an episode. `given` are the tool calls handed out so far."""

    def __init__(self, rules: CaptureRules, appendable: frozenset[str], given: Mapping[str, GivenCall]) -> None:
        self._rules, self._appendable, self._given = rules, appendable & set(rules.appends), given
        self._auxiliaries = {a.run: a.purpose for a in rules.auxiliaries}
        self._asked = {a.run for a in rules.auxiliaries if a.asks is not None}
        self._runs: dict[str, Run] = {}
        self._answers: dict[tuple[str, bytes], tuple[Step, int]] = {}
        self._heard: dict[str, set[bytes]] = {}

    def classify(self, request: Request, announced: str | None) -> Opening:
        """Decide the class of a request that repeats none, as the table of classes says."""
        if announced is not None:
            return self._announced(announced, request)
        if request.role == ROOT and ROOT not in self._runs:
            return self.start(ROOT)
        last = request.last_answer()
        found = self._answers.get((request.role, request.links[last])) if last >= 0 else None
        if found is not None and not self._appends(request, last):
            return self._stray()
        if found is not None and found[0] is found[0].segment.run.tip():
            return self._continue(*found, request)
        marks = (*self._rules.summaries, *self._rules.pruned)
        may_be = found is None or any(is_marked(m, marks) for m in request.messages[last + 1 :])
        if may_be and (rewritten := self._rewritten(request)):
            return rewritten
        return self._branch(*found, request) if found else self._start_or_fork(request, last)

    def start(self, role: str) -> Opening:
        """A run that begins with this request, if the harness declares such runs."""
        if role == ROOT and ROOT not in self._runs:
            return Opening(Prefix.start, "start", ROOT)
        if role == _SUB and self._rules.subagents:
            return Opening(Prefix.start, "start", self._name(role))
        if role in self._auxiliaries:
            return Opening(Prefix.auxiliary, "start", self._name(role))
        return self._stray()

    def open(self, opening: Opening, request: Request) -> Run:
        """Return the run that the opening names, new if there is none."""
        summary = opening.prefix is Prefix.auxiliary and self._auxiliaries[request.role] == "summary"
        return self.restore(opening.run, request.role, summary)

    def restore(self, name: str, role: str, summary: bool) -> Run:
        """Return the run of this name, new if there is none."""
        return self._runs.setdefault(name, Run(name, role, summary))

    def hear(self, role: str, links: Iterable[bytes]) -> None:
        """Remember what a request added to its history."""
        self._heard.setdefault(role, set()).update(links)

    def answered(self, role: str, link: bytes, step: Step, attempt: int) -> None:
        """Remember which history ends with this answer; of equal ones the latest counts."""
        self._answers[role, link] = (step, attempt)

    def drop(self, step: Step) -> None:
        """Take back a step that nobody answered."""
        run = step.segment.run
        run.drop(step)
        if not run.segments:
            del self._runs[run.name]

    def _continue(self, step: Step, attempt: int, request: Request) -> Opening:
        run = step.segment.run.name
        if step.segment.tools == request.tools_digest:
            return Opening(Prefix.continued, "", run, attempt, (step, attempt))
        if self._rules.tools_may_change:
            return Opening(Prefix.rewrite, "tool_change", run, attempt)
        return self._stray()

    def _branch(self, step: Step, attempt: int, request: Request) -> Opening:
        same = step.segment.tools == request.tools_digest
        if not same and not self._rules.tools_may_change:
            return self._stray()
        name = self._name("branch" if request.role == ROOT else request.role)
        return _fork(Prefix.branch, "branch", name, (step, attempt), request)

    def _start_or_fork(self, request: Request, last: int) -> Opening:
        """A child or a housekeeping call may begin afresh, or from the history of another role's run."""
        opening = self.start(request.role)
        if last < 0 or opening.prefix is Prefix.unexplained or request.role in self._asked:
            return opening
        if not self._appends(request, last):
            return self._stray()
        link = request.links[last]
        for role in (ROOT, _SUB):
            if link in self._heard.get(role, ()) or (role, link) in self._answers:
                kind = Prefix.branch if request.role == _SUB else Prefix.auxiliary
                by = "branch" if request.role == _SUB else "start"
                return _fork(kind, by, opening.run, self._answers.get((role, link)), request)
        return self._stray()

    def _rewritten(self, request: Request) -> Opening | None:
        """The declared rewrite of some run's last segment that this request is."""
        rules = self._rules
        if not (rules.summaries or rules.pruned or rules.trailers or rules.cut_arguments):
            return None
        for run in self._nearest(request):
            segment, attempt = run.tip().segment, self._held(run, request)
            if segment.tools != request.tools_digest and not rules.tools_may_change:
                continue
            kind = recognise(
                segment.known,
                request.last_answer() if attempt >= 0 else -1,
                request.messages,
                request.prints,
                rules=rules,
                given=self._given,
                appendable=self._appendable,
            )
            if kind:
                return Opening(Prefix.rewrite, kind, run.name, attempt)
        return None

    def _announced(self, kind: str, request: Request) -> Opening:
        """A rewrite that the harness tells of."""
        runs = self._nearest(request)
        if kind not in self._rules.announced or not runs:
            return self._stray()
        return Opening(Prefix.rewrite, kind, runs[0].name, self._held(runs[0], request))

    def _nearest(self, request: Request) -> list[Run]:
        """Runs of the request's role, those first whose last answer it holds, then those that it shares most messages
        with (several children may be under way, but one root), then the latest."""

        def nearness(run: Run) -> tuple[bool, int, int]:
            tip = run.tip()
            shared = 0 if request.role == ROOT else overlap(tip.segment.known, request.prints)
            return self._held(run, request) >= 0, shared, tip.ordinal

        runs = [run for run in self._runs.values() if run.role == request.role]
        return sorted(runs, key=nearness, reverse=True)

    def _held(self, run: Run, request: Request) -> int:
        """Attempt at a run's last step whose answer is the request's last, the latest of equals; -1 if none is."""
        last = request.last_answer()
        said = request.prints[last] if last >= 0 else b""
        return max((n for n, attempt in run.tip().attempts.items() if attempt.fingerprint == said), default=-1)

    def _appends(self, request: Request, last: int) -> bool:
        """True if only messages that may follow an assistant turn come after message `last`."""
        new = request.messages[last + 1 :]
        return bool(new) and all(m["role"] in self._appendable for m in new)

    def _stray(self) -> Opening:
        return Opening(Prefix.unexplained, "unexplained", self._name("stray"))

    def _name(self, stem: str) -> str:
        """The first free run id of a stem; it is taken when the run opens."""
        return next(name for n in count() if (name := f"{stem}-{n}") not in self._runs)


def _fork(kind: Prefix, by: str, run: str, source: tuple[Step, int] | None, request: Request) -> Opening:
    """A run that goes on from a turn of another, whose prompt is rendered anew if its tools are others."""
    other = source is not None and source[0].segment.tools != request.tools_digest
    return Opening(kind, "tool_change" if other else by, run, source=source, anew=other)
