"""The words of synthesised tasks, divided by split: entity ids, numbers, enum values, file names and wordings.

Splits share no entity, no stored or target value, no file name and no wording: a held-out task is new in all of them.
"""

from __future__ import annotations

from typing import Literal

from occamy.contracts.task import Split

GoalKind = Literal[
    "set", "mark", "create", "search", "cross", "report", "memo", "cond", "copy", "add", "chain", "trace", "verify"
]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


RESIDUES: dict[Split, tuple[int, ...]] = {"train": (1, 2, 3), "validation": (4,), "test": (0,)}
"""A split owns the ids and numbers whose value modulo 5 is one of these."""

ENUM_VALUES: dict[Split, tuple[str, ...]] = {
    "train": _words("gold silver bronze basic active lead lost vip open paid sent void red green blue grey"),
    "validation": _words("hot cold warm high low mid fast slow new old late early full empty wide thin"),
    "test": _words("soft hard dry wet north south east west alpha beta gamma delta prime extra light dark"),
}

FILE_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("memo", "notes", "report"),
    "validation": ("log", "list", "todo"),
    "test": ("plan", "brief", "draft"),
}

OPERANDS = (5, 10, 15)
"""What `add` goals add: multiples of 5, so that a sum stays among its split's numbers. Shared by all splits."""


def entity_ids(split: Split) -> list[str]:
    """Ids A00 to F99 that a split owns."""
    return [f"{letter}{n:02d}" for letter in "ABCDEF" for n in range(100) if n % 5 in RESIDUES[split]]


def numbers(split: Split) -> list[int]:
    """Whole numbers 1 to 99 that a split owns."""
    return [n for n in range(1, 100) if n % 5 in RESIDUES[split]]


WORDINGS: dict[GoalKind, dict[Split, tuple[str, ...]]] = {
    "set": {
        "train": (
            "set {f} of {s} {i} to {v}",
            "update {s} {i} {f} to {v}",
            "{s} {i} : {f} = {v}",
            "make {f} of {s} {i} {v}",
        ),
        "validation": ("change {f} of {s} {i} to {v}", "put {v} into {f} of {s} {i}"),
        "test": ("the {f} of {s} {i} must be {v}", "change {s} {i} : {f} = {v}"),
    },
    "mark": {
        "train": ("mark {s} {i} as {v}", "make {s} {i} {v}", "set {s} {i} to {v}"),
        "validation": ("turn {s} {i} {v}", "put {s} {i} on {v}"),
        "test": ("{s} {i} must be {v}", "{s} {i} should be {v}"),
    },
    "create": {
        "train": (
            "create {s} with {f} {x} and {g} {y}",
            "start a {s} entry with {f} {x} and {g} {y}",
            "create {s} : {f} = {x} , {g} = {y}",
        ),
        "validation": ("create a {s} entry with {f} {x} and {g} {y}", "start {s} : {f} {x} and {g} {y}"),
        "test": ("add a {s} entry with {f} {x} and {g} {y}", "record a {s} entry : {f} {x} , {g} {y}"),
    },
    "search": {
        "train": (
            "set {g} of the {s} with {f} {x} to {v}",
            "find the {s} whose {f} is {x} and make its {g} {v}",
            "update the {s} with {f} {x} : {g} = {v}",
        ),
        "validation": ("change {g} of the {s} whose {f} is {x} to {v}", "put {v} into {g} of the {s} with {f} {x}"),
        "test": ("the {g} of the {s} where {f} is {x} must be {v}", "look up the {s} with {f} {x} and set {g} to {v}"),
    },
    "cross": {
        "train": (
            "set {g} of the {c} of {s} {i} to {v}",
            "the {c} behind {s} {i} should have {g} {v}",
            "update the {c} of {s} {i} : {g} = {v}",
        ),
        "validation": ("change {g} of the {c} of {s} {i} to {v}", "put {v} into {g} of the {c} behind {s} {i}"),
        "test": ("the {g} of the {c} of {s} {i} must be {v}", "make {v} the {g} of the {c} on {s} {i}"),
    },
    "report": {
        "train": (
            "write {f} of {s} {i} to file {p}",
            "save the {f} of {s} {i} to {p}",
            "note {f} of {s} {i} in {p}",
        ),
        "validation": ("store {f} of {s} {i} in file {p}", "write the {f} of {s} {i} into file {p}"),
        "test": ("put {f} of {s} {i} into file {p}", "file {p} must have the {f} of {s} {i}"),
    },
    "memo": {
        "train": (
            "set {f} of the {s} in file {p} to {v}",
            "the {s} named in {p} should have {f} {v}",
            "update {s} from file {p} : {f} = {v}",
        ),
        "validation": ("change {f} of the {s} named in file {p} to {v}", "put {v} into {f} of the {s} from {p}"),
        "test": ("the {f} of the {s} in file {p} must be {v}", "make {v} the {f} of the {s} named in {p}"),
    },
    "cond": {
        "train": (
            "if {f} of {s} {i} is {a} then set {g} to {v} else {w}",
            "check {s} {i} : when {f} is {a} use {v} for {g} otherwise {w}",
            "set {g} of {s} {i} to {v} if its {f} is {a} else {w}",
        ),
        "validation": (
            "when {f} of {s} {i} is {a} use {v} for {g} otherwise {w}",
            "if {s} {i} has {f} {a} then {g} = {v} otherwise {g} = {w}",
        ),
        "test": (
            "{g} of {s} {i} should be {v} if {f} is {a} otherwise {w}",
            "look up {s} {i} : if {f} is {a} set {g} to {v} else set {g} to {w}",
        ),
    },
    "copy": {
        "train": (
            "copy {f} of {s} {i} to {g} of {s2} {j}",
            "put {f} from {s} {i} into {g} of {s2} {j}",
            "set {g} of {s2} {j} to the {f} of {s} {i}",
        ),
        "validation": (
            "take {f} of {s} {i} and put it in {g} of {s2} {j}",
            "change {g} of {s2} {j} to {f} of {s} {i}",
        ),
        "test": ("copy the {f} of {s} {i} into the {g} of {s2} {j}", "{s2} {j} : {g} = {f} of {s} {i}"),
    },
    "add": {
        "train": ("add {n} to {f} of {s} {i}", "bump {f} of {s} {i} by {n}", "raise the {f} of {s} {i} by {n}"),
        "validation": ("raise {f} of {s} {i} by {n}", "for {s} {i} raise {f} by {n}"),
        "test": ("add {n} to the {f} of {s} {i}", "on {s} {i} add {n} to {f}"),
    },
    "chain": {
        "train": (
            "set {g} of the {c} of the {c2} of {s} {i} to {v}",
            "the {c} of the {c2} behind {s} {i} needs {g} {v}",
            "update the {c} of the {c2} of {s} {i} : {g} = {v}",
        ),
        "validation": (
            "change {g} of the {c} of the {c2} of {s} {i} to {v}",
            "put {v} into {g} of the {c} of the {c2} behind {s} {i}",
        ),
        "test": (
            "the {g} of the {c} of the {c2} of {s} {i} must be {v}",
            "make {v} the {g} of the {c} of the {c2} on {s} {i}",
        ),
    },
    "trace": {
        "train": (
            "set {g} of the {c} of the {s} with {f} {x} to {v}",
            "the {c} behind the {s} whose {f} is {x} should have {g} {v}",
            "update the {c} of the {s} with {f} {x} : {g} = {v}",
        ),
        "validation": (
            "change {g} of the {c} of the {s} with {f} {x} to {v}",
            "put {v} into {g} of the {c} behind the {s} whose {f} is {x}",
        ),
        "test": (
            "the {g} of the {c} of the {s} where {f} is {x} must be {v}",
            "make {v} the {g} of the {c} on the {s} with {f} {x}",
        ),
    },
    "verify": {
        "train": (
            "set {f} of {s} {i} to {v} and check it",
            "update {s} {i} {f} to {v} then check it",
            "make {f} of {s} {i} {v} and check it",
        ),
        "validation": ("change {f} of {s} {i} to {v} and verify", "put {v} into {f} of {s} {i} and check it"),
        "test": ("change {s} {i} : {f} = {v} and check it", "the {f} of {s} {i} must be {v} , then look it up again"),
    },
}
"""Goal kind -> split -> wordings. Slots: {s} {s2} services, {i} {j} ids, {f} {g} fields, {c} {c2} reference fields,
{v} {w} {x} {y} {a} values, {n} an operand, {p} a file name."""
