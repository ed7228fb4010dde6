"""Deterministic mode: ids and log-probs are the same to the last bit, whatever runs beside a request."""

import asyncio
import random
import struct
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from occamy.engines.client import EngineClient, EngineError, Generation, Sampling
from occamy.engines.config import EngineConfig
from occamy.engines.local import invariant
from occamy.engines.local.invariant import InvarianceError, InvariantModel, check_invariance
from occamy.engines.local.launch import launch_engine
from occamy.engines.local.model import Chunk, FlatBatch, Model
from occamy.engines.local.sampling import SamplingParams
from occamy.engines.local.scheduler import Scheduler, Sequence
from occamy.nano.base import base_checkpoint

BESIDE = (0, 1, 7, 31)


def exact(ids: list[int], logprobs: list[float]) -> bytes:
    return array("i", ids).tobytes() + struct.pack(f"{len(logprobs)}d", *logprobs)


def sequence(tokens: list[int], seed: int, temperature: float = 1.0, limit: int = 40) -> Sequence:
    params = SamplingParams(temperature, 0.95, 40, limit, frozenset({99}), seed)
    return Sequence(str(seed), str(seed), array("i", tokens), params, score_from=0)


def finish(engine: Scheduler) -> None:
    while engine.load() != (0, 0):
        engine.step()


def crowds(model: Model, prefill: int = 512) -> set[bytes]:
    """The bytes of one request beside 0, 1, 7 and 31 others of other lengths that come and go."""
    vocab, seen = model.spec.vocab, set()
    for others in BESIDE:
        rng = random.Random(others)
        config = EngineConfig(max_running=32, cached_rows=8, prefill_tokens=prefill)
        engine = Scheduler(model, "0", config, lambda _: None)
        crowd = [
            sequence([rng.randrange(vocab) for _ in range(rng.randrange(1, 80))], 100 + i, limit=rng.randrange(1, 40))
            for i in range(others)
        ]
        engine.submit(crowd[: others // 2])
        engine.step()
        mine = sequence([i * 7 % vocab for i in range(61)], 3, temperature=0.8)
        engine.submit([mine, *crowd[others // 2 :]])
        finish(engine)
        assert len(mine.output) == 40
        seen.add(exact(mine.output, mine.logprobs + mine.input_logprobs))
    return seen


@torch.inference_mode()
def test_neighbours_leave_no_trace_in_a_single_bit() -> None:
    folder = base_checkpoint()
    assert len(crowds(InvariantModel.load(folder))) == 1
    assert len(crowds(Model.load(folder))) > 1  # what the mode is for


@torch.inference_mode()
def test_neither_does_the_cutting_of_prompts() -> None:
    model = InvariantModel.load(base_checkpoint())
    assert len(crowds(model, 512) | crowds(model, 37) | crowds(model, 5)) == 1


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts_per_tok": 3, "norm_topk_prob": False},
        {"mlp_only_layers": [1], "num_key_value_heads": 4},
        {"model_type": "llama", "attention_bias": True, "num_key_value_heads": 1, "intermediate_size": 22},
        {"model_type": "qwen3", "vocab_size": 51, "tie_word_embeddings": False},
    ],
    ids=lambda config: ", ".join(map(str, config.values())),
)
@torch.inference_mode()
def test_other_architectures_and_odd_widths(make_checkpoint, config: dict[str, object]) -> None:
    model = InvariantModel.load(make_checkpoint(**config))
    check_invariance(model)
    assert len(crowds(model)) == 1


@torch.inference_mode()
def test_keys_past_one_block_and_a_prefix_from_another_row(make_checkpoint) -> None:
    model = InvariantModel.load(make_checkpoint(max_position_embeddings=700))
    prompt = [i * 3 % 50 for i in range(500)]

    def run(warm: list[Sequence], prefill: int) -> bytes:
        engine = Scheduler(
            model, "0", EngineConfig(max_running=4, cached_rows=4, prefill_tokens=prefill), lambda _: None
        )
        for one in warm:
            engine.submit([one])
            finish(engine)
        mine = sequence(prompt, 3, limit=60)
        mine.score_from = None  # scoring would compute the prompt anew
        engine.submit([mine])
        finish(engine)
        assert bool(mine.cached) == bool(warm)
        return exact(mine.output, mine.logprobs)

    cold = run([], 512)
    generated = sequence(prompt[:200], 8, temperature=0.0, limit=40)  # its keys are from single tokens
    assert run([generated, sequence(prompt[:300], 9)], 512) == cold == run([], 33) == run([sequence(prompt, 4)], 7)


@torch.no_grad()
def test_the_mode_computes_the_same_model(model: Model, checkpoint: Path) -> None:
    other = InvariantModel.load(checkpoint)
    tokens = np.arange(40)
    flat = FlatBatch(tokens, tokens, np.zeros(40, dtype=np.int64), 0, [Chunk(0, 40, 0, 0)])
    ours = other.forward(flat, other.new_cache(2, 64), np.arange(40))
    theirs = model.forward(flat, model.new_cache(2, 64), np.arange(40))
    assert theirs.std() > 0.3 and (ours - theirs).abs().max() < 1e-4


def test_a_machine_that_breaks_the_promise_is_refused(checkpoint: Path) -> None:
    class Plain(InvariantModel):
        _linear, _rows, _experts, _attention = Model._linear, Model._rows, Model._experts, Model._attention

    with torch.inference_mode(), pytest.raises(InvarianceError, match="change with the batch on this machine"):
        check_invariance(Plain.load(checkpoint))
    assert invariant.TILE % 32 == 0  # two vectors of AVX-512


def test_more_threads_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValidationError, match="deterministic needs threads = 1, not 2"):
        EngineConfig(deterministic=True, threads=2)
    with (
        pytest.raises(EngineError, match="deterministic needs threads = 1"),
        launch_engine(checkpoint, deterministic=True, threads=2),
    ):
        pass


def test_over_http_after_a_restart_and_after_a_weight_update(checkpoint: Path, make_checkpoint) -> None:
    """Multi-turn episodes beside 0, 1, 7 and 31 others, in two processes, give the same bytes."""
    other = make_checkpoint(seed=9)
    seen: set[bytes] = set()

    async def episode(client: EngineClient, seed: int, turns: int, length: int) -> bytes:
        history, got = list(range(length)), b""
        for turn in range(turns):
            answer = await client.generate(history, Sampling(max_new_tokens=9, seed=seed + turn, temperature=0.9))
            got += _exact(answer)
            history += [*answer.output_ids, 1 + turn, 2]
        return got

    async def run(url: str, beside: tuple[int, ...]) -> None:
        client = EngineClient(url)
        for others in beside:
            crowd = [asyncio.create_task(episode(client, 50 + i, 1 + i % 4, 1 + i)) for i in range(others)]
            seen.add(await episode(client, 7, 4, 20))
            await asyncio.gather(*crowd)
        await client.close()

    async def update(url: str) -> None:
        client = EngineClient(url)
        await client.update_weights_from_disk(checkpoint, 0)
        await client.close()

    with launch_engine(checkpoint, deterministic=True) as engine:
        asyncio.run(run(engine.url, BESIDE))
    with launch_engine(other, deterministic=True) as engine:
        asyncio.run(update(engine.url))
        asyncio.run(run(engine.url, (0, 7)))
    assert len(seen) == 1


def _exact(answer: Generation) -> bytes:
    return exact(answer.output_ids, answer.logprobs)
