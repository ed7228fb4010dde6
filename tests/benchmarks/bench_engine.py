"""Speed of the local engine over HTTP: ``python tests/benchmarks/bench_engine.py [--model DIR]``. Not a test."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from pathlib import Path

from occamy.engines.client import EngineClient, Sampling
from occamy.engines.local.launch import EngineProcess, launch_engine

CONCURRENCY = (1, 8, 32, 128)
PROMPT, ANSWER, OBSERVATION = 60, 12, 12


def random_model(folder: Path) -> Path:
    """The size of the laptop policy: hidden 128, 4 layers, 8 experts of width 160, vocabulary 900."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=900,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def tokens(n: int, rng: random.Random) -> list[int]:
    """n random ids."""
    return [rng.randrange(800) for _ in range(n)]


async def once(client: EngineClient, concurrent: int, length: int, rng: random.Random) -> float:
    """Sampled tokens per second, one generation of `length` tokens for each of `concurrent` callers."""
    prompts = [tokens(PROMPT, rng) for _ in range(concurrent)]
    start = time.perf_counter()
    await asyncio.gather(*(client.generate(p, Sampling(max_new_tokens=length, seed=i)) for i, p in enumerate(prompts)))
    return concurrent * length / (time.perf_counter() - start)


async def episodes(client: EngineClient, concurrent: int, turns: int, rng: random.Random) -> tuple[float, float]:
    """Sampled tokens per second and cached share of input, callers taking `turns` short turns each."""
    sampled = cached = given = 0

    async def one(seed: int) -> None:
        nonlocal sampled, cached, given
        history = tokens(PROMPT, rng)
        for _ in range(turns):
            answer = await client.generate(history, Sampling(max_new_tokens=ANSWER, seed=seed))
            sampled, cached, given = sampled + ANSWER, cached + answer.cached_tokens, given + len(history)
            history += answer.output_ids + tokens(OBSERVATION, rng)

    start = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(concurrent)))
    return sampled / (time.perf_counter() - start), cached / given


async def http_cost(client: EngineClient) -> tuple[float, float]:
    """Median and least milliseconds of a request that the engine refuses at once: HTTP, JSON and checks, both sides."""
    prompt = [*range(200), 10**6]
    taken = []
    for _ in range(300):
        start = time.perf_counter()
        try:
            await client.generate(prompt, Sampling(stop_token_ids=(3,), seed=1))
        except Exception as e:
            assert "out of the vocabulary" in str(e), e
        taken.append(1e3 * (time.perf_counter() - start))
    return sorted(taken)[150], min(taken)


def reference(model: Path, concurrent: int, length: int) -> tuple[float, float]:
    """Sampled tokens of transformers.generate per second and per CPU second: one thread, lock-step (its best case)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.randint(0, 800, (concurrent, PROMPT))
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": length, "min_new_tokens": length, "pad_token_id": 0}
    with torch.no_grad():
        loaded.generate(
            ids, attention_mask=torch.ones_like(ids), **(options | {"max_new_tokens": 2, "min_new_tokens": 2})
        )
        start, spent = time.perf_counter(), time.process_time()
        loaded.generate(ids, attention_mask=torch.ones_like(ids), **options)
        n = concurrent * length
        return n / (time.perf_counter() - start), n / (time.process_time() - spent)


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(engine: EngineProcess, length: int, turns: int) -> dict[int, tuple[float, float]]:
    """Print one line per concurrency; returns concurrency -> tokens per second and per CPU second, without turns."""
    rng, client = random.Random(0), EngineClient(engine.url)
    speeds: dict[int, tuple[float, float]] = {}
    await once(client, 8, 8, rng)
    median, least = await http_cost(client)
    print(f"HTTP round trip without generation: {median:.2f} ms (median), {least:.2f} ms (least)")
    for n in CONCURRENCY:
        spent = cpu_seconds(engine.pid)
        speed = await once(client, n, length, rng)
        speeds[n] = speed, n * length / (cpu_seconds(engine.pid) - spent)
        spent = cpu_seconds(engine.pid)
        turned, cached = await episodes(client, n, turns, rng)
        turned_cpu = n * turns * ANSWER / (cpu_seconds(engine.pid) - spent)
        print(
            f"{n:4d} concurrent: {speed:6.0f} tokens/s ({speeds[n][1]:6.0f} per CPU second); in turns of {ANSWER}: "
            f"{turned:6.0f} tokens/s ({turned_cpu:6.0f} per CPU second), {cached:.0%} of input cached"
        )
    await client.close()
    return speeds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint folder; a random model of the laptop's size by default")
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or random_model(Path(scratch) / "model")
        with launch_engine(model) as engine:
            speeds = asyncio.run(measure(engine, args.length, args.turns))
        for n in CONCURRENCY:
            wall, cpu = reference(model, n, args.length)
            print(
                f"{n:4d} concurrent: transformers.generate {wall:6.0f} tokens/s, ratio {speeds[n][0] / wall:.1f}; "
                f"{cpu:6.0f} per CPU second, ratio {speeds[n][1] / cpu:.1f}"
            )


if __name__ == "__main__":
    main()
