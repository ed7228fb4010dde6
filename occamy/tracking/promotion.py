"""Promotion: a tested decision, and the registry aliases that carry it out."""

from __future__ import annotations

from occamy.contracts.evaluation import EvaluationResult, Interval
from occamy.contracts.record import Record
from occamy.tracking.experiment import CANDIDATE, RUN, WEIGHTS, Experiment, find_runs, reported

CANDIDATE_ALIAS = "candidate"
CHAMPION_ALIAS = "champion"


class PromotionDecision(Record):
    """Whether a candidate becomes the champion, and why."""

    candidate: str
    against: str
    weights_digest: str
    promoted: bool
    difference: Interval
    """Paired difference in success on the mixed pool."""
    level: float
    """Level of the interval."""
    margin: float
    """The lower end of the difference had to lie above this."""
    reason: str
    """One sentence for people."""


def decide(
    evaluation: EvaluationResult, margin: float, against: str = "base", candidate: str = "sao"
) -> PromotionDecision:
    """Promote `candidate` when the lower end of its paired interval over `against` lies above `margin`.

    The difference is in success on the mixed pool, as a share. Raises KeyError when the two were not compared.
    """
    tested = evaluation.difference(candidate, against, "mixed").success
    promoted = tested.low > margin
    reason = (
        f"{candidate} solves {100 * tested.mean:+.1f} points against {against} "
        f"({evaluation.level:.0%} interval {100 * tested.low:+.1f} to {100 * tested.high:+.1f}); the lower end is "
        f"{'above' if promoted else 'not above'} the margin of {100 * margin:.1f}"
    )
    return PromotionDecision(
        candidate=candidate,
        against=against,
        weights_digest=evaluation.checkpoints[candidate],
        promoted=promoted,
        difference=tested,
        level=evaluation.level,
        margin=margin,
        reason=reason,
    )


@reported
def apply_decision(experiment: Experiment, run: str, decision: PromotionDecision) -> str:
    """Register the candidate's logged model under the family's name and move the aliases. Returns the version.

    ``candidate`` always moves to it, ``champion`` only when it was promoted. Repeating the call finds the version by
    its weights digest. Raises LookupError when the candidate was not logged in this run.
    """
    client = experiment.client()
    version = _version(experiment, run, decision)
    client.set_registered_model_alias(experiment.family, CANDIDATE_ALIAS, version)
    if decision.promoted:
        client.set_registered_model_alias(experiment.family, CHAMPION_ALIAS, version)
    client.set_model_version_tag(experiment.family, version, "occamy.decision", decision.reason)
    client.set_model_version_tag(experiment.family, version, "occamy.promoted", str(decision.promoted).lower())
    return version


def _version(experiment: Experiment, run: str, decision: PromotionDecision) -> str:
    client = experiment.client()
    if not client.search_registered_models(f"name = '{experiment.family}'"):
        client.create_registered_model(experiment.family)
    known = client.search_model_versions(
        f"name = '{experiment.family}' and tags.`{WEIGHTS}` = '{decision.weights_digest}'"
    )
    if known:
        return str(known[0].version)
    runs = find_runs(experiment, {RUN: run, CANDIDATE: decision.candidate})
    if not runs:
        raise LookupError(
            f"{decision.candidate!r} of run {run!r} is not in MLflow; log the candidate before promoting it"
        )
    model = client.get_run(runs[0]).outputs.model_outputs[0].model_id
    made = client.create_model_version(
        experiment.family,
        source=f"models:/{model}",
        run_id=runs[0],
        model_id=model,
        tags={WEIGHTS: decision.weights_digest},
    )
    return str(made.version)
