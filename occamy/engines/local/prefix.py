"""Which cache row holds which tokens: prefix look-up by chained block hashes, LRU rows, compact placing."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from torch import Tensor

BLOCK = 16
"""Tokens per hashed block. Prompts that share less are computed anew (our choice)."""
_CANDIDATES = 4
_BYTES = 4 * BLOCK


@dataclass
class Row:
    """What one row of the cache holds."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    """Tokens known for this row; the first `computed` of them have keys and values."""
    computed: int = 0
    hashes: list[int] = field(default_factory=list)
    """Chained hash of each full block that the index knows of."""
    used: int = -1
    """Clock of the last use; -1 when it never held anything."""
    busy: bool = False


class PrefixCache:
    """Rows of the key/value cache and an index from token prefixes to rows. Not thread-safe."""

    def __init__(self, data: Tensor) -> None:
        """`data` is [layers, 2, rows, K, length, D], from `Model.new_cache`."""
        self.data = data
        self.rows = [Row() for _ in range(data.shape[2])]
        self._index: dict[int, dict[int, None]] = {}
        self._clock = 0

    def match(self, tokens: array[int]) -> tuple[int, int]:
        """Longest known prefix of `tokens`, counted in blocks: (row, length), or (-1, 0) when it is shorter than one.

        Costs one hash and one look-up per block. What is shared past the last block is found in the four rows that
        held that block last, so that of many the longest may be missed, by less than a block.
        """
        raw = tokens.tobytes()
        chain, rows = 0, None
        for start in range(0, len(raw) - _BYTES + 1, _BYTES):
            chain = hash((chain, raw[start : start + _BYTES]))
            found = self._index.get(chain)
            if found is None:
                break
            rows = found
        best, longest = -1, 0
        for row in list(reversed(rows))[:_CANDIDATES] if rows else ():
            shared = _shared(tokens, self.rows[row].tokens)
            if shared > longest:
                best, longest = row, shared
        return (best, longest) if longest >= BLOCK else (-1, 0)

    def claim(self, source: int, keep: int, active: int) -> int:
        """Take a row for a sequence whose first `keep` tokens are those of row `source` (-1 for none).

        An idle source that would lose less than a block is continued in place; otherwise its keys and values are
        copied to the least recently used idle row. `active` sequences (this one included) are kept within the first
        rows, so that a step reads a span with few holes. The row returned is busy and holds `keep` computed tokens.
        """
        near = active + active // 4 + 4
        if source >= 0 and not self.rows[source].busy and self.rows[source].computed - keep < BLOCK:
            row = source
            self.rows[row].busy = True
            if row >= near:
                other = self._oldest(near)
                self._swap(row, other)
                row = other
        else:
            row = self._oldest(len(self.rows), avoid=source)
            self._forget(row, 0)
            if row >= near:
                other = self._oldest(near, avoid=source)
                self._swap(row, other)
                row = other
            if source >= 0:
                self.data[:, :, row, :, :keep] = self.data[:, :, source, :, :keep]
                self.rows[row].tokens = self.rows[source].tokens[:keep]
                self.touch(source)
        self._forget(row, keep)
        self.rows[row].busy = True
        self.rows[row].computed = keep
        return row

    def extend(self, row: int, tokens: array[int]) -> None:
        """Append tokens to a row and index the blocks that became full; `computed` is the caller's to raise."""
        held = self.rows[row]
        held.tokens.extend(tokens)
        start = len(held.hashes) * BLOCK
        raw = held.tokens[start:].tobytes()
        chain = held.hashes[-1] if held.hashes else 0
        for at in range(0, len(raw) - _BYTES + 1, _BYTES):
            chain = hash((chain, raw[at : at + _BYTES]))
            held.hashes.append(chain)
            self._index.setdefault(chain, {})[row] = None

    def release(self, row: int) -> None:
        """The sequence is done; its computed tokens stay for re-use."""
        held = self.rows[row]
        held.busy = False
        self._forget(row, held.computed)
        self.touch(row)

    def touch(self, row: int) -> None:
        """Mark a row as used now."""
        self._clock += 1
        self.rows[row].used = self._clock

    def erase(self, row: int) -> None:
        """Forget an idle row and zero its keys and values: a NaN left there would spread through masked positions."""
        self._forget(row, 0)
        self.data[:, :, row] = 0

    def flush(self) -> None:
        """Forget all idle rows."""
        for row, held in enumerate(self.rows):
            if not held.busy:
                self._forget(row, 0)
                held.used = -1

    def _oldest(self, limit: int, avoid: int = -1) -> int:
        rows = self.rows
        idle = [r for r in range(min(limit, len(rows))) if not rows[r].busy and r != avoid]
        return min(idle, key=lambda r: rows[r].used)

    def _swap(self, a: int, b: int) -> None:
        rows, data = self.rows, self.data
        longest = max(rows[a].computed, rows[b].computed)
        if not rows[a].computed:
            data[:, :, a, :, :longest] = data[:, :, b, :, :longest]
        elif not rows[b].computed:
            data[:, :, b, :, :longest] = data[:, :, a, :, :longest]
        else:
            saved = data[:, :, a, :, :longest].clone()
            data[:, :, a, :, :longest] = data[:, :, b, :, :longest]
            data[:, :, b, :, :longest] = saved
        for row in (a, b):
            for chain in rows[row].hashes:
                self._index[chain].pop(row, None)
        rows[a], rows[b] = rows[b], rows[a]
        for row in (a, b):
            for chain in rows[row].hashes:
                self._index.setdefault(chain, {})[row] = None

    def _forget(self, row: int, keep: int) -> None:
        """Drop what a row holds past its first `keep` tokens."""
        held = self.rows[row]
        blocks = keep // BLOCK
        for chain in held.hashes[blocks:]:
            found = self._index[chain]
            del found[row]
            if not found:
                del self._index[chain]
        del held.hashes[blocks:]
        del held.tokens[keep:]
        held.computed = min(held.computed, keep)


def _shared(a: array[int], b: array[int]) -> int:
    """Length of the common prefix, by halving on whole comparisons."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
