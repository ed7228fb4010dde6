"""Word lists: disjoint by split, enough wordings, all inside the nano model's vocabulary."""

from __future__ import annotations

import json
from itertools import combinations
from typing import get_args

from occamy.contracts.task import Split
from occamy.nano.documents import encode
from occamy.nano.vocabulary import TOKENS
from occamy.synthesis.author import Slot
from occamy.synthesis.config import SynthesisConfig
from occamy.synthesis.variants import write_task
from occamy.synthesis.wordings import ENUM_VALUES, FILE_NAMES, OPERANDS, WORDINGS, GoalKind, entity_ids, numbers
from occamy.worlds.workspace import MemoryWorkspace
from occamy.worlds.world import World

SPLITS: tuple[Split, ...] = get_args(Split)
SLOTS = {"s": "S", "s2": "S", "i": "I", "j": "I", "f": "F", "g": "F", "c": "F", "c2": "F", "p": "P"}


def skeleton(wording: str) -> str:
    return wording.format(**SLOTS, **dict.fromkeys("vwxyan", "V"))


def test_splits_share_no_id_number_value_or_file_name() -> None:
    for a, b in combinations(SPLITS, 2):
        assert not set(entity_ids(a)) & set(entity_ids(b))
        assert not set(numbers(a)) & set(numbers(b))
        assert not set(ENUM_VALUES[a]) & set(ENUM_VALUES[b])
        assert not set(FILE_NAMES[a]) & set(FILE_NAMES[b])


def test_ids_and_numbers_are_divided_by_their_remainder_of_five() -> None:
    assert entity_ids("test")[:3] == ["A00", "A05", "A10"]
    assert numbers("validation")[:3] == [4, 9, 14]
    assert len(entity_ids("train")) == 360
    assert all((n + m) % 5 == n % 5 for n in range(100) for m in OPERANDS)


def test_every_goal_kind_is_said_in_six_ways_that_no_other_split_or_kind_uses() -> None:
    assert set(WORDINGS) == set(get_args(GoalKind))
    seen: dict[str, str] = {}
    for kind, by_split in WORDINGS.items():
        assert len(by_split["train"]) >= 3
        assert len(by_split["validation"]) == len(by_split["test"]) == 2
        for split, wordings in by_split.items():
            for wording in wordings:
                assert seen.setdefault(skeleton(wording), f"{kind} {split}") == f"{kind} {split}", wording


def test_no_wording_holds_a_value_or_file_name() -> None:
    owned = {word for split in SPLITS for word in ENUM_VALUES[split] + FILE_NAMES[split]}
    for by_split in WORDINGS.values():
        for wordings in by_split.values():
            assert not owned & set(" ".join(map(skeleton, wordings)).split())


def test_every_word_of_requests_calls_and_results_is_in_the_nano_vocabulary() -> None:
    unknown = TOKENS.index("<unk>")
    for split in SPLITS:
        for pool in ("long", "short"):
            for index in range(60):
                task = write_task(Slot(split, pool, index), SynthesisConfig(fault_share=0.5), 11)
                world = World(task.world, MemoryWorkspace())
                text = task.request
                for call in task.grading.reference:
                    arguments = json.dumps(call.arguments, separators=(",", ":"))
                    text += f"<assistant>{call.name}{arguments}<end><tool>{world.call(call.name, arguments).content}"
                assert unknown not in encode(text), text
