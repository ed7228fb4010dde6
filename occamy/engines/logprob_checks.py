"""Conformance checks of log-probs against teacher-forced passes, by the engine itself and by a reference model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from occamy.engines.probe import (
    Broken,
    Meaning,
    Probe,
    Skipped,
    drift,
    input_logprobs_of,
    logprobs_of,
    temperature_meaning,
    whole,
)

Reference = Callable[[Sequence[int]], NDArray[np.float32]]
"""Logits [length, vocab] of the tokens given, from a float32 forward pass of the same weights."""

_PARAMS = {"temperature": 1.0, "max_new_tokens": 24, "sampling_seed": 5, "ignore_eos": True}
_HOT = 4.0
_DRAWS = range(16)
_PROMPTS = 8


async def teacher_forced(probe: Probe) -> str:
    """Sampled tokens at temperature 1 have the log-probs that the engine gives them when they are its input."""
    worst = 0.0
    for shift in range(3):
        prompt = probe.prompt(shift)
        answer = await probe.one(prompt, _PARAMS)
        tokens = prompt + answer["output_ids"]
        forced = await probe.one(tokens, {"temperature": 0, "max_new_tokens": 1}, logprob_start_len=0)
        off = drift(logprobs_of(answer), input_logprobs_of(forced, tokens)[len(prompt) - 1 :])
        worst = max(worst, _near(off, probe.tolerance, "the engine's own teacher-forced pass"))
    return f"off by at most {worst:.2g}"


async def temperature(probe: Probe) -> str:
    """What log-probs mean at a temperature other than 1; told from several tokens at one position."""
    meaning = (await hot_sample(probe))[2]
    return f"log-probs of the {meaning} distribution (seen at temperature {_HOT:g})"


async def reference_at_one(probe: Probe, reference: Reference) -> str:
    """Log-probs of sampled and of given tokens at temperature 1 are those of a float32 forward pass."""
    prompt = probe.prompt()
    answer = await probe.one(prompt, _PARAMS)
    tokens = prompt + answer["output_ids"]
    expected = forced_logprobs(reference(tokens), tokens)
    off = _near(
        drift(logprobs_of(answer), expected[len(prompt) - 1 :]), probe.tolerance, "the reference at temperature 1"
    )
    forced = await probe.one(tokens, {"temperature": 0, "max_new_tokens": 1}, logprob_start_len=0)
    given = _near(drift(input_logprobs_of(forced, tokens), expected), probe.tolerance, "the reference, input tokens")
    return f"off by at most {max(off, given):.2g}"


async def reference_at_other(probe: Probe, reference: Reference) -> str:
    """Log-probs at another temperature are what the check of their meaning found, to the last digit."""
    prompt, answers, meaning = await hot_sample(probe)
    logits = reference(prompt)[-1:]
    worst = 0.0
    for answer in answers:
        token = answer["output_ids"][:1]
        expected = forced_logprobs(logits, [0, *token], _HOT if meaning == "temperature-scaled" else 1.0)
        worst = max(worst, drift(logprobs_of(answer), expected))
    return f"off by at most {_near(worst, probe.tolerance, f'the {meaning} reference'):.2g} at temperature {_HOT:g}"


async def hot_sample(probe: Probe) -> tuple[list[int], list[Any], Meaning]:
    """(prompt, answers of one token each at temperature 4, what their log-probs mean).

    Tries some prompts, as a sure model draws the same token all the time. Raises Skipped when it does for all.
    """
    why = Skipped()
    for shift in range(_PROMPTS):
        prompt = probe.prompt(shift)
        params = [{"temperature": _HOT, "max_new_tokens": 1, "sampling_seed": i, "ignore_eos": True} for i in _DRAWS]
        answers = [whole(a, prompt) for a in await probe.generate([prompt] * len(_DRAWS), params)]
        by_token = {a["output_ids"][0]: a for a in answers}
        inputs = [[*prompt, token] for token in by_token]
        forced = await probe.generate(inputs, {"temperature": 0, "max_new_tokens": 1}, logprob_start_len=0)
        at_one = [input_logprobs_of(whole(f, i), i)[-1] for f, i in zip(forced, inputs, strict=True)]
        distinct = list(by_token.values())
        sampled = [logprobs_of(a)[0] for a in distinct]
        try:
            return prompt, distinct, temperature_meaning(sampled, at_one, _HOT, probe.tolerance)
        except Skipped as e:
            why = e
    raise why


def forced_logprobs(logits: NDArray[np.float32], tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-prob of each of `tokens` but the first, from the logits [length, vocab] of the position before it."""
    scaled = logits[: len(tokens) - 1].astype(np.float64) / temperature
    top = scaled.max(axis=-1, keepdims=True)
    norm = top[:, 0] + np.log(np.exp(scaled - top).sum(axis=-1))
    picked: NDArray[np.float64] = scaled[np.arange(len(tokens) - 1), list(tokens[1:])] - norm
    return [float(value) for value in picked]


def _near(off: float, tolerance: float, what: str) -> float:
    if off > tolerance:
        raise Broken(f"off by {off:.2g} from {what}; at most {tolerance:g} is allowed")
    return off
