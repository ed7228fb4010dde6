"""A random nano checkpoint, a sealed release of synthesised tasks, and a policy that is a function of its prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from occamy.contracts.lineage import LineageCard, tokenizer_digest, weights_digest, write_card
from occamy.contracts.manifest import seal
from occamy.contracts.release import KIND, contract_bytes, contract_path
from occamy.nano.model import Shape, init_weights, save_model
from occamy.nano.tokenizer import save_tokenizer
from occamy.rollout.config import DemonstrationConfig, RolloutConfig
from occamy.rollout.demonstrate import demonstrate
from occamy.synthesis.author import Slot
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.variants import write_task

from .open_vocabulary import write_tokenizer
from .written_policy import WrittenPolicy


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano model with random weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    shape = Shape()
    save_model(folder, init_weights(shape, 1), shape)
    save_tokenizer(folder)
    weights, tokenizer = weights_digest(folder), tokenizer_digest(folder)
    card = LineageCard(
        name="random", stage="pretrain", root=weights, tokenizer_digest=tokenizer, weights_digest=weights
    )
    write_card(folder, card)
    return folder


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty training tasks, half of them long, sealed as an admission would."""
    folder = tmp_path_factory.mktemp("release")
    for index in range(10):
        for pool in ("long", "short"):
            task = write_task(Slot("train", pool, index), SynthesisConfig(fault_share=0.3), 7)
            path = contract_path(folder, task.meta.task_id)
            path.parent.mkdir(parents=True)
            path.write_bytes(contract_bytes(task))
    seal(folder, KIND)
    return folder


@pytest.fixture(scope="session")
def demonstrations(release: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty demonstrations of that release by the oracle, sealed."""
    out = tmp_path_factory.mktemp("demos") / "sealed"
    demonstrate(release, checkpoint, out, DemonstrationConfig(rollout=RolloutConfig(concurrency=8)), 3)
    return out


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder with an open vocabulary."""
    folder = tmp_path_factory.mktemp("chatml")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def policy(chatml: Path) -> Iterator[WrittenPolicy]:
    written = WrittenPolicy(chatml)
    yield written
    written.close()
