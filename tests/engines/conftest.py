"""Tiny random checkpoints, written without transformers."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from occamy.engines.client import EngineClient
from occamy.engines.local.checkpoint import expected_shapes, read_spec
from occamy.engines.local.launch import EngineProcess
from occamy.engines.local.model import Model

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

Maker = Callable[..., Path]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """make_checkpoint(seed=0, change=None, **config): `change` edits the dict of tensors before it is written."""

    def make(seed: int = 0, change: Callable[[dict[str, torch.Tensor]], None] | None = None, **config: object) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint")
        (folder / "config.json").write_text(json.dumps(CONFIG | config))
        generator = torch.Generator().manual_seed(seed)
        shapes = expected_shapes(read_spec(folder))
        tensors = {k: torch.randn(shape, generator=generator) * 0.4 for k, shape in shapes.items()}
        if change:
            change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: Maker) -> Path:
    return make_checkpoint()


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Model:
    return Model.load(checkpoint)


@pytest.fixture(scope="session")
def ask() -> Callable[[EngineProcess, Callable[[EngineClient], Awaitable[None]]], None]:
    """ask(engine, use): `use` gets a client of the engine, closed afterwards."""

    async def run(engine: EngineProcess, use: Callable[[EngineClient], Awaitable[None]]) -> None:
        client = EngineClient(engine.url, timeout_s=60.0)
        try:
            await use(client)
        finally:
            await client.close()

    return lambda engine, use: asyncio.run(run(engine, use))
