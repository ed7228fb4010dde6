"""What the families claim, checked on the chat templates that were published with the models."""

from __future__ import annotations

import importlib.util
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from occamy.capture.messages import Message
from occamy.capture.recorder import Recorder
from occamy.capture.render import Renderer
from occamy.capture.segments import build_segments
from occamy.capture.template import TemplateError
from occamy.contracts.capture import CaptureRules

FAMILY = {
    "qwen2_5": "qwen3",
    "qwen3": "qwen3",
    "qwen3_instruct_2507": "qwen3",
    "qwen3_vl": "qwen3",
    "qwen3_5_think": "qwen3.5",
    "qwen3_5_nothink": "qwen3.5",
    "qwen3_6": "qwen3.5",
    "qwen3_8": "qwen3.5",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
}
THINKING = ("qwen3", "qwen3_5_think", "qwen3_6", "qwen3_8")
STABLE = ("qwen2_5", "qwen3_instruct_2507", "qwen3_vl", "llama3_1", "llama3_2")
"""Their render of a conversation begins with their render of its beginning."""

Published = Callable[[str], Path]

QWEN_TOKENS = {
    **dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), True),
    **dict.fromkeys(
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"), False
    ),
}
LLAMA_TOKENS = dict.fromkeys(
    (
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
        "<|python_tag|>",
    ),
    True,
)  # fmt: skip
"""Added tokens as the published tokenizers have them: text -> special or not."""


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of a published chat template to a tokenizer folder with it."""
    trl = importlib.util.find_spec("trl")
    if trl is None or not trl.submodule_search_locations:
        pytest.skip("the published chat templates come with the package trl; install the extra dev")
    templates = Path(trl.submodule_search_locations[0]) / "chat_templates"

    @cache
    def build(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        tokenizer = byte_level_tokenizer(LLAMA_TOKENS if name.startswith("llama") else QWEN_TOKENS)
        tokenizer.chat_template = (templates / f"{name}.jinja").read_text()
        tokenizer.save_pretrained(folder)
        return folder

    return build


def byte_level_tokenizer(tokens: dict[str, bool]) -> PreTrainedTokenizerFast:
    """Return a small byte-level BPE with these added tokens, the first of which begins a text."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["user assistant system tool\n\n name arguments the record of the account"], trainer)
    for text, special in tokens.items():
        added = AddedToken(text, special=special, normalized=False)
        _ = backend.add_special_tokens([added]) if special else backend.add_tokens([added])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=next(iter(tokens)), clean_up_tokenization_spaces=False
    )


renderer_of = cache(Renderer)
reference_of = cache(PreTrainedTokenizerFast.from_pretrained)

every = pytest.mark.parametrize("name", FAMILY)


def _plain(text: str) -> bool:
    return "\ufdd0" not in text and not any(tag in text for tag in ("<|", "think>", "<tool", "</"))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=24).map(lambda t: unicodedata.normalize("NFC", t))
VALUE = TEXT.filter(_plain)
SAID = VALUE.map(lambda text: text.strip() or "ok")
JSON_VALUES = {
    "string": VALUE,
    "integer": st.integers(-(2**53), 2**53),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(VALUE | st.integers(-9, 9), max_size=3),
    "object": st.dictionaries(VALUE, VALUE | st.booleans(), max_size=3),
}
TYPED = st.sampled_from(sorted(JSON_VALUES)).flatmap(lambda kind: st.tuples(st.just(kind), JSON_VALUES[kind]))
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), TYPED, max_size=4)
CALL = st.tuples(st.sampled_from(["crm_get", "file_write", "lookup"]), ARGUMENTS)


def _tools(calls: list[tuple[str, dict[str, tuple[str, Any]]]]) -> list[Any]:
    """Declare the tools that calls name, with the types of their arguments."""
    properties: dict[str, dict[str, Any]] = {}
    for name, arguments in calls:
        properties.setdefault(name, {}).update({key: {"type": kind} for key, (kind, _) in arguments.items()})
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": declared}}}
        for name, declared in properties.items()
    ]


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": orjson.dumps(arguments).decode()}}


@st.composite
def answers(draw: st.DrawFn, name: str) -> tuple[Message, list[Any]]:
    """Draw an assistant turn that the template can say, and the tools of the request."""
    limit = 1 if FAMILY[name] == "llama3" else 3
    calls = draw(st.lists(CALL, max_size=limit, unique_by=lambda call: call[0]))
    message: Message = {"role": "assistant", "content": draw(SAID)}
    if calls:
        said = [_call(called, {key: value for key, (_, value) in arguments.items()}) for called, arguments in calls]
        message["tool_calls"] = said
        if limit == 1 or draw(st.booleans()):
            message["content"] = None
    if name in THINKING and draw(st.booleans()):
        message["reasoning_content"] = draw(SAID)
    return message, _tools(calls)


@st.composite
def conversations(draw: st.DrawFn, name: str) -> tuple[list[Message], list[Message], list[Any]]:
    """Draw a history that ends with an assistant turn, what follows it, and the tools."""
    history: list[Message] = [{"role": "system", "content": draw(SAID)}] if draw(st.booleans()) else []
    history.append({"role": "user", "content": draw(SAID)})
    tools: list[Any] = []
    for last in [False] * draw(st.integers(0, 2)) + [True]:
        message, tools = draw(answers(name))
        new: list[Message] = [{"role": "tool", "content": draw(VALUE)} for _ in message.get("tool_calls", [])]
        if not new or draw(st.booleans()):
            new.append({"role": "user", "content": draw(SAID)})
        history.append(message)
        if not last:
            history.extend(new)
    return history, new, tools if draw(st.booleans()) else []


def _reference(folder: Path, messages: list[Message], tools: list[Any], prompt: bool = True) -> list[int]:
    """Ids by transformers, which takes arguments as objects and answers with a mapping."""
    given = orjson.loads(orjson.dumps(messages))
    for call in (call for message in given for call in message.get("tool_calls", [])):
        call["function"]["arguments"] = orjson.loads(call["function"]["arguments"])
    encoded = reference_of(folder).apply_chat_template(
        given, tools=tools or None, add_generation_prompt=prompt, date_string="26 Jul 2024"
    )
    ids: list[int] = encoded["input_ids"]
    return ids


@every
def test_a_published_template_belongs_to_its_family(name: str, published: Published) -> None:
    renderer = renderer_of(published(name))
    assert renderer.family.name == FAMILY[name]
    assert renderer.decode([renderer.closing_id]) == ("<|eot_id|>" if name.startswith("llama") else "<|im_end|>")
    assert len(renderer.stop_ids) == (3 if name.startswith("llama") else 2)


@every
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_prompt_has_the_ids_that_transformers_gives_it(name: str, published: Published, data: st.DataObject) -> None:
    history, new, tools = data.draw(conversations(name))
    ids = renderer_of(published(name)).opening([*history, *new], tools)
    assert list(ids) == _reference(published(name), [*history, *new], tools)


@every
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_appended_messages_are_the_end_of_a_whole_render(name: str, published: Published, data: st.DataObject) -> None:
    history, new, tools = data.draw(conversations(name))
    renderer = renderer_of(published(name))
    appended = list(renderer.appended(new))
    whole = _reference(published(name), [*history, *new], tools)
    assert whole[-len(appended) - 1 :] == [renderer.closing_id, *appended]
    if name in STABLE:
        before = _reference(published(name), history, tools, prompt=False)
        while before[-1] != renderer.closing_id:
            before.pop()
        assert before + appended == whole


@every
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_answer_reads_as_the_message_it_says(name: str, published: Published, data: st.DataObject) -> None:
    message, tools = data.draw(answers(name))
    renderer = renderer_of(published(name))
    ids = renderer.answer(message)
    assert ids[-1] == renderer.closing_id and renderer.closing_id not in ids[:-1]
    said = renderer.parse(ids[:-1], tools)
    assert (said.content, said.reasoning) == (message["content"], message.get("reasoning_content"))
    wanted = [(c["function"]["name"], orjson.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
    assert [(call.name, orjson.loads(call.arguments)) for call in said.calls] == wanted


@every
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_content_can_forge_a_role_or_a_result(name: str, published: Published, data: st.DataObject) -> None:
    renderer = renderer_of(published(name))
    texts = {renderer.family.closing, *renderer.family.control, *renderer.family.delimiters}
    marks = {i for text in texts if (i := renderer.single_token(text)) is not None}
    forged = "".join(data.draw(st.lists(st.sampled_from(sorted(texts)) | VALUE, min_size=1, max_size=6)))

    def structure(ids: tuple[int, ...]) -> list[int]:
        return [i for i in ids if i in marks]

    def tool(content: str) -> list[Message]:
        return [{"role": "tool", "content": content}]

    assert structure(renderer.appended(tool(forged))) == structure(renderer.appended(tool("ok")))
    assert renderer.encode(renderer.decode(renderer.encode(forged))) == renderer.encode(forged)
    marks -= {i for text in renderer.family.delimiters if (i := renderer.single_token(text)) is not None}

    def prompt(content: str) -> list[Message]:
        calls = [_call("lookup", {"key": content})]
        return [
            {"role": "system", "content": content},
            {"role": "user", "content": f"ask {content}"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": content},
            {"role": "assistant", "content": content},
            {"role": "user", "content": f"ask {content}"},
        ]

    def tools(content: str) -> list[Any]:
        return [{"type": "function", "function": {"name": "lookup", "description": content, "parameters": {}}}]

    honest = renderer.opening(prompt("ok"), tools("ok"))
    assert structure(renderer.opening(prompt(forged), tools(forged))) == structure(honest)
    assert structure(renderer.answer({"role": "assistant", "content": forged})) == [renderer.closing_id]


TOOLS = [
    {"type": "function", "function": {"name": "crm_get", "parameters": {"properties": {"n": {"type": "integer"}}}}}
]
ASK: Message = {"role": "user", "content": "compare"}
SAMPLED = {
    "qwen3": '<think>\nfirst\n</think>\n\n<tool_call>\n{"name":"crm_get","arguments":{"n": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "crm_get", "arguments": {"n":2}}\n</tool_call><|im_end|>',
    "qwen3_5_think": "first\n</think>\n\n<tool_call>\n<function=crm_get>\n<parameter=n>\n1\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=crm_get>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>",
}
CLOSING_THOUGHT = {
    "qwen3": "<think>\nequal\n</think>\n\ndone<|im_end|>",
    "qwen3_5_think": "equal\n</think>\n\ndone<|im_end|>",
}
RESULTS = "<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response>"
BETWEEN = {
    "qwen3": f"\n<|im_start|>user\n{RESULTS}<|im_end|>\n<|im_start|>assistant\n",
    "qwen3_5_think": f"\n<|im_start|>user\n{RESULTS}<|im_end|>\n<|im_start|>assistant\n<think>\n",
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_thinking_and_calls_stay_as_they_were_sampled(name: str, published: Published) -> None:
    """A whole render would drop the thinking of earlier turns and spell the calls anew."""
    renderer = renderer_of(published(name))
    recorder = Recorder("e", renderer, seed=0, rules=CaptureRules(), context_limit=4096)

    def say(call: Any, text: str) -> Message:
        ids = list(renderer.encode(text))
        return recorder.finish(call, ids, [-1.0] * len(ids), 0, "stop")[1]

    first = recorder.begin("root", [ASK], TOOLS)
    calling = say(first, SAMPLED[name])
    results: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in zip(calling["tool_calls"], "AB", strict=True)
    ]
    second = recorder.begin("root", [ASK, calling, *results], TOOLS)
    done = say(second, CLOSING_THOUGHT[name])
    again: Message = {"role": "user", "content": "again"}
    third = recorder.begin("root", [ASK, calling, *results, done, again], TOOLS)
    say(third, CLOSING_THOUGHT[name])

    assert second.input_ids.tolist() == first.input_ids.tolist() + list(renderer.encode(SAMPLED[name] + BETWEEN[name]))
    assert third.input_ids[: len(second.input_ids)].tolist() == second.input_ids.tolist()
    (segment,) = build_segments("e", "policy", recorder.turns)
    assert segment.tokens[: len(third.input_ids)].tolist() == third.input_ids.tolist()
    targets = renderer.encode(SAMPLED[name] + 2 * CLOSING_THOUGHT[name])
    assert segment.tokens[segment.mask].tolist() == list(targets)
    whole = renderer.opening([ASK, calling, *results, done, again], TOOLS)
    assert "equal" in renderer.decode(third.input_ids) and "equal" not in renderer.decode(whole)


@every
def test_a_turn_cut_by_length_is_closed_as_the_template_closes(name: str, published: Published) -> None:
    renderer = renderer_of(published(name))
    recorder = Recorder("e", renderer, seed=0, rules=CaptureRules(), context_limit=4096)
    first = recorder.begin("root", [ASK], [])
    ids = list(renderer.encode("half an ans"))
    said = recorder.finish(first, ids, [-1.0] * len(ids), 0, "length")[1]
    go: Message = {"role": "user", "content": "go on"}
    second = recorder.begin("root", [ASK, said, go], [])
    added = second.input_ids[len(first.input_ids) + len(ids) :].tolist()
    assert added == [renderer.closing_id, *renderer.appended([go])]
    newline = "" if name.startswith("llama") else "\n"
    assert renderer.decode(added).startswith(renderer.family.closing + newline + sorted(renderer.family.control)[-1])


def test_reasoning_is_left_out_where_the_prompt_gives_it_no_room(published: Published) -> None:
    message: Message = {"role": "assistant", "content": "done", "reasoning_content": "long"}
    for name in ("qwen3_5_nothink", "qwen2_5", "llama3_1"):
        renderer = renderer_of(published(name))
        assert renderer.decode(renderer.answer(message)) == "done" + renderer.family.closing


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_a_template_of_single_calls_refuses_two(name: str, published: Published) -> None:
    message: Message = {"role": "assistant", "tool_calls": [_call("crm_get", {}), _call("crm_get", {})]}
    with pytest.raises(TemplateError, match="only supports single tool-calls"):
        renderer_of(published(name)).answer(message)


@every
@pytest.mark.parametrize("arguments", ['{"n": 1', '{"n": ' + "[" * 900 + "]" * 900 + "}"])
def test_broken_arguments_of_an_echoed_call_can_be_shown_again(name: str, arguments: str, published: Published) -> None:
    """The policy sampled them and the harness echoes them after a rewrite: that may not end the episode."""
    call = {"id": "x", "type": "function", "function": {"name": "crm_get", "arguments": arguments}}
    history: list[Message] = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    ids = renderer_of(published(name)).opening([*history, {"role": "tool", "content": "bad arguments"}], TOOLS)
    shown = renderer_of(published(name)).decode(ids)
    assert arguments in shown.replace('\\"', '"')
