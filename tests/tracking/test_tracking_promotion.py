"""The promotion rule by hand, and the aliases that carry it out."""

from __future__ import annotations

import pytest

from occamy.contracts.evaluation import EvaluationResult
from occamy.contracts.lineage import LineageCard
from occamy.tracking.experiment import Experiment
from occamy.tracking.mlflow_runs import log_candidate
from occamy.tracking.promotion import apply_decision, decide


@pytest.mark.parametrize(
    ("margin", "promoted"), [(0.0, True), (0.44, True), (0.45, False), (0.46, False), (0.5, False)]
)
def test_the_lower_end_of_the_interval_decides(evaluation: EvaluationResult, margin: float, promoted: bool) -> None:
    decision = decide(evaluation, margin)  # sao − base: +0.50, interval 0.45 to 0.55
    assert decision.promoted is promoted
    assert "+50.0 points against base (95% interval +45.0 to +55.0)" in decision.reason
    assert ("not above" in decision.reason) is not promoted


def test_candidates_that_were_not_compared_cannot_be_promoted(evaluation: EvaluationResult) -> None:
    with pytest.raises(KeyError, match="'sao' was not compared with 'sprint'"):
        decide(evaluation, 0.0, against="sprint")


def test_aliases_follow_the_decision(
    experiment: Experiment, cards: list[LineageCard], evaluation: EvaluationResult
) -> None:
    for card in cards[4:]:
        assert log_candidate(experiment, "run-1", card, f"s3://bucket/{card.name}").problem == ""
    client, family = experiment.client(), experiment.family
    soup = apply_decision(experiment, "run-1", decide(evaluation, 0.0, candidate="soup"))
    assert (soup.id, soup.problem) == ("1", "")
    sao = apply_decision(experiment, "run-1", decide(evaluation, 0.9))
    assert client.get_model_version_by_alias(family, "candidate").version == 2 == int(sao.id)
    assert client.get_model_version_by_alias(family, "champion").version == 1

    assert apply_decision(experiment, "run-1", decide(evaluation, 0.1)).id == "2"
    champion = client.get_model_version_by_alias(family, "champion")
    assert (champion.version, champion.tags["occamy.weights_digest"]) == (2, "sha256:w-sao")
    assert len(client.search_model_versions(f"name = '{family}'")) == 2


def test_promoting_what_was_not_logged_is_reported(experiment: Experiment, evaluation: EvaluationResult) -> None:
    assert (
        "'sao' of run 'run-9' is not in MLflow" in apply_decision(experiment, "run-9", decide(evaluation, 0.0)).problem
    )
