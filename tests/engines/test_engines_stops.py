"""Stop strings: found with the token that completes them, whatever tokens say them, at no cost of the answer."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from occamy.engines.client import EngineClient, EngineError, Sampling
from occamy.engines.local.launch import EngineProcess, launch_engine
from occamy.engines.local.stops import StopStrings
from occamy.nano.base import base_checkpoint


def byte_level() -> Tokenizer:
    """A token per byte: id n is byte n."""
    letters = bytes_to_letters()
    tokenizer = Tokenizer(models.WordLevel({letters[i]: i for i in range(256)}, unk_token="?"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bytes_to_letters() -> list[str]:
    """GPT-2's letter for each byte: printable ones stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(i) if i in plain else chr(next(spare)) for i in range(256)]


def byte_fallback() -> Tokenizer:
    """As SentencePiece says text: spaces are ▁, the first one is stripped, unknown characters are bytes <0x..>."""
    words = {f"<0x{i:02X}>": i for i in range(256)} | {"▁go": 256, "▁": 257, "on": 258}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0x00>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def ended(tokenizer: Any, texts: tuple[str, ...], output: list[int]) -> tuple[int, str] | None:
    """(tokens until one of the texts is complete, which one)."""
    strings = StopStrings(tokenizer, texts)
    for end in range(1, len(output) + 1):
        if found := strings.completed(output[:end]):
            return end, found
    return None


@pytest.mark.parametrize(
    ("texts", "said", "end"),
    [
        (("END",), "the END of", (7, "END")),
        (("☂",), "a ☂ b", (5, "☂")),
        (("é☂",), "☂é☂", (8, "é☂")),
        (("zz", "b", "ab"), "ab", (2, "b")),  # of two that one token completes, the first
        (("\n\n",), "a\nb\n\nc", (5, "\n\n")),
        (("END",), "en END"[:5], None),
    ],
)
def test_a_stop_string_ends_with_the_token_that_completes_it(
    texts: tuple[str, ...], said: str, end: tuple[int, str] | None
) -> None:
    assert ended(byte_level(), texts, list(said.encode())) == end


def test_it_may_begin_and_end_inside_tokens() -> None:
    tokenizer = Tokenizer(models.WordLevel({"stop he": 0, "re now": 1}, unk_token="stop he"))
    tokenizer.decoder = decoders.Fuse()
    assert ended(tokenizer, ("here",), [0, 1]) == (2, "here")


def test_bytes_that_decode_together_or_not_at_all_are_read_from_a_whole_character() -> None:
    umbrella, accent = list("☂".encode()), list("é".encode())
    output = [256, *umbrella * 5, *accent, 258]
    assert ended(byte_fallback(), ("é",), output) == (18, "é")
    assert ended(byte_fallback(), (" go",), [258, 256]) == (2, " go")
    assert ended(byte_fallback(), (" go",), [256]) is None  # the space is stripped: the text begins with "go"


@settings(deadline=None)
@given(
    st.lists(st.sampled_from("ab é☂😀"), max_size=30), st.lists(st.text("ab é☂😀", min_size=1, max_size=4), max_size=3)
)
def test_it_is_found_where_the_whole_text_first_holds_it(said: list[str], texts: list[str]) -> None:
    output, tokenizer = list("".join(said).encode()), byte_level()
    texts = texts or ["a"]
    whole = [tokenizer.decode(output[:end]) for end in range(1, len(output) + 1)]
    first = next(((end, t) for end, text in enumerate(whole, 1) for t in texts if t in text), None)
    assert ended(tokenizer, tuple(texts), output) == first


def test_a_long_answer_costs_no_more_than_a_short_one() -> None:
    read: list[int] = []

    class Counting:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            read.append(len(ids))
            return "\ufffd"  # the worst case: never a whole character

    strings = StopStrings(Counting(), ("END",))  # type: ignore[arg-type]
    for size in (1, 10, 100_000):
        strings.completed([0] * size)
    assert sum(read[-4:]) == 7 + 6 + 5 + 4 and len(read) == 1 + 4 + 4


@pytest.fixture(scope="module")
def nano() -> Iterator[EngineProcess]:
    with launch_engine(base_checkpoint()) as process:
        yield process


def test_an_engine_keeps_the_ids_that_complete_it_streamed_or_not(nano: EngineProcess, ask: Callable[..., Any]) -> None:
    tokenizer = Tokenizer.from_file(str(base_checkpoint() / "tokenizer.json"))

    async def use(client: EngineClient) -> None:
        prompt = list(range(3, 23))
        free = await client.generate(prompt, Sampling(temperature=0.0, max_new_tokens=12))
        said = [tokenizer.decode(free.output_ids[:end], skip_special_tokens=False) for end in range(13)]
        stop = said[5][len(said[3]) - 1 :]  # from the last character of the third token to the end of the fifth
        end = next(n for n in range(13) if stop in said[n])
        asked = Sampling(temperature=0.0, max_new_tokens=12, stop=("\n", stop))
        got = await client.generate(prompt, asked)
        assert (got.output_ids, got.finish_reason) == (free.output_ids[:end], "stop")
        assert got.logprobs == pytest.approx(free.logprobs[:end], abs=1e-4)
        parts = [part async for part in client.stream(prompt, asked)]
        assert (parts[-1].output_ids, parts[-1].finish_reason) == (got.output_ids, "stop")
        for bad in ("", 7):
            with pytest.raises(EngineError, match=r"sampling_params\.stop = .* that are not empty"):
                await client.generate(prompt, Sampling(stop=(bad,)))  # type: ignore[arg-type]

    ask(nano, use)


def test_an_engine_without_a_tokenizer_refuses_them(checkpoint: Path, ask: Callable[..., Any]) -> None:
    async def use(client: EngineClient) -> None:
        with pytest.raises(EngineError, match=r"has no tokenizer\.json") as refused:
            await client.generate([1, 2], Sampling(stop=("a",)))
        assert refused.value.kind == "rejected"

    with launch_engine(checkpoint) as process:
        ask(process, use)
