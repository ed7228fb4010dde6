"""A broad grammar of work requests for pretraining: a goal is a clause about a target, said in many ways.

The grammar is generic on purpose: it runs over random services, fields and values, never over the task mix.
"""

from __future__ import annotations

from random import Random

_SET = (
    "set {f} of {t} to {v}",
    "change {f} of {t} to {v}",
    "update {f} of {t} to {v}",
    "make {f} of {t} {v}",
    "turn {f} of {t} to {v}",
    "put {v} into {f} of {t}",
    "put {v} in {f} of {t}",
    "give {t} {f} {v}",
    "make {v} the {f} of {t}",
    "set {t} {f} to {v}",
    "set {t} : {f} = {v}",
    "change {t} : {f} = {v}",
    "update {t} : {f} = {v}",
    "update {t} {f} to {v}",
    "{t} : {f} = {v}",
    "{t} : {f} > {v}",
    "for {t} set {f} to {v}",
    "for {t} use {v} as {f}",
    "on {t} change {f} to {v}",
    "the {f} of {t} must be {v}",
    "the {f} of {t} should be {v}",
    "{f} of {t} should be {v}",
    "{f} of {t} must be {v}",
    "{t} should have {f} {v}",
    "{t} must have {f} {v}",
    "{t} needs {f} {v}",
    "mark {f} of {t} as {v}",
    "mark {t} as {f} {v}",
    "record {v} as {f} of {t}",
    "store {v} as the {f} of {t}",
    "move {f} of {t} to {v}",
    "take {t} and set {f} to {v}",
)
_SET_UNNAMED = (
    "mark {t} as {v}",
    "make {t} {v}",
    "turn {t} {v}",
    "set {t} to {v}",
    "{t} must be {v}",
    "put {t} on {v}",
)
"""The field is not said: used only where one enum field of the service could hold the value."""
_ADD = (
    "add {n} to {f} of {t}",
    "add {n} to the {f} of {t}",
    "raise {f} of {t} by {n}",
    "raise the {f} of {t} by {n}",
    "bump {f} of {t} by {n}",
    "{t} : {f} + {n}",
    "change {f} of {t} by {n}",
    "put {n} onto {f} of {t}",
    "for {t} raise {f} by {n}",
    "on {t} add {n} to {f}",
    "update {t} : add {n} to {f}",
    "{f} of {t} needs {n} on it",
)
_COND = (
    "if {g} of {t} is {a} then {x} else {y}",
    "if {g} of {t} is {a} {x} else {y}",
    "if {t} has {g} {a} then {x} otherwise {y}",
    "check {t} : when {g} is {a} {x} otherwise {y}",
    "check {g} of {t} : if {a} then {x} else {y}",
    "look up {t} : if {g} is {a} {x} else {y}",
    "when {g} of {t} is {a} {x} otherwise {y}",
    "{x} if {g} of {t} is {a} else {y}",
    "{t} : {g} = {a} ? {x} : {y}",
    "for {t} : if {g} is {a} then {x} else {y}",
    "take {t} : if its {g} is {a} {x} otherwise {y}",
)
_COND_VALUE = ("set {f} to {v}", "{f} = {v}", "use {v} for {f}", "make {f} {v}", "put {v} in {f}", "change {f} to {v}")
_CREATE = (
    "create {s} with {f} {x} and {g} {y}",
    "create a {s} entry with {f} {x} and {g} {y}",
    "create {s} : {f} = {x} , {g} = {y}",
    "add a {s} entry with {f} {x} and {g} {y}",
    "add new {s} : {f} {x} , {g} {y}",
    "start a {s} entry with {f} {x} and {g} {y}",
    "start {s} : {f} {x} and {g} {y}",
    "make a new {s} with {f} {x} and {g} {y}",
    "new {s} : {f} = {x} and {g} = {y}",
    "record a {s} entry : {f} {x} , {g} {y}",
    "put a new {s} with {f} {x} and {g} {y} on record",
)
_REPORT = (
    "write {f} of {t} to file {p}",
    "write the {f} of {t} into file {p}",
    "save {f} of {t} in file {p}",
    "save the {f} of {t} to {p}",
    "store {f} of {t} in file {p}",
    "put {f} of {t} into file {p}",
    "note {f} of {t} in {p}",
    "note the {f} of {t} in file {p}",
    "copy {f} of {t} to file {p}",
    "report {f} of {t} in file {p}",
    "file {p} must have the {f} of {t}",
    "look up {f} of {t} and write it to {p}",
)
_REFERRED = (
    "the {c} of {t}",
    "{c} of {t}",
    "the {c} behind {t}",
    "the {c} on {t}",
    "the {c} which {t} has",
    "the {c} named on {t}",
)
_FOUND = (
    "the {s} with {f} {x}",
    "the {s} whose {f} is {x}",
    "the {s} where {f} is {x}",
    "{s} with {f} {x}",
    "the {s} which has {f} {x}",
    "the {s} that has {f} {x}",
    "{s} whose {f} is {x}",
    "the {s} with {f} = {x}",
)
_NAMED = (
    "the {s} in file {p}",
    "the {s} named in {p}",
    "the {s} named in file {p}",
    "{s} from file {p}",
    "the {s} from {p}",
    "the {s} that file {p} has",
)
_DIRECT = ("{s} {i}", "{s} {i}", "{s} {i}", "the {s} {i}", "{s} entry {i}", "{s} id {i}")
_CHECKED = (
    "{c} and check it",
    "{c} then check it",
    "{c} and verify",
    "{c} , then look it up again",
    "{c} and look at it after",
)
_FIND_FIRST = ("find {t} and {c}", "look up {t} and {c}", "find {t} : {c}", "get {t} , {c}")


def direct(r: Random, service: str, id_: str) -> str:
    """Say a record by its id."""
    return r.choice(_DIRECT).format(s=service, i=id_)


def referred(r: Random, column: str, target: str) -> str:
    """Say the record that a reference field of `target` points to."""
    return r.choice(_REFERRED).format(c=column, t=target)


def found(r: Random, service: str, field: str, value: str) -> str:
    """Say a record by the value of one field."""
    return r.choice(_FOUND).format(s=service, f=field, x=value)


def named(r: Random, service: str, path: str) -> str:
    """Say a record whose id stands in a workspace file."""
    return r.choice(_NAMED).format(s=service, p=path)


def assign(r: Random, target: str, field: str, value: str, *, may_omit_field: bool = False) -> str:
    """Ask for one field of a target to get a value."""
    if may_omit_field and r.random() < 0.3:
        return r.choice(_SET_UNNAMED).format(t=target, v=value)
    if r.random() < 0.08:
        return r.choice(_FIND_FIRST).format(
            t=target, c=r.choice(("set {f} to {v}", "make its {f} {v}")).format(f=field, v=value)
        )
    return r.choice(_SET).format(f=field, t=target, v=value)


def add(r: Random, target: str, field: str, amount: int) -> str:
    """Ask for a field to grow by an amount."""
    return r.choice(_ADD).format(f=field, t=target, n=amount)


def conditional(r: Random, target: str, tested: str, value: str, field: str, yes: str, no: str) -> str:
    """Ask for one of two values, by the value of another field."""
    if r.random() < 0.3:
        form = r.choice(("{v}", "use {v}"))
        x, y = form.format(v=yes), form.format(v=no)
        head = r.choice(
            (
                "set {f} of {t} to {x} if its {g} is {a} else {y}",
                "{f} of {t} should be {x} if {g} is {a} otherwise {y}",
                "if {g} of {t} is {a} then set {f} to {x} else {y}",
                "when {g} of {t} is {a} use {x} for {f} otherwise {y}",
                "check {t} : when {g} is {a} use {x} for {f} otherwise {y}",
            )
        )
        return head.format(f=field, t=target, x=yes, y=no, g=tested, a=value)
    form = r.choice(_COND_VALUE)
    x, y = form.format(f=field, v=yes), form.format(f=field, v=no)
    return r.choice(_COND).format(g=tested, t=target, a=value, x=x, y=y)


def create(r: Random, service: str, first: tuple[str, str], second: tuple[str, str]) -> str:
    """Ask for a new record with two fields."""
    return r.choice(_CREATE).format(s=service, f=first[0], x=first[1], g=second[0], y=second[1])


def report(r: Random, target: str, field: str, path: str) -> str:
    """Ask for a field's value to be written to a file."""
    return r.choice(_REPORT).format(f=field, t=target, p=path)


def checked(r: Random, clause: str) -> str:
    """Ask for a look at the result after the change."""
    return r.choice(_CHECKED).format(c=clause)
