"""Builds the nano tokenizer and its chat template: OpenAI messages and tools, rendered compactly."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from occamy.nano.vocabulary import PATTERN, TOKENS

CHAT_TEMPLATE = """\
{%- if tools -%}<tools>
{%- for tool in tools -%}
{%- set f = tool.function -%}
{%- if f.name.endswith('_update') -%}
{{ f.name[:-7] }}:
{%- for key, spec in f.parameters.properties.items() if key != 'id' -%}
{{ key }}{% if spec['x-ref'] %}>{{ spec['x-ref'] }}{% endif %}{{ ' ' }}
{%- endfor -%};
{%- elif f.name == 'file_read' -%}file;
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<assistant>{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ call.function.name }}
{%- if call.function.arguments is string -%}{{ call.function.arguments }}
{%- else -%}{{ call.function.arguments | tojson(separators=(',', ':')) }}
{%- endif -%}
{%- endfor -%}<end>
{%- else -%}<{{ message.role }}>{{ message.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""
"""Tools shrink to one line per service (its updatable fields and where references point); only assistant turns are
closed, by <end>; the next role token delimits all others."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: one token per vocabulary entry, whitespace dropped, unknown words -> <unk>."""
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(TOKENS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(PATTERN), "isolated")]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<tools>", "<system>", "<user>", "<assistant>", "<tool>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into a checkpoint folder."""
    build_tokenizer().save_pretrained(folder)
