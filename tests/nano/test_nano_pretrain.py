"""The nano architecture equals transformers'; pretraining is seeded and goes on after an interruption."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM

from occamy.contracts import lineage
from occamy.nano.base import FOLDER, base_checkpoint
from occamy.nano.model import Shape, forward, init_weights, rope_tables, save_model
from occamy.nano.muon import orthogonalise
from occamy.nano.pretrain import PretrainConfig, pretrain
from occamy.nano.vocabulary import TOKENS

SMALL = Shape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, experts=4, expert_width=16)
TINY = PretrainConfig(
    rehearsal_tokens=6_000,
    tokens=12_000,
    batch_tokens=1024,
    drills=20,
    pool_documents=30,
    save_every=4,
    validation_documents=4,
)


def test_forward_equals_transformers(tmp_path: Path) -> None:
    weights = init_weights(SMALL, seed=3)
    save_model(tmp_path, weights, SMALL)
    reference = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(0, len(TOKENS), (3, 40), generator=torch.Generator().manual_seed(0))
    hidden, _ = forward(weights, SMALL, tokens, rope_tables(SMALL, 64))
    with torch.no_grad():
        want = reference(tokens).logits
    assert (hidden @ weights["model.embed_tokens.weight"].T - want).abs().max() < 1e-4


def test_bfloat16_products_stay_close_to_float32() -> None:
    weights = init_weights(SMALL, seed=3)
    tokens = torch.randint(0, len(TOKENS), (2, 30), generator=torch.Generator().manual_seed(0))
    tables = rope_tables(SMALL, 64)
    exact, _ = forward(weights, SMALL, tokens, tables)
    rounded, _ = forward(weights, SMALL, tokens, tables, torch.bfloat16)
    assert 0 < (exact - rounded).abs().max() < 0.2


def test_orthogonalise_pushes_singular_values_to_one() -> None:
    stack = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(stack))
    assert values.min() > 0.5 and values.max() < 1.4


def test_an_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def stop(figures: dict[str, float]) -> None:
        if (figures["phase"], figures["step"]) == (1, 4):
            raise Interrupted

    whole = pretrain(tmp_path / "whole", TINY, shape=SMALL)
    with pytest.raises(Interrupted):
        pretrain(tmp_path / "cut", TINY, shape=SMALL, on_progress=stop)
    again = pretrain(tmp_path / "cut", TINY, shape=SMALL)
    assert lineage.read_card(again).weights_digest == lineage.read_card(whole).weights_digest
    assert lineage.read_card(whole).root == lineage.weights_digest(whole)
    assert load_file(whole / "model.safetensors")["model.norm.weight"].dtype == torch.float32


def test_a_snapshot_of_another_config_is_refused(tmp_path: Path) -> None:
    pretrain(tmp_path, TINY, shape=SMALL)
    with pytest.raises(ValueError, match="use another --out"):
        pretrain(tmp_path, replace(TINY, seed=2), shape=SMALL)


def test_altered_or_missing_base_weights_are_refused_by_name(tmp_path: Path) -> None:
    base = pretrain(tmp_path, TINY, shape=SMALL)
    assert base_checkpoint(base) == base
    with (base / "model.safetensors").open("r+b") as f:
        f.seek(-1, 2)
        f.write(b"\x7f")
    with pytest.raises(ValueError, match=r"model\.safetensors: digest"):
        base_checkpoint(base)
    (base / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        base_checkpoint(base)


def test_the_shipped_base_is_whole() -> None:
    assert base_checkpoint() == FOLDER
