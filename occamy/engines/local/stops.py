"""Stop strings over sampled ids: the one that the newest token completes. Costs the strings, not the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

_BROKEN = "\ufffd"
"""What bytes decode to that are no whole character."""
_CHARACTER = 4
"""Most bytes of a character in UTF-8, and most tokens that it takes."""


@dataclass(frozen=True)
class StopStrings:
    """Texts that end a sequence."""

    tokenizer: Tokenizer
    texts: tuple[str, ...]

    def completed(self, output: Sequence[int]) -> str | None:
        """The first of the texts that stands in what the last tokens say, None if none does. Ask after each token.

        A text of n bytes takes n tokens at most; those of the character before it may decide how it reads (a leading
        space that decoders strip, bytes that some decode together or not at all). Where the tokens looked at begin
        inside a character, they are read again without its rest.
        """
        size = max(len(text.encode()) for text in self.texts) + _CHARACTER
        for begin in range(max(0, len(output) - size), len(output))[:_CHARACTER]:
            said = self.tokenizer.decode(output[begin:], skip_special_tokens=False)
            if found := next((text for text in self.texts if text in said), None):
                return found
            if not said.startswith(_BROKEN):
                break
        return None
