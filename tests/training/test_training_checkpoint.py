"""Trainer states and lineage cards."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from occamy.contracts.lineage import read_card, weights_digest
from occamy.training.checkpoint import StateStore, derive_card


def test_newest_complete_state_of_the_same_run_is_restored(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "states", "run-a")
    assert store.restore() is None
    for step in (1, 2, 3):
        store.save(step, {"step": step, "weight": torch.full((2,), float(step))})
    (tmp_path / "states" / ".step-00000004.pt.99.tmp").write_bytes(b"half")
    kept = sorted(p.name for p in (tmp_path / "states").glob("step-*"))
    assert kept == ["step-00000002.pt", "step-00000003.pt"]
    state = StateStore(tmp_path / "states", "run-a").restore()
    assert state is not None and state["weight"].tolist() == [3.0, 3.0]


def test_states_of_other_inputs_and_halves_are_discarded(tmp_path: Path) -> None:
    StateStore(tmp_path, "run-a").save(5, {"step": 5})
    (tmp_path / ".step-00000006.pt.99.tmp").write_bytes(b"half")
    other = StateStore(tmp_path, "run-b")
    assert other.restore() is None
    other.discard_foreign()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_and_leaves_the_earlier_state_alone(tmp_path: Path) -> None:
    store = StateStore(tmp_path, "run-a")
    store.save(1, {"weight": torch.zeros(2)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))  # writes beyond it fail as on a full disk
    try:
        with pytest.raises(OSError, match=r"step-00000002\.pt: trainer state not written .*free disk space"):
            store.save(2, {"weight": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.pt"]
    assert store.restore() is not None


def test_random_state_comes_back(tmp_path: Path) -> None:
    store = StateStore(tmp_path, "run-a")
    torch.manual_seed(5)
    store.save(1, {})
    expected = torch.rand(3)
    store.restore()
    assert torch.equal(torch.rand(3), expected)


def test_a_derived_card_names_root_parent_and_data(make_checkpoint: Callable[..., Path]) -> None:
    base, out = make_checkpoint("llama", seed=1), make_checkpoint("llama", seed=2, card=False)
    settings = {"recipe_digest": "sha256:r", "seed": 3, "facts": {"steps": 9}}
    card = derive_card(base, out, name="marathon", stage="hdpo", data={"episodes": "sha256:d"}, **settings)
    assert card == read_card(out)
    assert (card.root, card.parents, card.parent_names) == (weights_digest(base), (weights_digest(base),), ("base",))
    assert card.weights_digest == weights_digest(out) != weights_digest(base)
    assert (card.data, card.seed, card.facts) == ({"episodes": "sha256:d"}, 3, {"steps": 9})


def test_training_from_a_folder_without_a_card_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    bare = make_checkpoint("llama", card=False)
    with pytest.raises(FileNotFoundError, match=r"no lineage\.json; not a checkpoint of this system"):
        derive_card(bare, bare, name="x", stage="sft", data={}, recipe_digest="", seed=0, facts={})
