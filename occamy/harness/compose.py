"""Resolves a composition into its manifest: every default written out, every part known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from pydantic import ValidationError

from occamy import __version__
from occamy.contracts.record import Record
from occamy.harness.parts import CHAIN, LOOPS, Budgets, Composition, Prompt, Subagents, Tools

_SECTIONS: dict[str, type[Record]] = {"prompt": Prompt, "tools": Tools}
_BARE = "plain"  # the layout without a system message
_SKILLS = "{skills}"  # where a layout takes the skill packs


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
    if "loop" in data:
        _check_part(data["loop"], LOOPS, f"{where}: loop")
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
    if not isinstance(parts, (list, tuple)):
        raise CompositionError(f"{where}: middleware must be a list, found {type(parts).__name__}")
    for number, part in enumerate(parts):
        _check_part(part, CHAIN, f"{where}: middleware[{number}]")


def _check_part(part: Any, models: Sequence[type[Record]], place: str) -> None:
    kinds = {_kind(model): model for model in models}
    if not isinstance(part, Mapping) or "kind" not in part:
        raise CompositionError(f"{place}: has no kind; give one of {sorted(kinds)}")
    if not isinstance(part["kind"], str) or part["kind"] not in kinds:
        raise CompositionError(f"{place}: unknown part {part['kind']!r}{nearest(str(part['kind']), kinds)}")
    _check_keys(part, kinds[part["kind"]].model_fields, f"{place} ({part['kind']})")


def _check_chain(composition: Composition, where: str) -> None:
    ranks = [CHAIN.index(type(m)) for m in composition.middleware]
    if ranks != sorted(set(ranks)):
        order = ", ".join(_kind(model) for model in CHAIN)
        raise CompositionError(f"{where}: middleware must appear at most once each, outermost first: {order}")
    if CHAIN.index(Subagents) in ranks and CHAIN.index(Budgets) not in ranks:
        raise CompositionError(f"{where}: subagents are lent their parent's budgets; add the part budgets")


def _kind(model: type[Record]) -> str:
    return str(model.model_fields["kind"].default)


def _system(composition: Composition, where: str) -> str:
    packs, layouts = _texts("skills"), _texts("layouts")
    layout = composition.prompt.layout
    for skill in composition.skills:
        if skill not in packs:
            raise CompositionError(f"{where}: unknown skill pack {skill!r}{nearest(skill, packs)}")
    if layout == _BARE:
        if composition.skills:
            raise CompositionError(f"{where}: skills need a system message; set prompt.layout to {min(layouts)}")
        return ""
    if layout not in layouts:
        raise CompositionError(f"{where}: prompt.layout: unknown {layout!r}{nearest(layout, [_BARE, *layouts])}")
    return layouts[layout].replace(_SKILLS, "\n".join(packs[skill].strip() for skill in composition.skills)).strip()


def _texts(folder: str) -> dict[str, str]:
    """Texts shipped in a folder of this room, by name."""
    files = resources.files("occamy.harness").joinpath(folder).iterdir()
    return {p.name.removesuffix(".md"): p.read_text() for p in files if p.name.endswith(".md")}


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error sentence: the known name that is closest, or all of them."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def _sentence(error: Any, where: str) -> str:
    place = ".".join(str(x) for x in error["loc"])
    return f"{where}: {place}: {error['msg']} (got {error.get('input')!r})"
