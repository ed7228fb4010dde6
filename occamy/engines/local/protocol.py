"""SGLang's /generate bodies, parsed and rendered. What this engine cannot honour is refused, never ignored."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson
from tokenizers import Tokenizer

from occamy.engines.local.sampling import SamplingParams, Tops
from occamy.engines.local.scheduler import Sequence
from occamy.engines.local.stops import StopStrings

_KEYS = {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "stream", "rid"}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stop_regex": (None, [], ""),
    "min_p": (0,),
    "min_new_tokens": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "no_stop_trim": (True, False),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "logit_bias": (None, {}),
}
"""Parameters of SGLang that this engine has no use for, with the values at which they change nothing."""
_PARAMS = {
    *("max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "stop", "ignore_eos", "n", "sampling_seed")
}
_LEAST_TEMPERATURE = 1e-6
"""Below it the likeliest token is taken, as in SGLang: logits divided by less leave float32."""


class BadRequest(ValueError):
    """A request that cannot be served as asked; becomes HTTP 400 with this text."""


@dataclass(frozen=True)
class Limits:
    """What requests are checked against."""

    vocab: int
    context: int
    """Tokens of input plus output."""
    eos: tuple[int, ...]
    tokenizer: Callable[[], Tokenizer]
    """The model's; raises BadRequest when it has none."""


@dataclass(frozen=True)
class Generate:
    """A parsed /generate call."""

    sequences: list[Sequence]
    """One per input and sample, samples of one input side by side."""
    listed: bool
    """The answer is a list (a batch, or n > 1)."""
    logprobs: bool
    stream: bool


def parse(body: bytes, limits: Limits) -> Generate:
    """Parse a request body. Raises BadRequest naming the key or value at fault."""
    request = parse_object(body)
    if unknown := sorted(request.keys() - _KEYS):
        raise BadRequest(f"{unknown[0]!r} is not supported by the local engine; it takes {', '.join(sorted(_KEYS))}")
    inputs = request.get("input_ids")
    if not isinstance(inputs, list) or not inputs:
        raise BadRequest("input_ids must be a non-empty list of token ids, or of such lists")
    batch = isinstance(inputs[0], list)
    rows: list[Any] = inputs if batch else [inputs]
    start = int(_number(request, "logprob_start_len", -1, low=-1, whole=True))
    top = int(_number(request, "top_logprobs_num", 0, low=0, high=limits.vocab, whole=True))
    params = request.get("sampling_params") or {}
    each = params if isinstance(params, list) else [params] * len(rows)
    rid = request.get("rid") or secrets.token_hex(16)
    rids = rid if isinstance(rid, list) else [rid] if not batch else [f"{rid}-{i}" for i in range(len(rows))]
    if len(each) != len(rows) or len(rids) != len(rows):
        raise BadRequest(
            f"{len(rows)} inputs, {len(each)} sampling_params and {len(rids)} rids; give one of each per input"
        )
    wanted = request.get("return_logprob") is True
    stream = request.get("stream") is True
    sequences: list[Sequence] = []
    for tokens, given, name in zip(rows, each, rids, strict=True):
        call = str(name) if isinstance(rid, list) else str(rid)
        sequences += _sequences(tokens, given, str(name), call, limits, top if wanted else 0)
    for one in sequences:
        one.stream = stream
        if wanted and 0 <= start < len(one.tokens):
            one.score_from = start
    return Generate(sequences, batch or len(sequences) > 1, wanted, stream)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object; an empty body is an empty object. Raises BadRequest."""
    if not body:
        return {}
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise BadRequest(f"the body is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def render(sequence: Sequence, logprobs: bool) -> dict[str, Any]:
    """The response object of one sequence, finished or (streaming) so far."""
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish,
        "prompt_tokens": len(sequence.tokens),
        "completion_tokens": len(sequence.output),
        "cached_tokens": sequence.cached,
        "weight_version": sequence.version,
    }
    if logprobs:
        pairs = zip(sequence.logprobs, sequence.output, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        start, scored = sequence.score_from, [None, *sequence.input_logprobs]
        # The first token of interest has no log-prob, as in SGLang.
        shown = [] if start is None else zip(scored, sequence.tokens[start : start + len(scored)], strict=True)
        meta["input_token_logprobs"] = [[logprob, token, None] for logprob, token in shown]
        if sequence.params.top:
            meta["output_top_logprobs"] = [_tops(top) for top in sequence.tops]
            meta["input_top_logprobs"] = [] if start is None else [None, *map(_tops, sequence.input_tops)]
    return {"text": "", "output_ids": list(sequence.output), "meta_info": meta}


def _tops(top: Tops) -> list[list[object]]:
    return [[logprob, token, None] for logprob, token in top]


def _sequences(tokens: Any, params: Any, rid: str, call: str, limits: Limits, top: int) -> list[Sequence]:
    """The n samples of one input."""
    ids = _ids(tokens, "input_ids", limits.vocab)
    if not ids:
        raise BadRequest("input_ids is empty; give at least one token")
    if not isinstance(params, dict):
        raise BadRequest(f"sampling_params must be an object, not {type(params).__name__}")
    sampling = replace(_sampling(params, limits), top=top)
    if len(ids) >= limits.context:
        raise BadRequest(
            f"The input ({len(ids)} tokens) is longer than the model's context length ({limits.context} tokens)."
        )
    if len(ids) + sampling.max_new_tokens > limits.context:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {limits.context} tokens: "
            f"{len(ids)} of input and {sampling.max_new_tokens} of max_new_tokens."
        )
    count = int(_number(params, "n", 1, low=1, whole=True))
    sequences = []
    for i in range(count):
        # Samples of one input draw from neighbouring seeds; the first one draws as if n were 1.
        own = replace(sampling, seed=sampling.seed + i) if i else sampling
        sequences.append(Sequence(rid if count == 1 else f"{rid}-{i}", call, array("i", ids), own))
    return sequences


def _sampling(params: dict[str, Any], limits: Limits) -> SamplingParams:
    for key, value in params.items():
        if key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                raise BadRequest(
                    f"sampling_params.{key} = {value!r} is not supported by the local engine; leave it out"
                )
        elif key not in _PARAMS:
            raise BadRequest(f"sampling_params.{key} is not known; use {', '.join(sorted(_PARAMS))}")
    top_k = int(_number(params, "top_k", -1, low=-1, whole=True))
    if top_k == 0:
        raise BadRequest("sampling_params.top_k = 0 leaves no token; use -1 for no limit")
    top_p = _number(params, "top_p", 1.0, low=0.0, high=1.0)
    if top_p == 0:
        raise BadRequest("sampling_params.top_p = 0 leaves no token; use temperature 0 for the likeliest one")
    seed = params.get("sampling_seed")
    if seed is None:
        seed = secrets.randbits(63)
    elif type(seed) is not int:
        raise BadRequest(f"sampling_params.sampling_seed = {seed!r} must be a whole number")
    stop = _ids(params.get("stop_token_ids") or [], "sampling_params.stop_token_ids", limits.vocab)
    texts = _texts(params.get("stop") or [], "sampling_params.stop")
    temperature = _number(params, "temperature", 1.0, low=0.0)
    return SamplingParams(
        temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=int(_number(params, "max_new_tokens", 128, low=1, whole=True)),
        stop=frozenset(() if params.get("ignore_eos") is True else (*stop, *limits.eos)),  # both, as in SGLang
        seed=seed,
        strings=StopStrings(limits.tokenizer(), texts) if texts else None,
    )


def _ids(value: Any, where: str, vocab: int) -> list[int]:
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a list of token ids, not {type(value).__name__}")
    if set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and max(value) < vocab)):
        return value  # the loop below takes ten times as long
    for token in value:
        if type(token) is not int or not 0 <= token < vocab:
            raise BadRequest(f"{where} holds {token!r}, which is out of the vocabulary (0 to {vocab - 1})")
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest(f"{where} = {value!r} must be a text, or a list of texts that are not empty")
    return tuple(texts)


def _number(
    params: dict[str, Any], key: str, default: float, *, low: float, high: float = 1e9, whole: bool = False
) -> float:
    value: Any = params.get(key)
    if value is None:
        return default
    if (type(value) is not int and (whole or type(value) is not float)) or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise BadRequest(f"{key} = {value!r} must be {kind} from {low:g} to {high:g}")
    return float(value)
