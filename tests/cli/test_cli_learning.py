"""The learning table: one row per seed, candidate and pool, and claims that can fail."""

from occamy.cli.learning import arrows, as_text, learning_table
from occamy.contracts.episode import EpisodeRecord, Outcome
from occamy.contracts.evaluation import EvaluationResult
from occamy.evaluation.config import EvaluationConfig
from occamy.evaluation.prices import load_prices
from occamy.evaluation.stage import compare

NAMES = ("base", "marathon-sft", "marathon", "sprint", "soup", "sao")


def episode(task: int, pool: str, trial: int, success: bool, steps: int) -> EpisodeRecord:
    return EpisodeRecord(
        episode_id=f"{pool}-{task}.{trial}",
        task_id=f"test-{pool}-{task}",
        task_digest="sha256:0",
        pool=pool,
        split="test",
        trial=trial,
        seed=trial,
        sampled_by="policy",
        outcome=Outcome.completed if success else Outcome.timed_out,
        score=float(success),
        reward=float(success),
        success=success,
        steps=steps,
        tool_calls=steps,
        failed_calls=0,
        segments=1,
        input_tokens=100 * steps,
        cached_tokens=0,
        output_tokens=10 * steps,
        wall_seconds=1.0,
        harness_digest="sha256:0",
        final_fingerprint="sha256:0",
        model="m",
        version_min=0,
        version_max=0,
    )


def result(solved: dict[str, tuple[int, int]], steps: int = 5) -> EvaluationResult:
    """`solved`: candidate -> tasks of 20 solved in all three trials, in the long and in the short pool."""
    records = {
        name: [
            episode(task, pool, trial, task < count, 2 if task < count else steps)
            for pool, count in zip(("long", "short"), counts, strict=True)
            for task in range(20)
            for trial in range(3)
        ]
        for name, counts in solved.items()
    }
    digests = dict.fromkeys(records, "sha256:0")
    config = EvaluationConfig(bootstrap=200)
    return compare(
        records, config, load_prices("2026-09"), seed=1, release="sha256:0", checkpoints=digests, episodes=digests
    )


GOOD = {
    "base": (1, 8),
    "marathon-sft": (6, 8),
    "marathon": (10, 9),
    "sprint": (2, 16),
    "soup": (8, 14),
    "sao": (12, 18),
}
FLAT = dict.fromkeys(NAMES, (5, 5))


def test_claims_hold_where_the_figures_say_so() -> None:
    held = arrows(result(GOOD))
    expected_to_fail = {"smaller gap of avg and pass^3, mixed"}  # all or none of the trials solve a task: no gap at all
    assert {claim for claim, holds in held.items() if not holds} == expected_to_fail


def test_claims_fail_where_nothing_was_learnt() -> None:
    held = arrows(result(FLAT))
    assert {claim for claim, holds in held.items() if holds} == {
        "marathon best or tied, long",
        "sprint best or tied, short",
    }


def test_an_expert_that_loses_its_own_pool_is_told() -> None:
    held = arrows(result(GOOD | {"marathon": (1, 19), "sprint": (15, 2)}))
    assert not held["marathon best or tied, long"] and not held["sprint best or tied, short"]
    assert not held["hdpo beats its sft parent, or takes 10% fewer steps, long"]


def test_rows_and_text_name_every_seed_candidate_and_pool() -> None:
    table = learning_table({1: result(GOOD), 2: result(FLAT)})
    assert len(table["rows"]) == 2 * 6 * 3
    row = next(r for r in table["rows"] if (r["seed"], r["candidate"], r["pool"]) == (1, "sao", "mixed"))
    assert (row["n"], row["success"], row["pass_hat_3"], row["gap"]) == (40, 0.75, 0.75, 0.0)
    assert row["timeouts"] == 0.25 and row["steps"] == 0.75 * 2 + 0.25 * 5
    lines = as_text(table).splitlines()
    assert len(lines) == 1 + 36 + len(table["arrows"]["1"])
    assert lines[-1] == "fewer timeouts, mixed: holds for 1 of 2 seeds (1)"
