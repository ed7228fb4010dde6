"""Prefix look-up and row placing: literal cases, then random use against a brute-force search."""

from array import array

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from occamy.engines.local.prefix import BLOCK, PrefixCache


def cache(rows: int = 12, length: int = 128) -> PrefixCache:
    return PrefixCache(torch.zeros(1, 2, rows, 1, length, 1))


def store(held: PrefixCache, tokens: list[int], active: int = 1) -> int:
    """Run a sequence through the cache as the scheduler does; its 'keys' are its token ids."""
    ids = array("i", tokens)
    source, shared = held.match(ids)
    keep = min(shared, len(ids) - 1, held.rows[source].computed) if source >= 0 else 0
    row = held.claim(source if keep else -1, keep, active)
    held.extend(row, ids[keep:])
    held.data[:, :, row, 0, keep : len(ids), 0] = torch.tensor(tokens[keep:], dtype=torch.float32)
    held.rows[row].computed = len(ids)
    return row


def keys(held: PrefixCache, row: int) -> list[int]:
    return held.data[0, 0, row, 0, : held.rows[row].computed, 0].int().tolist()


def test_the_next_turn_continues_its_own_row_in_place() -> None:
    held = cache()
    first = list(range(40))
    row = store(held, first)
    held.release(row)
    turn = [*first, 7, 7, 7]
    assert held.match(array("i", turn)) == (row, 40)
    again = store(held, turn)
    assert again == row and keys(held, again) == turn


def test_a_group_shares_its_prompt_by_copy_and_leaves_the_source_whole() -> None:
    held = cache()
    prompt = list(range(50))
    first = store(held, [*prompt, *range(60, 90)], active=1)
    second = store(held, [*prompt, 1, 2], active=2)
    assert first != second
    assert keys(held, first) == [*prompt, *range(60, 90)] and keys(held, second) == [*prompt, 1, 2]


def test_short_or_flushed_or_different_prefixes_do_not_match() -> None:
    held = cache()
    held.release(store(held, list(range(BLOCK - 1))))
    assert held.match(array("i", range(BLOCK - 1))) == (-1, 0)
    held.release(store(held, list(range(100, 140))))
    assert held.match(array("i", [*range(100, 110), *range(40)])) == (-1, 0)
    held.flush()
    assert held.match(array("i", range(100, 140))) == (-1, 0)


def test_active_rows_stay_in_the_first_rows() -> None:
    held = cache(rows=40)
    rows = [store(held, [i] * 20, active=i + 1) for i in range(30)]
    for row in rows:
        held.release(row)
    last = store(held, [29] * 20 + [1], active=1)  # continues a row far out: moved, with its keys
    assert last < 5 and keys(held, last) == [29] * 20 + [1]


def test_the_least_recently_used_row_is_taken() -> None:
    held = cache(rows=4)
    prompts = [[i] * 20 for i in range(5)]
    for prompt in prompts:
        held.release(store(held, prompt))
    known = [held.match(array("i", prompt))[1] for prompt in prompts]
    assert known == [0, 20, 20, 20, 20]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40), st.booleans(), st.integers(0, 3)), max_size=40))
def test_keys_always_belong_to_the_tokens_and_the_match_is_the_longest_in_blocks(
    steps: list[tuple[int, int, bool, int]],
) -> None:
    held = cache(rows=7, length=400)
    busy: list[int] = []
    histories: list[list[int]] = [[i] * 17 for i in range(6)]
    for which, more, keep, salt in steps:
        tokens = histories[which] + [salt] * more
        if len(tokens) > 390:
            continue
        if len(busy) > 3:
            held.release(busy.pop(0))
        _, found = held.match(array("i", tokens))
        shared = [sum(1 for _ in _common(tokens, r.tokens)) for r in held.rows]
        longest = max(shared)
        assert longest // BLOCK * BLOCK <= found <= longest and (found >= BLOCK or not found)
        row = store(held, tokens, active=len(busy) + 1)
        assert row not in busy and keys(held, row) == tokens
        busy.append(row)
        if keep:
            histories[which] = tokens
        for at, content in enumerate(held.rows):
            assert keys(held, at) == list(content.tokens[: content.computed])


def _common(a: list[int], b: array) -> object:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x
