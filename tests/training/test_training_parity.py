"""The engine's recorded log-probs against the trainer's of the same tokens: what every importance ratio rests on."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from occamy.engines.client import EngineClient, Generation, Sampling
from occamy.engines.local.launch import launch_engine
from occamy.training.config import OptimiserConfig
from occamy.training.packing import Pack, pack
from occamy.training.views import TrainingSequence

pytestmark = pytest.mark.usefixtures("trainer")

TOLERANCE = 1e-3
"""Largest difference of two log-probs, both computed in float32 (design 3; about 1e-5 is reached)."""
EPISODES, TURNS = 24, 3


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The laptop's architecture with weights large enough for sure predictions and sure routing."""
    from occamy.nano.model import Shape, init_weights, save_model

    folder, shape = tmp_path_factory.mktemp("nano"), Shape()
    weights = {name: w.detach() * (4 if w.ndim > 1 else 1) for name, w in init_weights(shape, 2).items()}
    save_model(folder, weights, shape)
    return folder


def conversations(url: str, vocabulary: int, seed: int) -> tuple[list[TrainingSequence], int]:
    """Sample episodes of three turns at temperature 1, all at once, as the proxy records them; and cached tokens."""

    async def run() -> tuple[list[TrainingSequence], int]:
        client = EngineClient(url, timeout_s=60.0)
        try:
            told = await asyncio.gather(*(episode(client, vocabulary, seed * 1000 + i) for i in range(EPISODES)))
        finally:
            await client.close()
        return [sequence for sequence, _ in told], sum(cached for _, cached in told)

    return asyncio.run(run())


async def episode(client: EngineClient, vocabulary: int, seed: int) -> tuple[TrainingSequence, int]:
    rng = np.random.default_rng(seed)
    tokens: list[int] = [*range(3, 20), *rng.integers(0, vocabulary, 3).tolist()]
    mask, logprobs, cached = [False] * len(tokens), [0.0] * len(tokens), 0
    for turn in range(TURNS):
        answer: Generation = await client.generate(tokens, Sampling(max_new_tokens=8, seed=seed + turn))
        observed = rng.integers(0, vocabulary, 4).tolist()
        tokens = [*tokens, *answer.output_ids, *observed]
        mask += [True] * len(answer.output_ids) + [False] * 4
        logprobs += [*answer.logprobs, 0.0, 0.0, 0.0, 0.0]
        cached += answer.cached_tokens
    policy = sum(mask)
    return TrainingSequence(
        tokens=np.array(tokens, np.int32),
        mask=np.array(mask),
        logprobs=np.array(logprobs, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        episode_id=f"e{seed}",
        task_id="t",
        segment=0,
        n_segments=1,
        policy_tokens_run=policy,
        policy_tokens_later=0,
        reward=1.0,
        success=True,
        steps=TURNS,
    ), cached


def difference(model: Any, row: Pack) -> float:
    with torch.no_grad():
        return float((model(row).logprobs - row.behaviour()).abs().max())


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("nano", {}),
        ("qwen3_moe", {"norm_topk_prob": True, "tie_word_embeddings": True}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3, "fused": False}),
        ("llama", {}),
    ],
)
def test_the_sampler_records_the_log_probs_that_the_trainer_computes(
    family: str, settings: dict[str, Any], nano: Path, make_checkpoint: Callable[..., Path]
) -> None:
    from occamy.training.model import load_hf

    checkpoint = nano if family == "nano" else make_checkpoint(family, **settings)
    model = load_hf(checkpoint)
    with launch_engine(checkpoint) as engine:
        sampled, cached = conversations(engine.url, model.vocab_size, seed=1)
    row = pack(sampled)
    assert cached > EPISODES * 16  # later turns re-used keys and values
    assert len(row.target) > EPISODES * TURNS and float(row.behaviour().std()) > 0.1
    assert difference(model, row) <= TOLERANCE


def test_published_weights_sample_what_the_trainer_that_goes_on_holds(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A bfloat16 base trains in float32: its weight versions must not be rounded back."""
    from occamy.training.learner import Learner
    from occamy.training.model import export_hf, load_hf

    base = in_bfloat16(make_checkpoint("qwen3_moe", tie_word_embeddings=True), tmp_path / "base")
    learner = Learner(load_hf(base), OptimiserConfig(lr=1e-3, warmup_steps=0), 4)
    with launch_engine(base) as engine:
        first, _ = conversations(engine.url, 64, seed=2)
        assert difference(learner.model, pack(first)) <= TOLERANCE
        learner.begin()
        learner.backward(-learner.model(pack(first)).logprobs.mean())
        learner.finish()
        export_hf(learner.model, base, tmp_path / "1")
        asyncio.run(serve(engine.url, tmp_path / "1"))
        second, _ = conversations(engine.url, 64, seed=3)
    assert difference(learner.model, pack(first)) > TOLERANCE  # the step did move the policy
    assert difference(learner.model, pack(second)) <= TOLERANCE
    stored = load_file(tmp_path / "1" / "model.safetensors")
    own = load_hf(tmp_path / "1").state_dict()
    assert {t.dtype for t in stored.values()} == {torch.float32}
    assert json.loads((tmp_path / "1" / "config.json").read_text())["dtype"] == "float32"
    for name, value in learner.model.state_dict().items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, own[name])


def test_engine_and_trainer_read_the_same_rotary_base(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """transformers 5 writes rope_parameters; an older key beside it must not make the two disagree."""
    from occamy.engines.local.checkpoint import read_spec
    from occamy.training.architecture import read_architecture

    shutil.copytree(make_checkpoint("llama"), tmp_path / "both")
    path = tmp_path / "both" / "config.json"
    config = json.loads(path.read_text()) | {"rope_theta": 500.0}
    path.write_text(json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.5}}))
    assert read_spec(path.parent).rope_theta == read_architecture(path.parent).rope_theta == 10_000.5


def in_bfloat16(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)
    tensors = {name: t.to(torch.bfloat16) for name, t in load_file(source / "model.safetensors").items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return out


async def serve(url: str, folder: Path) -> None:
    client = EngineClient(url)
    try:
        await client.update_weights_from_disk(folder, 1)
    finally:
        await client.close()
