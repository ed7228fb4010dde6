"""The tokenizer and its template: compact, reversible, and the same tokens as the pretraining streams."""

from random import Random

import pytest

from occamy.nano.documents import encode
from occamy.nano.streams import STREAMS, rehearsals
from occamy.nano.tokenizer import build_tokenizer
from occamy.nano.vocabulary import TOKENS

TOKENIZER = build_tokenizer()
TOOLS = [
    {"type": "function", "function": {"name": n, "parameters": {"type": "object", "properties": p}}}
    for n, p in (
        ("crm_get", {"id": {"type": "string"}}),
        ("crm_update", {"id": {"type": "string"}, "tier": {"type": "string"}, "visits": {"type": "integer"}}),
        ("orders_update", {"id": {"type": "string"}, "customer": {"type": "string", "x-ref": "crm"}}),
        ("file_read", {"path": {"type": "string"}}),
    )
]


def test_a_call_costs_few_tokens_and_decodes_to_the_same_text() -> None:
    text = 'crm_update{"id":"A01","tier":"gold"}<end>'
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert [TOKENS[i] for i in ids] == ["crm", '_update{"id":"', "A01", '","', "tier", '":"', "gold", '"}', "<end>"]
    assert TOKENIZER.decode(ids) == text


def test_template_renders_tools_messages_and_calls_compactly() -> None:
    messages = [
        {"role": "user", "content": "set tier of crm A01 to gold"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "crm_get", "arguments": '{"id":"A01"}'}}],
        },
        {"role": "tool", "content": '{"tier":"lead"}'},
        {"role": "assistant", "content": "done"},
    ]
    text = TOKENIZER.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert text == (
        "<tools>crm:tier visits ;orders:customer>crm ;file;<user>set tier of crm A01 to gold"
        '<assistant>crm_get{"id":"A01"}<end><tool>{"tier":"lead"}<assistant>done<end>'
    )


def test_template_is_prefix_stable_and_opens_the_next_turn() -> None:
    messages = [
        {"role": "system", "content": "work"},
        {"role": "user", "content": "ok"},
        {"role": "assistant", "content": "done"},
    ]
    short = TOKENIZER.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert short == "<system>work<user>ok<assistant>"
    assert TOKENIZER.apply_chat_template(messages, tokenize=False).startswith(short)


def test_arguments_given_as_a_dict_render_like_the_string() -> None:
    for arguments in ('{"id":"A01","visits":5}', {"id": "A01", "visits": 5}):
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "crm_update", "arguments": arguments}}],
        }
        assert (
            TOKENIZER.apply_chat_template([call], tokenize=False) == '<assistant>crm_update{"id":"A01","visits":5}<end>'
        )


@pytest.mark.parametrize("stream", STREAMS)
def test_streams_encode_as_the_tokenizer_does_and_know_every_word(stream: str) -> None:
    maker, r = STREAMS[stream][0], Random(5)
    unknown = TOKENS.index("<unk>")
    for _ in range(150):
        for ids, mask in maker(r):
            text = " ".join(TOKENS[i] for i in ids)
            assert TOKENIZER.encode(text, add_special_tokens=False) == ids == encode(text)
            assert unknown not in ids and len(mask) == len(ids) and 0 < sum(mask) < len(ids)
            assert len(ids) <= 512


def test_transcripts_train_on_what_the_assistant_says_and_nothing_else() -> None:
    r, seen_summary = Random(9), False
    end, assistant = TOKENS.index("<end>"), TOKENS.index("<assistant>")
    for _ in range(200):
        documents = list(STREAMS["transcripts"][0](r))
        for ids, mask in documents:
            starts = [i + 1 for i in range(len(ids) - 1) if ids[i] == assistant and mask[i + 1]]
            assert starts and ids[-1] == end
            for start in starts:
                stop = ids.index(end, start)
                assert all(mask[start : stop + 1]) and (stop + 1 == len(ids) or not mask[stop + 1])
        if len(documents) > 1:
            seen_summary = True
            asked = encode("<user>summary<assistant>")
            joined = documents[0][0]
            assert any(joined[i : i + 3] == asked for i in range(len(joined)))
    assert seen_summary


def test_careless_rehearsals_say_more_than_careful_ones_of_the_same_dice() -> None:
    def calls(careless: float) -> list[str]:
        r = Random(4)
        return ["".join(TOKENS[i] for ids, mask in [d] for i, m in zip(ids, mask, strict=True) if m)
                for _ in range(60) for d in rehearsals(r, careless)]  # fmt: skip

    careful, careless = calls(0.0), calls(1.0)
    assert sum(map(len, careless)) > sum(map(len, careful))  # reads again, forgets to stop
    assert careful != careless and all("<end>" in text for text in careful + careless)
