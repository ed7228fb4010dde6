"""Requests as the recorder compares them: fingerprints and hash links, computed for new messages only."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from occamy.capture.messages import GivenCall, Message, digest_tools, extend_chain, fingerprint, is_marked
from occamy.contracts.capture import CaptureRules

_KEPT = 8
"""Requests per role that the next one is compared with: as many children may take turns (our choice)."""

Key = tuple[str, bytes, bytes]
"""Role, digest of the tools, last link: what makes two requests the same."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `prints` and `links` have an entry per message."""

    role: str
    messages: list[Message]
    tools: list[Any]
    tools_digest: bytes
    prints: list[bytes]
    links: list[bytes]

    @property
    def key(self) -> Key:
        """What a repetition shares."""
        return self.role, self.tools_digest, self.links[-1]

    def last_answer(self) -> int:
        """Index of the last assistant message, -1 if there is none."""
        return next((i for i in reversed(range(len(self.messages))) if self.messages[i]["role"] == "assistant"), -1)


class Reader:
    """Reads requests. A message that the request before held is compared, not hashed again."""

    def __init__(self, rules: CaptureRules, given: Mapping[str, GivenCall]) -> None:
        self._rules, self._given = rules, given
        self._recent: dict[str, list[Request]] = {}

    def read(self, role: str, messages: list[Message], tools: list[Any]) -> Request:
        """Return the request with its fingerprints and links."""
        role = self._asked(messages[-1]) or role if role == "root" else role
        recent = self._recent.setdefault(role, [])
        digest = next((r.tools_digest for r in recent if r.tools == tools), None) or digest_tools(tools)
        prints: list[bytes] = []
        links: list[bytes] = []
        for place, before in enumerate(recent):
            n = min(len(before.messages), len(messages))
            if messages[n - 1] == before.messages[n - 1] and messages[:n] == before.messages[:n]:
                prints, links = before.prints[:n], before.links[:n]
                del recent[place]
                break
        new = [fingerprint(m, self._given, self._rules) for m in messages[len(prints) :]]
        links += extend_chain(links[-1] if links else b"", new)
        request = Request(role, messages, tools, digest, prints + new, links)
        recent.insert(0, request)
        del recent[_KEPT:]
        return request

    def _asked(self, last: Message) -> str:
        """Role of the housekeeping that a request of the root's is by its last message, "" for none."""
        asked = (a.run for a in self._rules.auxiliaries if a.asks is not None and is_marked(last, (a.asks,)))
        return next(asked, "")


def read_text(role: str, prompt: array[int]) -> Request:
    """Return a raw prompt as a request of one message that no chat request can hold."""
    print_ = hashlib.blake2b(b"prompt" + prompt.tobytes(), digest_size=32).digest()
    return Request(role, [{"role": "prompt"}], [], b"", [print_], extend_chain(b"", [print_]))
