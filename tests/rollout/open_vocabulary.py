"""A tokenizer that has words for anything, as the prompts of real agent programs need it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from occamy.contracts.task import FieldSpec, WorldSpec
from occamy.worlds.tools import tool_names, tool_schemas

WORDS = ("the", "order", "of", "account", "is", "billed", "on", "monday", "and", "shipped", "to", "north", "depot")
"""A token each, after a space."""
WORLD = WorldSpec(services={"account": {"tier": FieldSpec(kind="enum", values=("gold", "iron"))}}, records={})


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer folder: byte-level, about four characters a token, with the chat template of Qwen3-Instruct.

    Skips the test where the template is not installed.
    """
    trl = importlib.util.find_spec("trl")
    if trl is None or not trl.submodule_search_locations:
        pytest.skip("the published chat templates come with the package trl; install the extra dev")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    schemas = [json.dumps(tool) for tool in tool_schemas(WORLD, tool_names(WORLD))]
    backend.train_from_iterator([" ".join(WORDS * 9), *schemas], trainer)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    template = Path(trl.submodule_search_locations[0]) / "chat_templates" / "qwen3_instruct_2507.jinja"
    tokenizer.chat_template = template.read_text()
    tokenizer.save_pretrained(folder)


def long_text(number: int) -> str:
    """A text of its own for each number, about 36,000 characters and 6,700 tokens."""
    return " ".join(WORDS[(i + i * number // 7) % len(WORDS)] for i in range(6700))
