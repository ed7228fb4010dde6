"""Transcripts find the roles of each family's markers and keep tokens of different origin apart."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from occamy.capture.transcript import Reader, read_messages
from occamy.contracts.episode import Origin, Segment

I, S, O = Origin.INHERITED, Origin.SAMPLED, Origin.OBSERVED  # noqa: E741
MARKS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<user>", "<unk>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Reader]:
    """Bytes, and the markers of three families."""
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKS])
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    backend.save(str(path))
    return backend, Reader(path)


def segment(backend: Tokenizer, parts: list[tuple[str, int]]) -> Segment:
    ids = [backend.encode(text).ids for text, _ in parts]
    origin = np.concatenate([np.full(len(i), o, np.int8) for i, (_, o) in zip(ids, parts, strict=True)])
    tokens, sampled = np.concatenate([np.array(i, np.int32) for i in ids]), origin == S
    versions = np.where(sampled, 2, -1).astype(np.int32)
    logprobs = np.where(sampled, -np.arange(len(tokens)) / 8, 0).astype(np.float32)
    return Segment("e", "root", 0, "end", "policy", tokens, sampled, logprobs, versions, origin)


@pytest.mark.parametrize(
    ("parts", "roles"),
    [
        (
            [("<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n", I), ("ok<|im_end|>", S), ("\n", O)],
            [("user", "hé<|im_end|>\n"), ("assistant", "ok<|im_end|>|\n")],
        ),
        (
            [
                ("<|start_header_id|>user<|end_header_id|>\n\nhé<|eot_id|>", I),
                ("<|start_header_id|>assistant<|end_header_id|>\n\n", I),
                ("ok<|eot_id|>", S),
            ],
            [("user", "\n\nhé<|eot_id|>"), ("assistant", "\n\n|ok<|eot_id|>")],
        ),
        ([("a<user>b<unk>c", I)], [("", "a"), ("user", "b<unk>c")]),
        ([("<|im_start|>us", I)], [("us", "")]),
    ],
)
def test_roles_are_read_off_the_markers(
    tokenizer: tuple[Tokenizer, Reader], parts: list[tuple[str, int]], roles: list[tuple[str, str]]
) -> None:
    backend, reader = tokenizer
    messages = read_messages(reader, segment(backend, parts))
    assert [(m.role, "|".join(p.text for p in m.pieces)) for m in messages] == roles


def test_a_piece_sums_up_its_tokens(tokenizer: tuple[Tokenizer, Reader]) -> None:
    backend, reader = tokenizer
    seen = segment(backend, [("<user>a", I), ("bc", S), ("d", O)])
    [message] = read_messages(reader, seen)
    prompt, sampled, observed = message.pieces
    assert (prompt.trained, prompt.versions, prompt.mean_logprob) == (0, (), 0.0)
    assert (sampled.origin, sampled.tokens, sampled.trained, sampled.versions) == (S, 2, 2, (2,))
    assert (sampled.mean_logprob, sampled.min_logprob) == (-0.3125, -0.375)  # of -2/8 and -3/8
    assert (observed.text, observed.tokens) == ("d", 1)
    [cut] = read_messages(reader, seen, limit=3)
    assert [p.text for p in cut.pieces] == ["a", "b"]
