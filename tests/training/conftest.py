"""Small checkpoints, episodes and demonstrations for the training tests, and a trainer's process environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from occamy.capture.sealed import write_sealed
from occamy.contracts.episode import EpisodeRecord, Outcome, Segment
from occamy.contracts.lineage import LineageCard, weights_digest, write_card
from occamy.contracts.record import digest_bytes

VOCABULARY = 64
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


@pytest.fixture(scope="session")
def trainer() -> Iterator[Any]:
    """Make this process a lone trainer: process group, CPU shim, seeds. Yields its Place."""
    from occamy.training.device import leave, prepare
    from occamy.training.launch import free_port

    env = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    os.environ.update(env)
    place = prepare()
    for name in env:
        del os.environ[name]
    from occamy.training.model import start_parallel

    start_parallel(0)
    yield place
    leave()


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a random checkpoint of a family: ``make_checkpoint("qwen3_moe", tie_word_embeddings=True)``."""

    def make(family: str, *, fused: bool = True, card: bool = True, seed: int = 0, **overrides: Any) -> Path:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoConfig, AutoModelForCausalLM

        settings: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
        }
        config = AutoConfig.for_model(family, **settings | (MOE if family == "qwen3_moe" else {}) | overrides)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 1:
                    p.uniform_(0.5, 1.5)
                else:
                    p.normal_(0, 0.15)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        if fused:
            state = {k: v.clone() for k, v in model.state_dict().items()}
            if config.tie_word_embeddings:
                del state["lm_head.weight"]
            save_file(state, folder / "model.safetensors", {"format": "pt"})
        (folder / "tokenizer.json").write_text("{}")
        if card:
            write_card(folder, _root_card(folder))
        return folder

    return make


def _root_card(folder: Path) -> LineageCard:
    weights = weights_digest(folder)
    return LineageCard(
        name="base", stage="pretrain", root=weights, tokenizer_digest=digest_bytes(b"{}"), weights_digest=weights
    )


@pytest.fixture(scope="session")
def make_record() -> Callable[..., EpisodeRecord]:
    """Build an episode record with plain values; keywords override."""

    def make(episode_id: str, **overrides: Any) -> EpisodeRecord:
        values: dict[str, Any] = {
            "episode_id": episode_id,
            "task_id": "t-" + episode_id,
            "task_digest": "sha256:0",
            "pool": "long",
            "split": "train",
            "trial": 0,
            "seed": 1,
            "sampled_by": "teacher",
            "outcome": Outcome.completed,
            "score": 1.0,
            "reward": 1.0,
            "success": True,
            "steps": 3,
            "tool_calls": 2,
            "failed_calls": 0,
            "segments": 1,
            "input_tokens": 10,
            "cached_tokens": 0,
            "output_tokens": 5,
            "wall_seconds": 0.1,
            "harness_digest": "sha256:0",
            "final_fingerprint": "sha256:0",
            "model": "oracle",
            "version_min": -1,
            "version_max": -1,
        }
        return EpisodeRecord(**values | overrides)

    return make


@pytest.fixture(scope="session")
def make_segment() -> Callable[..., Segment]:
    """Build a segment from token ids and a mask of 0 and 1."""

    def make(episode_id: str, tokens: list[int], mask: list[int], *, index: int = 0, run: str = "root") -> Segment:
        n = len(tokens)
        return Segment(
            episode_id=episode_id,
            run=run,
            index=index,
            closed_by="end",
            sampled_by="teacher",
            tokens=np.array(tokens, np.int32),
            mask=np.array(mask, bool),
            logprobs=np.zeros(n, np.float32),
            versions=np.full(n, -1, np.int32),
            origin=np.array(mask, np.int8),
        )

    return make


@pytest.fixture(scope="session")
def make_demonstrations(
    tmp_path_factory: pytest.TempPathFactory,
    make_record: Callable[..., EpisodeRecord],
    make_segment: Callable[..., Segment],
) -> Callable[..., Path]:
    """Seal `episodes` demonstrations of a counting language: each trainable token is one more than the one before."""

    def make(episodes: int = 24, *, seed: int = 0, longest: int = 40) -> Path:
        rng = np.random.default_rng(seed)
        records, segments = [], []
        for i in range(episodes):
            start, n = int(rng.integers(0, VOCABULARY)), int(rng.integers(8, longest))
            tokens = [(start + k) % VOCABULARY for k in range(n)]
            mask = [int(k >= 3 and k % 4 != 0) for k in range(n)]
            records.append(make_record(f"e{i:03d}"))
            segments.append(make_segment(f"e{i:03d}", tokens, mask))
        folder = tmp_path_factory.mktemp("demonstrations")
        write_sealed(folder, records, segments, kind="demonstrations", parents={}, facts={})
        return folder

    return make
