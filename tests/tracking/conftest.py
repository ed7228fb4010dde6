"""Small literal evaluations and cards of the six candidates."""

from __future__ import annotations

from pathlib import Path

import pytest

from occamy.contracts.evaluation import EvaluationResult, Interval, PairedDifference, ParetoPoint, PoolFigures
from occamy.contracts.lineage import LineageCard
from occamy.tracking.experiment import Experiment, open_experiment

FAMILY = {
    "base": (),
    "marathon-sft": ("base",),
    "marathon": ("marathon-sft",),
    "sprint": ("base",),
    "soup": ("marathon", "sprint"),
    "sao": ("soup",),
}
STAGES = {"base": "pretrain", "marathon-sft": "sft", "marathon": "hdpo", "sprint": "sft", "soup": "merge", "sao": "sao"}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URI of one sqlite store: its schema takes a second to make."""
    return f"sqlite:///{tmp_path_factory.mktemp('tracking') / 'mlflow.db'}"


@pytest.fixture
def experiment(store: str, request: pytest.FixtureRequest) -> Experiment:
    """A fresh experiment in the shared store."""
    return open_experiment(store, request.node.name)


def made_cards() -> list[LineageCard]:
    """Cards of the six candidates in the order of their making."""
    return [
        LineageCard(
            name=name,
            stage=STAGES[name],
            root="sha256:w-base",
            parents=tuple(f"sha256:w-{p}" for p in parents),
            parent_names=parents,
            data={} if name in ("base", "soup") else {"demonstrations": f"sha256:{'d' * 50}-{name}"},
            recipe_digest="sha256:recipe",
            seed=3,
            tokenizer_digest="sha256:t",
            weights_digest=f"sha256:w-{name}",
        )
        for name, parents in FAMILY.items()
    ]


def span(mean: float, half: float = 0.05) -> Interval:
    return Interval(mean=mean, low=mean - half, high=mean + half)


def made_evaluation() -> EvaluationResult:
    """Success rises by 0.1 from candidate to candidate; every figure else is constant."""
    rows = [
        PoolFigures(
            candidate=name,
            pool=pool,
            tasks=4,
            episodes=12,
            infra_failed=0,
            quarantined=0,
            success=span(0.1 + 0.1 * i),
            partial=span(0.2 + 0.1 * i),
            pass_hat_3=span(0.05 + 0.1 * i),
            pass_hat_3_undefined=0,
            gap=0.05,
            input_tokens=1000,
            cached_tokens=600,
            output_tokens=80,
            steps=6,
            tool_calls=5,
            failed_calls=1,
            segments=1.5,
            wall_seconds=1.25,
            timeouts=0.0,
            cost=span(0.00002, 0.000001),
        )
        for i, name in enumerate(FAMILY)
        for pool in ("long", "short", "mixed")
    ]
    return EvaluationResult(
        release="sha256:release",
        seed=5,
        trials=3,
        prices={
            "name": "2026-09",
            "date": "2026-09-01",
            "source": "example",
            "input": 0.2,
            "cached": 0.04,
            "output": 1.0,
        },
        checkpoints={name: f"sha256:w-{name}" for name in FAMILY},
        episodes={name: f"sha256:e-{name}" for name in FAMILY},
        figures=tuple(rows),
        differences=tuple(
            PairedDifference(
                candidate=name,
                against="base",
                pool="mixed",
                tasks=8,
                success=span(0.1 * i),
                won=3 * i,
                lost=i,
                p_value=0.04,
            )
            for i, name in enumerate(FAMILY)
            if name != "base"
        ),
        pareto=tuple(
            ParetoPoint(candidate=n, cost=0.00002, score=0.2 * i, on_front=n == "sao", knee=False)
            for i, n in enumerate(FAMILY)
        ),
    )


@pytest.fixture
def cards() -> list[LineageCard]:
    return made_cards()


@pytest.fixture
def evaluation() -> EvaluationResult:
    return made_evaluation()


@pytest.fixture
def unusable(tmp_path: Path) -> Experiment:
    """An experiment whose store is a folder, so that every call to it fails."""
    (tmp_path / "mlflow.db").mkdir()
    return Experiment(f"sqlite:///{tmp_path / 'mlflow.db'}", "broken", "1")
