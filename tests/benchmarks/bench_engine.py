"""Speed of the local engine over HTTP against transformers.generate on the same model: ``make bench-engine``.

Not a test. Both run on one thread. "Once": one long answer for each caller. "Episodes": callers take turns of a short
answer and a short observation each, over a growing history; transformers gets each turn as one batch (its best case,
all callers in step) and computes the history anew, as it keeps none between calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from occamy.engines.client import EngineClient, EngineError, Sampling
from occamy.engines.contract import wire_ids
from occamy.engines.local.launch import EngineProcess, launch_engine
from occamy.nano.base import base_checkpoint

CONCURRENCY = (1, 8, 32)
PROMPT, ANSWER, OBSERVATION = 60, 12, 12


@dataclass
class Speed:
    """Sampled tokens per second of wall time and per second of CPU time."""

    wall: float
    cpu: float
    cached: float = 0.0
    """Share of the input tokens that came from the prefix cache."""


def endless(model: Path, scratch: Path) -> Path:
    """A copy of `model` without end tokens, so that both sides sample the same number of tokens."""
    shutil.copytree(model, scratch / "model")
    for name in ("config.json", "generation_config.json"):
        path = scratch / "model" / name
        if path.is_file():
            config = json.loads(path.read_bytes())
            path.write_text(json.dumps(config | {"eos_token_id": None}))
    return scratch / "model"


def prompts(concurrent: int, seed: int, vocab: int) -> list[list[int]]:
    """Random token ids, the same for both sides."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(PROMPT)] for _ in range(concurrent)]


def observation(turn: int, caller: int, vocab: int) -> list[int]:
    """What the world answers: some ids."""
    return [(17 * turn + 5 * caller + 3 * i) % vocab for i in range(OBSERVATION)]


async def engine_once(client: EngineClient, given: list[list[int]], length: int) -> float:
    """One generation of `length` tokens for each caller."""
    calls = (client.generate(p, Sampling(max_new_tokens=length, seed=i)) for i, p in enumerate(given))
    assert {len(g.output_ids) for g in await asyncio.gather(*calls)} == {length}
    return 0.0


async def engine_episodes(client: EngineClient, given: list[list[int]], turns: int, vocab: int) -> float:
    """Callers take `turns` turns each. Returns the cached share of the input."""
    cached = total = 0

    async def one(caller: int) -> None:
        nonlocal cached, total
        history = list(given[caller])
        for turn in range(turns):
            answer = await client.generate(history, Sampling(max_new_tokens=ANSWER, seed=caller))
            assert len(answer.output_ids) == ANSWER
            cached, total = cached + answer.cached_tokens, total + len(history)
            history += answer.output_ids + observation(turn, caller, vocab)

    await asyncio.gather(*(one(i) for i in range(len(given))))
    return cached / total


class Reference:
    """transformers.generate on one thread."""

    def __init__(self, model: Path) -> None:
        torch.set_num_threads(1)
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def once(self, given: list[list[int]], length: int) -> list[list[int]]:
        """The histories with `length` sampled tokens behind each."""
        ids = torch.tensor(given)
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": length, "min_new_tokens": length}
        with torch.no_grad():
            out: list[list[int]] = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options
            ).tolist()
        return out

    def episodes(self, given: list[list[int]], turns: int, vocab: int) -> None:
        """All callers take `turns` turns in step."""
        histories = given
        for turn in range(turns):
            histories = self.once(histories, ANSWER)
            histories = [h + observation(turn, i, vocab) for i, h in enumerate(histories)]


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(work: Callable[[], float | None], tokens: int, pid: int, rounds: int) -> Speed:
    """The best of `rounds`, as other programs only ever take time away."""
    best = Speed(0.0, 0.0)
    for _ in range(rounds):
        start, spent = time.perf_counter(), cpu_seconds(pid)
        cached = work() or 0.0
        wall, cpu = time.perf_counter() - start, max(cpu_seconds(pid) - spent, 0.01)
        best = Speed(max(best.wall, tokens / wall), max(best.cpu, tokens / cpu), cached)
    return best


def engine_speeds(engine: EngineProcess, length: int, turns: int, rounds: int, vocab: int) -> dict[str, Any]:
    """{"once"|"episodes": {concurrency: Speed}} and the milliseconds of a round trip."""
    loop = asyncio.new_event_loop()
    client = EngineClient(engine.url)
    loop.run_until_complete(engine_once(client, prompts(8, 0, vocab), 8))
    found: dict[str, Any] = {"once": {}, "episodes": {}, "http_ms": loop.run_until_complete(http_ms(client))}
    for n in CONCURRENCY:
        seeds = iter(range(1, 1000))  # new prompts each round: nothing cached from the round before

        def once(n: int = n, seeds: Iterator[int] = seeds) -> float:
            return loop.run_until_complete(engine_once(client, prompts(n, next(seeds), vocab), length))

        def episodes(n: int = n, seeds: Iterator[int] = seeds) -> float:
            return loop.run_until_complete(engine_episodes(client, prompts(n, next(seeds), vocab), turns, vocab))

        found["once"][n] = measured(once, n * length, engine.pid, rounds)
        found["episodes"][n] = measured(episodes, n * turns * ANSWER, engine.pid, rounds)
    loop.run_until_complete(client.close())
    loop.close()
    return found


def reference_speeds(model: Path, length: int, turns: int, rounds: int, vocab: int) -> dict[str, dict[int, Speed]]:
    """As `engine_speeds`, of transformers in this process."""
    reference = Reference(model)
    reference.once(prompts(2, 0, vocab), 2)
    found: dict[str, dict[int, Speed]] = {"once": {}, "episodes": {}}
    for n in CONCURRENCY:
        given = prompts(n, n, vocab)

        def once(given: list[list[int]] = given) -> None:
            reference.once(given, length)

        def episodes(given: list[list[int]] = given) -> None:
            reference.episodes(given, turns, vocab)

        found["once"][n] = measured(once, n * length, os.getpid(), rounds)
        found["episodes"][n] = measured(episodes, n * turns * ANSWER, os.getpid(), rounds)
    return found


async def http_ms(client: EngineClient) -> float:
    """Median milliseconds of a request that the engine refuses at once: HTTP, JSON and checks, both sides."""
    taken = []
    for _ in range(300):
        start = time.perf_counter()
        try:
            await client.generate([*range(200), 10**6], Sampling(stop_token_ids=(3,), seed=1))
        except EngineError as e:
            assert "out of the vocabulary" in str(e), e
        taken.append(1e3 * (time.perf_counter() - start))
    return sorted(taken)[150]


def body_ms(length: int = 100_000) -> dict[str, float]:
    """Best CPU milliseconds to write a request body of `length` input ids, by their type."""
    ids = [i % 150_000 for i in range(length)]
    kinds: dict[str, Any] = {"list": ids, "array('i')": array("i", ids), "numpy int32": np.array(ids, dtype=np.int32)}
    found = {}
    for kind, given in kinds.items():
        taken = []
        for _ in range(30):
            start = time.process_time()
            orjson.dumps({"input_ids": wire_ids(given)}, option=orjson.OPT_SERIALIZE_NUMPY)
            taken.append(1e3 * (time.process_time() - start))
        found[kind] = round(min(taken), 2)
    start = time.process_time()
    json.dumps({"input_ids": ids})
    return found | {"list, json of the standard library": round(1e3 * (time.process_time() - start), 2)}


def main() -> None:
    """Measure, print ratios, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder; the shipped nano model by default")
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, metavar="FILE", help="also as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = endless(args.model or base_checkpoint(), Path(scratch))
        vocab = int(json.loads((model / "config.json").read_bytes())["vocab_size"])
        sizes = args.length, args.turns, args.rounds, vocab
        with launch_engine(model) as engine:
            plain = engine_speeds(engine, *sizes)
        with launch_engine(model, deterministic=True) as engine:
            exact = engine_speeds(engine, *sizes)
        theirs = reference_speeds(model, *sizes)
    rows = []
    for kind in ("once", "episodes"):
        for n in CONCURRENCY:
            ours, bits, other = plain[kind][n], exact[kind][n], theirs[kind][n]
            rows.append(
                {
                    "workload": kind,
                    "concurrent": n,
                    "engine_tokens_per_s": round(ours.wall),
                    "transformers_tokens_per_s": round(other.wall),
                    "ratio": round(ours.wall / other.wall, 2),
                    "ratio_per_cpu_second": round(ours.cpu / other.cpu, 2),
                    "cached_share": round(ours.cached, 2),
                    "deterministic_ratio": round(bits.wall / other.wall, 2),
                    "deterministic_cost": round(ours.cpu / bits.cpu, 2),
                }
            )
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread each side",
        "turns": args.turns,
        "tokens": {"prompt": PROMPT, "answer": ANSWER, "observation": OBSERVATION, "once": args.length},
        "rows": rows,
        "http_round_trip_ms": round(plain["http_ms"], 2),
        "body_of_100k_ids_ms": body_ms(),
    }
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}))
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(json.dumps(result, indent=2) + "\n")
    slow = [r for r in rows if r["concurrent"] >= 8 and r["ratio"] < 1]
    assert not slow, f"slower than transformers.generate: {slow}"


if __name__ == "__main__":
    main()
