"""Does an engine keep the /generate contract? One suite for any base URL; the answer is a list of findings."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import aiohttp
from tokenizers import Tokenizer

from occamy.engines import logprob_checks, wire_checks
from occamy.engines.logprob_checks import Reference
from occamy.engines.probe import Broken, Probe, Skipped

Verdict = Literal["pass", "fail", "skip"]
Check = Callable[[Probe], Awaitable[str]]

_CHECKS: tuple[tuple[str, Check], ...] = (
    ("information", wire_checks.information),
    ("single answer", wire_checks.single),
    ("stop token kept", wire_checks.stop_token),
    ("stop string", wire_checks.stop_string),
    ("batch", wire_checks.batch),
    ("n = 2", wire_checks.samples),
    ("stream", wire_checks.stream),
    ("seeds", wire_checks.seeds),
    ("prefix cache", wire_checks.prefix_cache),
    ("weight version", wire_checks.weight_version),
    ("top log-probs", wire_checks.top_logprobs),
    ("bad requests", wire_checks.bad_requests),
    ("too long", wire_checks.too_long),
    ("abort", wire_checks.abort),
    ("pause and continue", wire_checks.pause),
    ("tokenize", wire_checks.tokenize),
    ("log-probs, teacher-forced", logprob_checks.teacher_forced),
    ("log-probs, temperature", logprob_checks.temperature),
)
_INTRUSIVE: tuple[tuple[str, Check], ...] = (
    ("update weights", wire_checks.update_weights),
    ("out of vocabulary", wire_checks.out_of_vocabulary),
)
_REFERENCED = (
    ("log-probs, reference", logprob_checks.reference_at_one),
    ("log-probs, reference, temperature", logprob_checks.reference_at_other),
)


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    verdict: Verdict
    detail: str
    """What was seen, what is wrong, or why the check was not made."""


async def check_engine(
    url: str,
    *,
    model: Path | None = None,
    reference: Reference | None = None,
    tolerance: float = 1e-4,
    intrusive: bool = False,
    timeout_s: float = 60.0,
) -> AsyncIterator[Finding]:
    """Run the suite against the engine at `url`, which nobody else uses meanwhile, and yield a finding per check.

    `model` is the folder that the engine serves (for its vocabulary and texts), `reference` its float32 forward pass,
    `tolerance` the largest difference of two log-probs (1e-4 is for float32), `timeout_s` the limit of one request.
    `intrusive` adds what changes the engine or may kill it: weight updates, ids out of the vocabulary. Never raises for
    what the engine does; an engine that cannot be reached is one finding.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        probe = Probe(session, url, tolerance)
        reached = await _finding("health", wire_checks.health, probe)
        yield reached
        if reached.verdict == "fail":
            return
        if model is not None:
            probe.vocab = int(json.loads((model / "config.json").read_bytes())["vocab_size"])
            if (model / "tokenizer.json").is_file():
                probe.decode = partial(
                    Tokenizer.from_file(str(model / "tokenizer.json")).decode, skip_special_tokens=False
                )
        for name, check in _CHECKS:
            yield await _finding(name, check, probe)
        for name, against in _REFERENCED:
            if reference is None:
                yield Finding(name, "skip", "no model folder was given")
            else:
                yield await _finding(name, _bound(against, reference), probe)
        for name, check in _INTRUSIVE:
            yield await _finding(name, check, probe) if intrusive else Finding(name, "skip", "intrusive; not asked for")
        yield await _finding("health afterwards", wire_checks.health, probe)


def _bound(check: Callable[[Probe, Reference], Awaitable[str]], reference: Reference) -> Check:
    return lambda probe: check(probe, reference)


async def _finding(name: str, check: Check, probe: Probe) -> Finding:
    try:
        return Finding(name, "pass", await check(probe))
    except Skipped as e:
        return Finding(name, "skip", str(e))
    except Broken as e:
        return Finding(name, "fail", str(e))
    except (aiohttp.ClientError, OSError, TimeoutError) as e:
        return Finding(name, "fail", f"the call broke: {e or type(e).__name__}")
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as e:
        return Finding(name, "fail", f"the answer has another shape: {e!r}")
