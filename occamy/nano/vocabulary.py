"""The closed vocabulary of the nano model: special tokens, JSON pieces, entity ids, whole numbers and words."""

from __future__ import annotations

import re


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SPECIAL = ("<pad>", "<tools>", "<system>", "<user>", "<assistant>", "<end>", "<tool>", "<unk>")

PIECES = (
    *(
        '_get{"id":"',
        '_update{"id":"',
        '_search{"field":"',
        '_create{"',
        '","value":"',
        '","value":',
        '","page":',
        ',"page":',
    ),
    *('file_read{"path":"', 'file_write{"path":"', '","text":"', "file_list{}", '{"files":["'),
    *(
        '{"ids":["',
        '{"ids":[]}',
        '"],"next":',
        '{"id":"',
        '{"',
        '":"',
        '":',
        '","',
        ',"',
        '"}',
        "}",
        '["',
        '"]}',
        '"]',
        "[]",
    ),
    *(f'{{"error":"{e}"}}' for e in ("not_found", "invalid_argument", "unknown_tool", "conflict", "unavailable")),
    *(";", ":", "=", ">", "?", "+", ",", "."),
)
"""Call skeletons and JSON punctuation that are one token each, so that a call costs about nine tokens."""

IDS = tuple(f"{letter}{number:02d}" for letter in "ABCDEF" for number in range(100))
INTS = tuple(str(i) for i in range(100))
SERVICES = _words(
    "crm orders ledger stock ships rooms desks cars bills leads tasks plans farms ports mines labs clubs "
    "shops teams bots lamps pumps tanks roads bins docks gates halls posts yards"
)
FIELDS = _words(
    "tier status visits customer state qty order amount flag size grade level owner parent rank score price "
    "stage mode kind count weight source target host batch total zone color speed phase depth width group"
)
VALUES = _words(
    "gold silver bronze basic active lead lost vip open paid sent void red green blue grey hot cold warm high "
    "low mid fast slow new old late early full empty wide thin soft hard dry wet north south east west alpha "
    "beta gamma delta prime extra light dark"
)
FILES = _words("memo notes report log list todo plan brief draft memo2 index page sheet paper letter card")
WORDS = _words(
    "ok done none pruned summary file work id set of to update if is then else the with copy add create make "
    "mark as bump by put from into check when use for otherwise behind should have find whose and a entry "
    "needs raise change it in on start same write named read note value give must be get take now look up who "
    "which that onto store save its switch turn record move where owner one new first last also instead after "
    "before verify again has at now its these then both"
)

TOKENS = tuple(dict.fromkeys((*SPECIAL, *PIECES, *IDS, *INTS, *SERVICES, *FIELDS, *VALUES, *FILES, *WORDS)))
"""All tokens in id order; a word that stands in two lists is one token."""

PATTERN = (
    "|".join(re.escape(p) for p in sorted((*SPECIAL, *PIECES), key=len, reverse=True))
    + r"|[A-F][0-9][0-9]|[A-Za-z]+[0-9]*|[0-9]+|\S"
)
"""What is one token: the longest special token or piece, an entity id, a word, a number, else one character."""
