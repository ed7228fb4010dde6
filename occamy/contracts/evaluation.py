"""What an evaluation says: figures per candidate and pool with intervals, and tested differences between candidates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from occamy.contracts.record import Record

EvaluationPool = Literal["long", "short", "mixed"]
"""A pool of held-out tasks; mixed is all tasks of both."""


class Interval(Record):
    """A mean over tasks with its bootstrap interval."""

    mean: float
    low: float
    """Lower end of the interval at the evaluation's level."""
    high: float


class PoolFigures(Record):
    """One candidate on one pool. Figures per episode leave infrastructure failures and quarantined episodes out."""

    candidate: str
    pool: EvaluationPool
    tasks: int
    """Tasks with at least one scored episode."""
    episodes: int
    """Scored episodes."""
    infra_failed: int
    """Episodes that failed for infrastructure reasons: beside the score, never inside it."""
    quarantined: int
    """Episodes set aside for another reason (see QuarantineReason)."""
    success: Interval
    """avg@k: mean over tasks of the share of successful trials, in [0, 1]."""
    partial: Interval
    """Mean over tasks of the mean score, in [0, 1]."""
    pass_hat_3: Interval | None
    """pass^3: mean over tasks of C(c,3)/C(n,3), tasks with fewer than 3 scored trials left out; None if that is all."""
    pass_hat_3_undefined: int
    """Tasks with fewer than 3 scored trials."""
    gap: float | None
    """success − pass^3 over the tasks where pass^3 is defined: how much of the success does not repeat."""
    input_tokens: float
    """Prompt tokens per episode, cached ones included."""
    cached_tokens: float
    output_tokens: float
    steps: float
    """Policy turns per episode."""
    tool_calls: float
    failed_calls: float
    segments: float
    wall_seconds: float
    """Seconds per episode under the evaluation's own load."""
    timeouts: float
    """Share of episodes that timed out, in [0, 1]."""
    cost: Interval
    """USD per attempted task at the frozen prices."""


class PairedDifference(Record):
    """Success of `candidate` minus success of `against`, on the same tasks and trial seeds."""

    candidate: str
    against: str
    pool: EvaluationPool
    tasks: int
    """Tasks that both have scored."""
    success: Interval
    """Mean difference over tasks in [-1, 1], with its paired bootstrap interval."""
    won: int
    """Pairs (task, trial) that only `candidate` solved."""
    lost: int
    """Pairs that only `against` solved."""
    p_value: float
    """Exact two-sided McNemar test on won and lost."""


class ParetoPoint(Record):
    """One candidate in the plane of cost and quality."""

    candidate: str
    cost: float
    """Mean over benchmarks (here: pools long and short) of the USD per attempted task."""
    score: float
    """Mean over benchmarks of the min–max normalised success, in [0, 1]."""
    on_front: bool
    """No other candidate is at least as good on both axes and better on one."""
    knee: bool
    """On the front, furthest from the chord between its ends on log cost."""


class EvaluationResult(Record):
    """evaluation.json: everything that a comparison, a promotion and a report need."""

    schema_version: int = 1
    release: str
    """Digest of the task release's manifest."""
    seed: int
    trials: int
    """Attempts per task and candidate (k)."""
    level: float = 0.95
    """Level of every interval."""
    prices: dict[str, float | str]
    """The price snapshot used: name, date, source, USD per million tokens."""
    checkpoints: dict[str, str]
    """Candidate -> weights digest."""
    episodes: dict[str, str]
    """Candidate -> digest of the manifest of its sealed episodes."""
    figures: tuple[PoolFigures, ...] = Field(min_length=1)
    differences: tuple[PairedDifference, ...]
    pareto: tuple[ParetoPoint, ...]

    @property
    def candidates(self) -> tuple[str, ...]:
        """Candidate names in the order in which they were evaluated."""
        return tuple(dict.fromkeys(f.candidate for f in self.figures))

    def figure(self, candidate: str, pool: EvaluationPool) -> PoolFigures:
        """Figures of one candidate on one pool. Raises KeyError naming what was evaluated when it was not."""
        for figures in self.figures:
            if (figures.candidate, figures.pool) == (candidate, pool):
                return figures
        raise KeyError(f"{candidate!r} on pool {pool!r} was not evaluated; there are {', '.join(self.candidates)}")

    def difference(self, candidate: str, against: str, pool: EvaluationPool) -> PairedDifference:
        """Tested difference of two candidates on one pool. Raises KeyError when the pair was not compared."""
        for d in self.differences:
            if (d.candidate, d.against, d.pool) == (candidate, against, pool):
                return d
        raise KeyError(f"{candidate!r} was not compared with {against!r} on pool {pool!r}; evaluate both together")
