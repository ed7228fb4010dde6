"""Resolves a composition into its manifest: every default written out, every part known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from pydantic import ValidationError

from occamy import __version__
from occamy.contracts.record import Record
from occamy.harness.parts import CHAIN, Composition, Prompt, ReactLoop, Tools

_BRIEF = "work"
_SECTIONS: dict[str, type[Record]] = {"loop": ReactLoop, "prompt": Prompt, "tools": Tools}


class CompositionError(ValueError):
    """A composition that cannot be resolved: names the file, the part or key, and the nearest known name."""


class CompositionManifest(Record):
    """What runs, in full. Written before the rollout; its digest stands in every episode record."""

    composition: Composition
    """All parts with all their settings."""
    system: str
    """Text of the system message, "" for none."""
    code_version: str
    """Version of this package, which holds the parts' code."""


def resolve(data: Any, where: str = "composition") -> CompositionManifest:
    """Resolve a composition given as plain data. `where` names its origin in errors.

    Raises CompositionError for an unknown part, key or value, naming the nearest known one.
    """
    _check_keys(data, Composition.model_fields, where)
    for section, model in _SECTIONS.items():
        if section in data:
            _check_keys(data[section], model.model_fields, f"{where}: {section}")
    _check_middleware(data.get("middleware", ()), where)
    try:
        composition = Composition.model_validate(data)
    except ValidationError as e:
        raise CompositionError("; ".join(_sentence(x, where) for x in e.errors())) from e
    _check_chain(composition, where)
    return CompositionManifest(composition=composition, system=_system(composition, where), code_version=__version__)


def _check_keys(data: Any, known: Iterable[str], where: str) -> None:
    if not isinstance(data, Mapping):
        raise CompositionError(f"{where}: expected a mapping, found {type(data).__name__}")
    for key in data:
        if key not in known:
            raise CompositionError(f"{where}: unknown key {key!r}{nearest(str(key), known)}")


def _check_middleware(parts: Any, where: str) -> None:
    kinds = {str(model.model_fields["kind"].default): model for model in CHAIN}
    if not isinstance(parts, (list, tuple)):
        raise CompositionError(f"{where}: middleware must be a list, found {type(parts).__name__}")
    for number, part in enumerate(parts):
        place = f"{where}: middleware[{number}]"
        if not isinstance(part, Mapping) or "kind" not in part:
            raise CompositionError(f"{place}: has no kind; give one of {sorted(kinds)}")
        if part["kind"] not in kinds:
            raise CompositionError(f"{place}: unknown part {part['kind']!r}{nearest(str(part['kind']), kinds)}")
        _check_keys(part, kinds[part["kind"]].model_fields, f"{place} ({part['kind']})")


def _check_chain(composition: Composition, where: str) -> None:
    ranks = [CHAIN.index(type(m)) for m in composition.middleware]
    if ranks != sorted(set(ranks)):
        order = ", ".join(str(model.model_fields["kind"].default) for model in CHAIN)
        raise CompositionError(f"{where}: middleware must appear at most once each, outermost first: {order}")


def _system(composition: Composition, where: str) -> str:
    packs = {p.name.removesuffix(".md"): p for p in _folder("skills") if p.name.endswith(".md")}
    texts = [_BRIEF] if composition.prompt.layout == "briefed" else []
    for skill in composition.skills:
        if skill not in packs:
            raise CompositionError(f"{where}: unknown skill pack {skill!r}{nearest(skill, packs)}")
        if not texts:
            raise CompositionError(f"{where}: skills need a system message; set prompt.layout to briefed")
        texts.append(packs[skill].read_text().strip())
    return "\n".join(texts)


def _folder(name: str) -> list[Any]:
    return list(resources.files("occamy.harness").joinpath(name).iterdir())


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error sentence: the known name that is closest, or all of them."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def _sentence(error: Any, where: str) -> str:
    place = ".".join(str(x) for x in error["loc"])
    return f"{where}: {place}: {error['msg']} (got {error.get('input')!r})"
