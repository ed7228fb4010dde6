"""Conformance checks of shapes, endings, batches, streams, errors and control. Each returns what it saw."""

from __future__ import annotations

import asyncio
from typing import Any

from occamy.engines.contract import message_of
from occamy.engines.probe import Answer, Broken, Probe, Skipped, check_stream, logprobs_of, whole

_GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
_HELD_S = 0.5
"""A paused engine that has not answered a short request by then is taken to hold it (our choice)."""
_LONG = 2000


async def health(probe: Probe) -> str:
    """/health and /health_generate say 200, also after everything else."""
    for path in ("/health", "/health_generate"):
        status, answer = await probe.call("GET", path)
        if status != 200:
            raise Broken(f"{path}: HTTP {status}: {message_of(answer)}")
    return "200"


async def information(probe: Probe) -> str:
    """/model_info and /server_info are objects; what they say of vocabulary and context is kept for other checks."""
    for path in ("/model_info", "/server_info"):
        status, answer = await probe.call("GET", path)
        if status != 200 or not isinstance(answer, dict):
            raise Broken(f"{path}: HTTP {status}: {message_of(answer)}")
        probe.info |= {key: value for key, value in answer.items() if value is not None}
    if not isinstance(probe.info.get("model_path"), str):
        raise Broken("no model_path")
    if isinstance(vocab := probe.info.get("vocab_size"), int):
        probe.vocab = vocab
    lengths = [probe.info.get(key) for key in ("context_length", "max_model_len", "max_req_input_len")]
    probe.context = next((n for n in lengths if isinstance(n, int)), probe.context)
    return f"model {probe.info['model_path']}, context {probe.context or 'not said'}"


async def single(probe: Probe) -> str:
    """One answer: its shape, and the finish reason at max_new_tokens."""
    answer = await probe.one(probe.prompt(), _GREEDY, rid="conformance-single")
    finish = answer["meta_info"]["finish_reason"]
    if finish.get("type") != "length" or finish.get("length") != 12 or len(answer["output_ids"]) != 12:
        raise Broken(f"{len(answer['output_ids'])} tokens and {finish} for max_new_tokens 12 with ignore_eos")
    if answer["meta_info"]["id"] != "conformance-single":
        raise Broken(f"id is {answer['meta_info']['id']!r}, not the rid that was sent")
    return "12 tokens, each with its log-prob"


async def stop_token(probe: Probe) -> str:
    """A stop token ends the answer, stays in it, and is named."""
    free = (await probe.one(probe.prompt(), _GREEDY))["output_ids"]
    token = free[4]
    end = free.index(token) + 1
    params = {"temperature": 0, "max_new_tokens": 12, "stop_token_ids": [token]}
    answer = await probe.one(probe.prompt(), params)
    finish, ids = answer["meta_info"]["finish_reason"], answer["output_ids"]
    if ids == free[: end - 1]:
        raise Broken(f"the stop token {token} is missing from the end of {ids}")
    if len(ids) < end and ids == free[: len(ids)]:
        raise Skipped(f"the model ended by itself after {len(ids)} tokens")
    if ids != free[:end]:
        raise Broken(f"output {ids} is not {free[:end]}, which ends with the stop token")
    if finish.get("type") != "stop" or finish.get("matched") != token:
        raise Broken(f"finish_reason {finish}, not stop matched by {token}")
    return f"ended by token {token}, which is kept"


async def stop_string(probe: Probe) -> str:
    """A stop string ends the answer with the token that completes it, also one that begins inside another token."""
    if probe.decode is None:
        raise Skipped("no model folder with a tokenizer was given, so no text is known")
    free = (await probe.one(probe.prompt(), _GREEDY))["output_ids"]
    for end in range(2, len(free)):
        before, text = probe.decode(free[: end - 1]), probe.decode(free[:end])
        across = text[len(before) - 1 : len(before) + 1]
        if before and len(across) == 2 and "\ufffd" not in across and across not in before:
            break
    else:
        raise Skipped("no two neighbouring tokens of the answer make a text of their own")
    answer = await probe.one(probe.prompt(), {"temperature": 0, "max_new_tokens": 12, "stop": [across]})
    finish, ids = answer["meta_info"]["finish_reason"], answer["output_ids"]
    if len(ids) < end and ids == free[: len(ids)] and finish.get("matched") != across:
        raise Skipped(f"the model ended by itself after {len(ids)} tokens")
    if ids != free[:end]:
        raise Broken(f"output {ids} is not {free[:end]}, whose last token completes {across!r}")
    if finish.get("type") != "stop" or finish.get("matched") != across:
        raise Broken(f"finish_reason {finish}, not stop matched by {across!r}")
    return f"ended by {across!r}, which the tokens {end - 1} and {end} say together"


async def batch(probe: Probe) -> str:
    """A batch comes back as a list in order, each answer as when alone."""
    prompts = [probe.prompt(i, 12 + i) for i in range(3)]
    answers = await probe.generate(prompts, _GREEDY)
    if not isinstance(answers, list) or len(answers) != 3:
        raise Broken(f"3 inputs gave {type(answers).__name__}, not a list of 3")
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = await probe.one(prompt, _GREEDY)
        if whole(answer, prompt)["output_ids"] != alone["output_ids"]:
            raise Broken(f"{answer['output_ids']} in the batch, {alone['output_ids']} alone")
    return "3 answers in order"


async def samples(probe: Probe) -> str:
    """n = 2 comes back as a list, or as one object."""
    answer = await probe.generate(probe.prompt(), {"max_new_tokens": 8, "n": 2, "ignore_eos": True})
    items = answer if isinstance(answer, list) else [answer]
    if not 1 <= len(items) <= 2:
        raise Broken(f"{len(items)} answers for n = 2")
    for item in items:
        whole(item, probe.prompt())
    return f"{'a list of' if isinstance(answer, list) else 'one object,'} {len(items)}"


async def stream(probe: Probe) -> str:
    """Server-sent events hold all ids so far, and end with [DONE]."""
    alone = await probe.one(probe.prompt(), _GREEDY)
    return check_stream(await probe.streamed(probe.prompt(), _GREEDY), alone["output_ids"])


async def seeds(probe: Probe) -> str:
    """A seed fixes an answer; other seeds give others."""

    async def sample(seed: int) -> tuple[int, ...]:
        params = {"max_new_tokens": 16, "sampling_seed": seed, "ignore_eos": True}
        return tuple((await probe.one(probe.prompt(), params))["output_ids"])

    first = [await sample(seed) for seed in range(4)]
    again = [await sample(seed) for seed in range(4)]
    if first != again:
        seed = next(i for i in range(4) if first[i] != again[i])
        raise Broken(f"sampling_seed {seed} gave {list(first[seed])} and then {list(again[seed])}")
    if len(set(first)) == 1:
        raise Broken("four seeds gave the same 16 tokens")
    return f"{len(set(first))} different answers of 4 seeds, each twice the same"


async def prefix_cache(probe: Probe) -> str:
    """A prompt seen before is served from the cache, and not after a flush."""
    prompt = probe.prompt(9, 64) if (probe.context or 0) > 80 else probe.prompt(9, 32)
    await probe.one(prompt, _GREEDY)
    warm = (await probe.one(prompt, _GREEDY))["meta_info"]["cached_tokens"]
    status, answer = await probe.call("POST", "/flush_cache", {})
    if status != 200:
        raise Broken(f"/flush_cache: HTTP {status}: {message_of(answer)}")
    cold = (await probe.one(prompt, _GREEDY))["meta_info"]["cached_tokens"]
    if cold:
        raise Broken(f"{cold} tokens from the cache just after it was flushed")
    return f"{warm} of {len(prompt)} tokens re-used, 0 after a flush"


async def weight_version(probe: Probe) -> str:
    """Every answer carries the version that /model_info names, and it is a number."""
    status, info = await probe.call("GET", "/model_info")
    said = info.get("weight_version") if status == 200 and isinstance(info, dict) else None
    got = (await probe.one(probe.prompt(), _GREEDY))["meta_info"]["weight_version"]
    if said is not None and str(said) != got:
        raise Broken(f"answers carry {got!r}, /model_info says {said!r}")
    if not got.isdecimal():
        raise Broken(f"{got!r} is not a number; start the engine with one (--weight-version 0)")
    return f"version {got}"


async def bad_requests(probe: Probe) -> str:
    """What is no request is refused with 4xx and the engine lives on."""
    for name, body in (("no JSON", b"{"), ("no input", {"sampling_params": {}}), ("empty input", {"input_ids": []})):
        status, _ = await probe.call("POST", "/generate", body)
        if not 400 <= status < 500:
            raise Broken(f"{name}: HTTP {status}, not 4xx")
    await probe.one(probe.prompt(), _GREEDY)
    return "refused with 4xx"


async def too_long(probe: Probe) -> str:
    """An input past the context gets 400 and {"error": {"message"}}."""
    if probe.context is None:
        raise Skipped("the engine does not say its context length")
    body = {"input_ids": probe.prompt(0, probe.context + 1), "sampling_params": {"max_new_tokens": 1}}
    _refused(*await probe.call("POST", "/generate", body))
    await probe.one(probe.prompt(), _GREEDY)
    return f"400 from {probe.context} tokens on"


async def abort(probe: Probe) -> str:
    """/abort_request ends a running request; its stream ends in order, with finish type abort."""
    params = {"max_new_tokens": min(_LONG, (probe.context or _LONG) - 28), "ignore_eos": True}
    got = await probe.streamed(probe.prompt(), params, abort_after=1, rid="conformance-abort")
    if not got.events or not got.done:
        raise Broken("the stream of an aborted request does not end with an event and [DONE]")
    finish = whole(got.events[-1], probe.prompt())["meta_info"]["finish_reason"]
    if finish["type"] == "length":
        raise Broken(f"an aborted request ran to its end of {params['max_new_tokens']} tokens")
    if finish["type"] != "abort":
        raise Broken(f"finish type {finish['type']!r}, not abort")
    return f"ended after {len(got.events[-1]['output_ids'])} of {params['max_new_tokens']} tokens"


async def pause(probe: Probe) -> str:
    """A paused engine holds a new request and answers it after /continue_generation."""
    await _done(probe, "/pause_generation", {"mode": "in_place"})
    call = asyncio.create_task(probe.one(probe.prompt(), _GREEDY))
    try:
        answered, _ = await asyncio.wait([call], timeout=_HELD_S)
    finally:
        await _done(probe, "/continue_generation", {})
    ids = (await call)["output_ids"]
    if answered:
        raise Broken("a request was answered while the engine was paused")
    return f"held for {_HELD_S:g} s, then {len(ids)} tokens"


async def tokenize(probe: Probe) -> str:
    """/tokenize gives the ids of a text."""
    status, answer = await probe.call("POST", "/tokenize", {"prompt": "a b", "add_special_tokens": False})
    if status == 400:
        raise Skipped(message_of(answer))
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if status != 200 or not isinstance(tokens, list) or not tokens or answer.get("count") != len(tokens):
        raise Broken(f"HTTP {status}: {str(answer)[:120]}")
    return f"{len(tokens)} ids"


async def top_logprobs(probe: Probe) -> str:
    """top_logprobs_num: the likeliest tokens of each position, at temperature 0 the output itself first."""
    answer = await probe.one(probe.prompt(), _GREEDY, top_logprobs_num=3)
    tops = answer["meta_info"].get("output_top_logprobs")
    if not isinstance(tops, list) or any(not isinstance(t, list) or len(t) != 3 for t in tops):
        raise Broken(f"output_top_logprobs are not three entries a position: {str(tops)[:120]}")
    off = max(abs(top[0][0] - own) for top, own in zip(tops, logprobs_of(answer), strict=True))
    if off > probe.tolerance:
        raise Broken(
            f"the likeliest token's log-prob is off by {off:.2g} from that of the token taken at temperature 0"
        )
    return "3 per position"


async def out_of_vocabulary(probe: Probe) -> str:
    """An id past the vocabulary gets 400. (It kills an SGLang server: intrusive.)"""
    if "vocab_size" not in probe.info:
        raise Skipped("the engine does not say its vocabulary")
    for token in (probe.vocab, -1):
        body = {"input_ids": [*probe.prompt(), token], "sampling_params": {"max_new_tokens": 1}}
        _refused(*await probe.call("POST", "/generate", body))
    await probe.one(probe.prompt(), _GREEDY)
    return f"400 from id {probe.vocab} on"


async def update_weights(probe: Probe) -> str:
    """The same weights under another version; then a bad folder is refused and the old weights go on (intrusive)."""
    path, version = probe.info["model_path"], (await probe.one(probe.prompt(), _GREEDY))["meta_info"]["weight_version"]
    for name in ("987654", version):
        body = {"model_path": path, "weight_version": name, "flush_cache": True}
        status, answer = await probe.call("POST", "/update_weights_from_disk", body)
        if status != 200 or not isinstance(answer, dict) or answer.get("success") is not True:
            raise Broken(f"update from {path}: HTTP {status}: {message_of(answer)}")
        got = (await probe.one(probe.prompt(), _GREEDY))["meta_info"]["weight_version"]
        if got != name:
            raise Broken(f"an answer after the update to version {name} carries {got!r}")
    status, answer = await probe.call("POST", "/update_weights_from_disk", {"model_path": f"{path}/nothing-here"})
    if isinstance(answer, dict) and answer.get("success") is not False:
        raise Broken(f"update from a folder that is not there: HTTP {status}: {str(answer)[:120]}")
    await probe.one(probe.prompt(), _GREEDY)
    return "new version served; a missing folder is refused"


def _refused(status: int, answer: Any) -> None:
    error: Answer = answer.get("error", {}) if isinstance(answer, dict) else {}
    if status != 400 or not isinstance(error, dict) or not isinstance(error.get("message"), str):
        raise Broken(f'HTTP {status}: {str(answer)[:120]}; not 400 and {{"error": {{"message"}}}}')


async def _done(probe: Probe, path: str, body: Answer) -> None:
    status, answer = await probe.call("POST", path, body)
    if status != 200:
        raise Broken(f"{path}: HTTP {status}: {message_of(answer)}")
