"""The scheduler, stepped by hand: batching changes nothing but speed, and no generation mixes weight versions."""

import random
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from occamy.engines.config import EngineConfig
from occamy.engines.local.checkpoint import read_tensors
from occamy.engines.local.model import Chunk, FlatBatch, Model
from occamy.engines.local.sampling import SamplingParams, SamplingTable
from occamy.engines.local.scheduler import Scheduler, Sequence


def sequence(tokens: list[int], limit: int = 6, temperature: float = 1.0, seed: int = 1, stop: int = 99) -> Sequence:
    params = SamplingParams(temperature, 0.9, -1, limit, frozenset({stop}), seed)
    return Sequence(f"s{seed}", f"s{seed}", array("i", tokens), params)


def scheduler(model: Model, **config: int) -> tuple[Scheduler, list[Sequence]]:
    ended: list[Sequence] = []
    given = {"max_running": 8, "cached_rows": 4} | config
    return Scheduler(model, "0", EngineConfig.model_validate(given), ended.extend), ended


def finish(engine: Scheduler, limit: int = 500) -> None:
    for _ in range(limit):
        engine.step()
        if engine.load() == (0, 0):
            return
    raise AssertionError(f"still {engine.load()} after {limit} steps")


def alone(model: Model, one: Sequence) -> tuple[list[int], list[float]]:
    """The same generation without batching or cache: every token from a full forward."""
    tokens, ids, logprobs = list(one.tokens), [], []
    table = SamplingTable(1)
    table.set(0, one.params)
    while len(ids) < one.params.max_new_tokens and not (ids and ids[-1] in one.params.stop):
        n = len(tokens)
        flat = FlatBatch(np.array(tokens), np.arange(n), np.zeros(n, dtype=np.int64), 0, [Chunk(0, n, 0, 0)])
        logits = model.forward(flat, model.new_cache(1, n), np.array([n - 1]))
        token, logprob, _ = table.sample(logits, np.array([0]), np.array([n]))
        tokens += token
        ids += token
        logprobs += logprob
    return ids, logprobs


@torch.no_grad()
@pytest.mark.parametrize("prefill", [5, 512])
def test_turns_of_many_episodes_equal_lone_generation_and_reuse_their_prefix(model: Model, prefill: int) -> None:
    engine, ended = scheduler(model, prefill_tokens=prefill)
    rng = random.Random(prefill)
    prompt = [rng.randrange(50) for _ in range(20)]
    histories = [prompt + [rng.randrange(50) for _ in range(rng.randrange(1, 12))] for _ in range(11)]
    for turn in range(3):
        batch = [sequence(h, seed=100 * turn + i, stop=7) for i, h in enumerate(histories)]
        for one in batch:  # arrivals spread over steps
            engine.submit([one])
            if rng.random() < 0.5:
                engine.step()
        finish(engine)
        for i, one in enumerate(batch):
            ids, logprobs = alone(model, one)
            assert one.output == ids
            assert np.allclose(one.logprobs, logprobs, atol=1e-4)
            stopped = ids[-1] == 7 and len(ids) < 6  # at the limit, length goes first, as in SGLang
            assert one.finish == ({"type": "stop", "matched": 7} if stopped else {"type": "length", "length": 6})
            histories[i] = [*one.tokens, *one.output, *(rng.randrange(50) for _ in range(9))]
    assert len(ended) == 33


@torch.no_grad()
def test_next_turn_computes_only_what_is_new(model: Model) -> None:
    engine, _ = scheduler(model)
    first = sequence(list(range(30)))
    engine.submit([first])
    finish(engine)
    turn = sequence([*first.tokens, *first.output, 1, 2, 3], seed=2)
    engine.submit([turn])
    finish(engine)
    assert first.cached == 0
    assert turn.cached == 30 + 6 - 1  # the last sampled token was never fed


@torch.no_grad()
def test_group_that_arrives_at_once_computes_its_prompt_once(model: Model) -> None:
    engine, _ = scheduler(model)
    group = [sequence(list(range(40)), seed=i) for i in range(6)]
    engine.submit(group)
    finish(engine)
    assert sorted(s.cached for s in group) == [0, 39, 39, 39, 39, 39]
    assert len({tuple(s.output) for s in group}) > 1
    assert [s.output for s in group] == [alone(model, s)[0] for s in group]


@torch.no_grad()
@pytest.mark.parametrize("prefill", [5, 512])
@pytest.mark.parametrize("start", [0, 17, 29])
def test_input_logprobs_are_of_temperature_1_and_never_from_the_cache(model: Model, prefill: int, start: int) -> None:
    engine, _ = scheduler(model, prefill_tokens=prefill)
    tokens = [i * 3 % 50 for i in range(30)]
    flat = FlatBatch(np.array(tokens), np.arange(30), np.zeros(30, dtype=np.int64), 0, [Chunk(0, 30, 0, 0)])
    logprobs = model.forward(flat, model.new_cache(1, 30), np.arange(30)).log_softmax(-1)
    engine.submit([sequence(tokens)])
    finish(engine)
    scored = sequence(tokens, temperature=0.5)
    scored.params = replace(scored.params, top=2)
    scored.score_from = start
    engine.submit([scored, sequence(tokens[:20], seed=3)])
    finish(engine)
    expected = [float(logprobs[i, tokens[i + 1]]) for i in range(start, 29)]
    assert np.allclose(scored.input_logprobs, expected, atol=1e-5)
    assert [top[0][1] for top in scored.input_tops] == logprobs[start:29].argmax(-1).tolist()
    assert scored.cached == (0 if start < 16 else start)
    assert all(len(top) == 2 and top[0][0] >= top[1][0] for top in scored.tops) and len(scored.tops) == 6


@torch.no_grad()
def test_more_requests_than_rows_all_finish(model: Model) -> None:
    engine, ended = scheduler(model, max_running=3, cached_rows=2)
    group = [sequence([i] * 25 + [3], seed=i) for i in range(20)]
    engine.submit(group)
    engine.step()
    assert engine.load() == (3, 17)
    finish(engine)
    assert len(ended) == 20 and all(s.output == alone(model, s)[0] for s in group)


@torch.no_grad()
def test_new_weights_wait_for_running_generations_and_drop_the_cache(model: Model, make_checkpoint) -> None:
    other = Model.load(make_checkpoint(seed=9))
    engine, _ = scheduler(model)
    early, late = sequence(list(range(20)), temperature=0.0), sequence(list(range(20)), temperature=0.0)
    engine.submit([early])
    engine.step()
    done = engine.replace(other, "1")
    engine.submit([late])
    engine.step()
    assert not done.done() and engine.load() == (1, 1)
    finish(engine)
    assert done.done()
    assert (early.version, early.output) == ("0", alone(model, early)[0])
    assert (late.version, late.output, late.cached) == ("1", alone(other, late)[0], 0)
    assert early.output != late.output


@torch.no_grad()
def test_hold_lets_running_finish_and_starts_nothing(model: Model) -> None:
    engine, _ = scheduler(model)
    running, held = sequence([1, 2, 3]), sequence([4, 5, 6])
    engine.submit([running])
    engine.step()
    engine.hold(True)
    engine.submit([held])
    for _ in range(10):
        engine.step()
    assert len(running.output) == 6 and not held.done
    engine.hold(False)
    finish(engine)
    assert len(held.output) == 6


@torch.no_grad()
def test_abort_ends_running_and_waiting_with_what_they_have(model: Model) -> None:
    engine, ended = scheduler(model, max_running=1)
    running, waiting, other = (sequence([1, 2, 3], seed=i) for i in range(3))
    engine.submit([running, waiting, other])
    engine.step()
    engine.step()
    engine.abort({running, waiting}.__contains__)
    finish(engine)
    assert ended == [running, waiting, other]
    assert [s.finish["type"] for s in ended if s.finish] == ["abort", "abort", "length"]
    assert [len(s.output) for s in ended] == [2, 0, 6]


@torch.no_grad()
def test_not_finite_logits_fail_the_request_and_leave_no_trace(model: Model, checkpoint: Path) -> None:
    tensors = read_tensors(checkpoint, model.spec)
    tensors["model.layers.0.input_layernorm.weight"].fill_(3e38)  # keys and values overflow
    engine, _ = scheduler(Model(model.spec, tensors))
    bad = sequence(list(range(20)))
    engine.submit([bad])
    finish(engine)
    assert "version 0 gave logits that are not finite" in bad.error and bad.output == []
    engine.replace(model, "1")
    good = [sequence(list(range(1, 5 + 5 * i)), seed=i) for i in range(4)]
    engine.submit(good)
    finish(engine)
    assert [s.output for s in good] == [alone(model, s)[0] for s in good]


def test_a_dead_generation_thread_fails_everyone_and_says_why(model: Model) -> None:
    engine, ended = scheduler(model)
    lost = sequence([10**6])  # past every check: out of the vocabulary
    engine.submit([lost])
    engine.run()
    assert ended == [lost] and "index 1000000 is out of bounds" in lost.error
    with pytest.raises(RuntimeError, match="generation stopped"):
        engine.submit([sequence([1])])
    with pytest.raises(RuntimeError, match="generation stopped"):
        engine.flush()
