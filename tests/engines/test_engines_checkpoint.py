"""Broken checkpoints are refused, each by the name of what is wrong."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from occamy.engines.local.checkpoint import CheckpointError, read_spec, read_tensors

DOWN = "model.layers.1.mlp.experts.down_proj"


def load(folder: Path) -> dict[str, torch.Tensor]:
    return read_tensors(folder, read_spec(folder))


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[DOWN]


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = torch.zeros(4, 8, 16)


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN][1, 2, 3] = torch.nan


def foreign(tensors: dict[str, torch.Tensor]) -> None:
    tensors["value_head.weight"] = torch.zeros(1, 16)


def whole_numbers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = torch.zeros(4, 16, 8, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, f"tensor {DOWN} is missing"),
        (reshape, rf"tensor {DOWN} has shape \[4, 8, 16\], config.json asks for \[4, 16, 8\]"),
        (poison, f"tensor {DOWN} holds 1 NaN or infinite values"),
        (foreign, r"tensor value_head\.weight has no place"),
        (whole_numbers, f"tensor {DOWN} is torch.int8"),
    ],
)
def test_bad_tensor_is_refused_by_name(make_checkpoint, change, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(make_checkpoint(change=change))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not served"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"moe_intermediate_size": 6}, "moe_intermediate_size 6 must be multiples of 4"),
    ],
)
def test_unsupported_architecture_is_refused(make_checkpoint, config: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        make_checkpoint(**config)


def test_missing_config_key_is_named(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="key 'hidden_size' is missing"):
        read_spec(tmp_path)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_spec(tmp_path / "nowhere")


def test_cut_file_and_missing_shard_are_named(make_checkpoint) -> None:
    folder = make_checkpoint()
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load(folder)


def test_shards_and_end_tokens(make_checkpoint) -> None:
    folder = make_checkpoint(eos_token_id=3)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    assert read_spec(folder).eos == (3, 7)
    whole = load(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, keys in parts.items():
        save_file({k: tensors[k] for k in keys}, folder / file)
    index = {k: file for file, keys in parts.items() for k in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "model.safetensors").unlink()
    again = load(folder)
    assert again.keys() == whole.keys() and all(torch.equal(again[k], whole[k]) for k in whole)
