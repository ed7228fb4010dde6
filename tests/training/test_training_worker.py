"""Schedule, configuration and the launch of trainer processes."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from occamy.training.config import OptimiserConfig, SFTConfig
from occamy.training.launch import TrainingFailed, read_metrics, run_trainer
from occamy.training.schedule import batch_indices, cosine_with_warmup, steps_per_epoch


def test_schedule_rises_then_follows_half_a_cosine() -> None:
    curve = [cosine_with_warmup(s, 7, peak=1.0, floor=0.0, warmup=2) for s in range(7)]
    assert curve == pytest.approx([0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466, 0.0])
    assert cosine_with_warmup(0, 1, peak=1.0, floor=0.1, warmup=0) == 1.0
    with pytest.raises(ValueError, match="step 7 is outside a run of 7 steps"):
        cosine_with_warmup(7, 7, peak=1.0, floor=0.0, warmup=2)


def test_configuration_refuses_unknown_keys_and_contradictions() -> None:
    with pytest.raises(ValidationError, match="learning_rate"):
        OptimiserConfig.model_validate({"learning_rate": 1e-3})
    with pytest.raises(ValidationError, match=r"min_lr 0\.1 is above lr 0\.01"):
        OptimiserConfig(lr=0.01, min_lr=0.1)
    with pytest.raises(ValidationError, match="epochs"):
        SFTConfig(epochs=0)


def test_data_order_is_a_function_of_seed_and_step() -> None:
    assert steps_per_epoch(10, 4) == 3
    epochs, chosen = zip(*(batch_indices(s, 10, 4, seed=3) for s in range(6)), strict=True)
    assert epochs == (0, 0, 0, 1, 1, 1)
    assert [len(c) for c in chosen] == [4, 4, 2, 4, 4, 2]
    first, second = ([i for c in chosen[e : e + 3] for i in c.tolist()] for e in (0, 3))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert batch_indices(4, 10, 4, seed=3)[1].tolist() == chosen[4].tolist()


def test_a_line_still_being_written_is_not_read(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0}\n{"step":1}\n{"st')
    assert read_metrics(path) == [{"step": 0}, {"step": 1}]


def test_an_unknown_algorithm_fails_with_its_name(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text('{"algorithm": "ppo"}')
    with pytest.raises(TrainingFailed, match=r"algorithm 'ppo' is unknown; use one of sft, hdpo, sao"):
        run_trainer(spec, log=tmp_path / "log.txt")


def test_a_trainer_dies_with_its_parent(tmp_path: Path) -> None:
    # The "trainer" is a worker on a pipe that nobody writes to, so it lives until it is ended.
    fifo = tmp_path / "spec.json"
    os.mkfifo(fifo)
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib; from occamy.training.launch import started_trainer\n"
            "with started_trainer(pathlib.Path(sys.argv[1]), log=pathlib.Path(sys.argv[2])) as t:\n"
            "    print(t.pid, flush=True); sys.stdin.read()",
            str(fifo),
            str(tmp_path / "log.txt"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    watch = os.pidfd_open(child)
    parent.kill()
    parent.wait()
    assert select.select([watch], [], [], 20)[0], "the trainer outlived its parent"
    os.close(watch)


def test_launching_needs_neither_torch_nor_megatron() -> None:
    code = "import sys, occamy.training.sft; print(sorted({'torch', 'megatron'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
