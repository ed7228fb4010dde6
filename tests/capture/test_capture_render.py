"""A tokenizer folder that cannot be trusted to render is refused, or read as it must be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from occamy.capture import families
from occamy.capture.families.family import TemplateFamily
from occamy.capture.families.nano import NANO, parse_calls
from occamy.capture.render import Renderer
from occamy.capture.template import ChatTemplate, TemplateError
from occamy.contracts.record import digest_bytes
from occamy.nano.tokenizer import build_tokenizer, save_tokenizer


def _family(monkeypatch: pytest.MonkeyPatch, template: str, **facts: Any) -> None:
    digests = frozenset({digest_bytes(template.encode())})
    family = TemplateFamily("test", digests, "<end>", frozenset({"tool", "user"}), parse_calls, **facts)
    monkeypatch.setattr(families, "FAMILIES", (family,))


def _folder(folder: Path, template: str) -> Path:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_truncation_and_padding_saved_with_a_tokenizer_cut_no_prompt(tmp_path: Path, renderer: Renderer) -> None:
    save_tokenizer(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    message = {"role": "user", "content": "set tier of A01 and B02"}
    assert Renderer(tmp_path).opening([message], []) == renderer.opening([message], [])


def test_a_control_token_that_the_tokenizer_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<end>"
    _family(monkeypatch, template, control=frozenset({"<|user|>"}))
    with pytest.raises(ValueError, match=r"'<\|user\|>' is not one token, as family test needs"):
        Renderer(_folder(tmp_path, template))


def test_a_generation_prompt_without_the_familys_header_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
    _family(monkeypatch, template, header="<assistant>done")
    with pytest.raises(ValueError, match="the generation prompt lacks '<assistant>done' of test"):
        Renderer(_folder(tmp_path, template))


def test_what_the_generation_prompt_writes_of_the_answer_is_read_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = NANO_LIKE.replace("<assistant>{%- endif", "<assistant>crm_get{%- endif")
    _family(monkeypatch, template, header="<assistant>")
    renderer = Renderer(_folder(tmp_path, template))
    assert renderer.parse(renderer.encode('{"id":"A01"}')).calls == (("crm_get", '{"id":"A01"}'),)


NANO_LIKE = (
    "{%- for m in messages -%}<{{ m.role }}>{{ m.content }}{%- if m.role == 'assistant' -%}<end>{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)


def test_the_vocabulary_of_a_model_with_vision_is_its_text_models(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 512}}))
    assert Renderer(tmp_path).vocab_size == 512
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no vocab_size"):
        Renderer(tmp_path)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"input_ids": [1], "attention_mask": [1]}, "dict .'input_ids', 'attention_mask'. holds no token ids"),
        (["1", "2"], "list .'1', '2'. holds no token ids"),
        ([[1, 2]], "list ..1, 2.. holds no token ids"),
        ([-1], "token id -1 is outside"),
        ([4096], "token id 4096 is outside"),
    ],
)
def test_what_is_no_list_of_ids_of_the_model_is_named(renderer: Renderer, ids: Any, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        renderer.check_vocabulary(ids)


def test_template_code_that_fails_on_a_message_is_a_template_error(tmp_path: Path) -> None:
    _folder(tmp_path, "{{ messages[0].content + 1 }}")
    with pytest.raises(TemplateError, match=r"fails on these messages: TypeError\("):
        ChatTemplate(tmp_path).render([{"role": "user", "content": "check"}], generation_prompt=True)


def test_variables_of_the_family_reach_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = NANO_LIKE.replace("<assistant>{%- endif", "<assistant>{{ start }}{%- endif")
    _family(monkeypatch, template, variables={"start": "done"})
    renderer = Renderer(_folder(tmp_path, template))
    assert renderer.appended([{"role": "user", "content": "ok"}]) == renderer.encode("<user>ok<assistant>done")


def test_the_refusal_of_a_template_names_families_with_its_tokens(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}<|im_end|>"
    with pytest.raises(ValueError) as refusal:
        Renderer(_folder(tmp_path, template))
    assert digest_bytes(template.encode()) in str(refusal.value)
    assert "as qwen3 or qwen3.5 does, add this digest to template_digests" in str(refusal.value)


def test_only_short_appends_are_kept(renderer: Renderer) -> None:
    before = renderer._appended.cache_info().currsize
    long, short = "A01 " * 1000, "A01 kept nowhere else"
    for content in (long, short, short):
        renderer.appended([{"role": "tool", "content": content}])
    assert renderer._appended.cache_info().currsize == before + 1


def test_nano_declares_every_token_that_marks_a_role(renderer: Renderer) -> None:
    assert NANO.control == {"<tools>", "<system>", "<user>", "<assistant>", "<tool>"}
    assert renderer.stop_ids == (renderer.closing_id,)
