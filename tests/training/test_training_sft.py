"""Supervised fine-tuning end to end, in real trainer processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from occamy.contracts.lineage import LineageCard, read_card
from occamy.contracts.manifest import SealError
from occamy.training.config import OptimiserConfig, SFTConfig
from occamy.training.launch import TrainingFailed, read_metrics
from occamy.training.sft import SFTJob, train_sft

CONFIG = SFTConfig(
    optimiser=OptimiserConfig(lr=3e-3, min_lr=3e-4, warmup_steps=2),
    epochs=20,
    batch_sequences=8,
    max_length=96,
    checkpoint_every=5,
)
"""60 steps of 8 sequences in several packs each."""


@pytest.fixture(scope="module")
def base(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("qwen3_moe", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def data(make_demonstrations: Callable[..., Path]) -> Path:
    return make_demonstrations(24)


def run(base: Path, data: Path, out: Path, config: SFTConfig = CONFIG, **overrides: Any) -> LineageCard:
    settings: dict[str, Any] = {"pool": None, "name": "long-sft", "seed": 7, "recipe_digest": "sha256:r"}
    return train_sft(base, data, out, config, **settings | overrides)


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out / "trainer" / "metrics.jsonl")]


@pytest.fixture(scope="module")
def finished(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sft") / "checkpoint"
    run(base, data, out)
    return out


def test_loss_falls_and_the_card_tells_where_the_weights_come_from(finished: Path, base: Path) -> None:
    curve, card, parent = losses(finished), read_card(finished), read_card(base)
    assert len(curve) == 60
    assert curve[-1] < 0.2 * curve[0]
    assert (card.stage, card.root, card.parents) == ("sft", parent.weights_digest, (parent.weights_digest,))
    assert card.weights_digest != parent.weights_digest
    assert sorted(p.name for p in finished.iterdir()) == [
        "config.json", "generation_config.json", "lineage.json", "model.safetensors", "tokenizer.json", "trainer",
    ]  # fmt: skip
    assert not (finished / "trainer" / "states").exists()


def test_a_finished_checkpoint_is_returned_at_once_and_other_inputs_are_refused(
    finished: Path, base: Path, data: Path
) -> None:
    seen: list[dict[str, Any]] = []
    (finished / "trainer" / "states").mkdir()  # as a kill right after the card was written leaves it
    assert run(base, data, finished, on_progress=seen.append) == read_card(finished)
    assert seen == []
    assert not (finished / "trainer" / "states").exists()
    with pytest.raises(FileExistsError, match=r"long-sft.*seed 7"):
        run(base, data, finished, seed=8)


def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(
    finished: Path, base: Path, data: Path, tmp_path: Path
) -> None:
    before: list[dict[str, Any]] = []

    def kill(row: dict[str, Any]) -> None:
        before.append(row)
        if row["step"] == 10:
            os.kill(trainer_of(os.getpid()), signal.SIGKILL)

    with pytest.raises(TrainingFailed, match="signal 9"):
        run(base, data, tmp_path / "out", on_progress=kill)
    assert sorted(p.name for p in (tmp_path / "out" / "trainer" / "states").iterdir())[-1] >= "step-00000010.pt"
    after: list[dict[str, Any]] = []
    card = run(base, data, tmp_path / "out", on_progress=after.append)
    assert [row["step"] for row in after] == list(range(60))
    assert after[:10] == before[:10]  # measured speeds included: these steps were not repeated
    assert losses(tmp_path / "out") == losses(finished)
    assert card == read_card(finished)  # the weights digest included: equal inputs, equal bits


def trainer_of(parent: int) -> int:
    """Process id of the one child of `parent` that runs the trainer."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines, command = status.read_text(), (status.parent / "cmdline").read_text()
        except OSError:
            continue
        if f"PPid:\t{parent}\n" in lines and "occamy.training.worker" in command:
            return int(status.parent.name)
    raise AssertionError("no trainer process is running")


def test_two_ranks_follow_the_same_loss_curve_as_one(finished: Path, base: Path, data: Path, tmp_path: Path) -> None:
    run(base, data, tmp_path / "two", CONFIG.model_copy(update={"processes": 2}))
    assert losses(tmp_path / "two") == pytest.approx(losses(finished), abs=1e-5)


def test_divergence_stops_at_its_step_and_writes_no_checkpoint(base: Path, data: Path, tmp_path: Path) -> None:
    wild = OptimiserConfig(lr=1e38, min_lr=0.0, warmup_steps=0)
    with pytest.raises(TrainingFailed, match=r"optimiser step 1: the gradient norm is nan; lower lr 1e\+38"):
        run(base, data, tmp_path / "out", CONFIG.model_copy(update={"optimiser": wild}))
    assert len(losses(tmp_path / "out")) == 1  # the one good step
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.usefixtures("trainer")
def test_nothing_to_train_on_is_an_error_with_the_counts(base: Path, data: Path, tmp_path: Path) -> None:
    from occamy.training.sft_loop import demonstrations

    def job(**overrides: Any) -> SFTJob:
        values: dict[str, Any] = {
            "init": base,
            "data": data,
            "out": tmp_path,
            "config": CONFIG,
            "pool": None,
            "seed": 0,
        }
        digests = {"name": "x", "recipe_digest": "r", "init_digest": "i", "data_digest": "d"}
        return SFTJob(**values | digests | overrides)

    assert len(demonstrations(job())[0]) == 24
    with pytest.raises(ValueError, match=r"no demonstration is left .*'other_pool': 24"):
        demonstrations(job(pool="short"))
    with pytest.raises(ValueError, match=r"no demonstration is left .*'too_long': 24"):
        demonstrations(job(config=CONFIG.model_copy(update={"max_length": 4})))


def test_damaged_demonstrations_are_refused_before_anything_starts(
    base: Path, make_demonstrations: Callable[..., Path], tmp_path: Path
) -> None:
    damaged = make_demonstrations(2)
    with (damaged / "segments.parquet").open("ab") as f:
        f.write(b"x")
    with pytest.raises(SealError, match=r"segments\.parquet was altered"):
        run(base, damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()
