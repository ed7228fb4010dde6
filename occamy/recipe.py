"""The one typed run configuration: profiles in YAML, overrides, and checks that no single room can make."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from occamy.admission.config import AdmissionConfig
from occamy.contracts.record import Record, digest
from occamy.evaluation.config import EvaluationConfig
from occamy.harness.assignment import Harness
from occamy.harness.compose import CompositionError, CompositionManifest
from occamy.harness.loading import load as load_harness
from occamy.harness.parts import Compaction
from occamy.merging.config import MergingConfig
from occamy.rollout.config import DemonstrationConfig, RolloutConfig
from occamy.synthesis.config import SynthesisConfig
from occamy.tracking.config import PromotionConfig
from occamy.training.config import SFTConfig
from occamy.training.rl_config import HdpoConfig, RlConfig, SaoConfig


class RecipeError(ValueError):
    """A recipe cannot be used: names the key, the value and the fix."""


class Recipe(Record):
    """Everything that shapes a run. Sections belong to the rooms that read them."""

    name: str
    """Name of the recipe, shown in reports."""
    family: str = "occamy"
    """Model family: the MLflow experiment and the registered model of the run."""
    seed: int = Field(default=1, ge=0)
    """Seed of everything random in the run."""
    base: str = "nano"
    """The checkpoint that everything starts from: ``nano`` (shipped with the package) or a checkpoint folder."""
    disk_gib: float = Field(default=2.0, gt=0)
    """Free disk that preflight asks for, GiB (our choice; a laptop run takes less)."""
    synthesis: SynthesisConfig = SynthesisConfig()
    """How many tasks are written, and of what kinds."""
    admission: AdmissionConfig = AdmissionConfig()
    """How the gates run."""
    rollout: RolloutConfig = RolloutConfig()
    """How episodes are run, in demonstrations, reinforcement learning and evaluation alike."""
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    """What is demonstrated. Harness and limits come from `rollout`."""
    marathon_sft: SFTConfig = SFTConfig()
    """Behaviour initialisation of the long-horizon expert."""
    hdpo: HdpoConfig = HdpoConfig()
    """Reinforcement learning of the long-horizon expert."""
    sprint: SFTConfig = SFTConfig()
    """Fine-tuning of the short-horizon expert."""
    merging: MergingConfig = MergingConfig()
    """How the two experts become one checkpoint."""
    sao: SaoConfig = SaoConfig()
    """The final reinforcement learning."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How candidates are compared."""
    promotion: PromotionConfig = PromotionConfig()
    """When the final checkpoint becomes the champion."""

    def digest(self) -> str:
        """Digest over everything but name and disk: equal digests make equal runs."""
        return digest(self.model_dump(mode="json", exclude={"name", "disk_gib"}))

    def harness(self) -> Harness:
        """The composition that `rollout.harness` names. Raises CompositionError."""
        return load_harness(self.rollout.harness)

    @model_validator(mode="after")
    def _works_together(self) -> Recipe:
        problems = list(_conflicts(self))
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _conflicts(r: Recipe) -> Iterator[str]:
    """What no single room can see: combinations that would fail later, or silently do something else."""
    if r.demonstrations.rollout != RolloutConfig():
        yield "demonstrations.rollout is set; set rollout, which demonstrations share"
    if r.demonstrations.pool is not None:
        yield f"demonstrations.pool is {r.demonstrations.pool!r}, but two experts need both pools; leave it out"
    try:
        manifest = r.harness().manifest
        chain = manifest.composition.middleware if isinstance(manifest, CompositionManifest) else ()
        budgets = [m.budget_tokens for m in chain if isinstance(m, Compaction)]
    except CompositionError as e:
        yield f"rollout.harness: {e}"
        budgets = []
    for budget in budgets:
        if budget > r.rollout.context_limit:
            yield (
                f"harness {r.rollout.harness!r} compacts at {budget} tokens, above rollout.context_limit "
                f"{r.rollout.context_limit}; raise the limit or lower the budget"
            )
    for name, rl in (("hdpo", r.hdpo), ("sao", r.sao)):
        yield from _rl_conflicts(r, name, rl)
    for name, sft in (("marathon_sft", r.marathon_sft), ("sprint", r.sprint)):
        if sft.max_length < r.rollout.context_limit:
            yield (
                f"{name}.max_length {sft.max_length} is below rollout.context_limit {r.rollout.context_limit}: "
                "demonstrations between them would be dropped; raise it"
            )
    for pool in r.evaluation.pools:
        if (authored := getattr(r.synthesis.test, pool)) < r.evaluation.tasks:
            yield (
                f"evaluation.tasks {r.evaluation.tasks} is more than the {authored} of synthesis.test.{pool}; author "
                "more or evaluate on fewer"
            )
    if r.merging.weights is not None and len(r.merging.weights) != 2:
        yield f"merging.weights has {len(r.merging.weights)} values, there are 2 experts: marathon, sprint"


def _rl_conflicts(r: Recipe, name: str, rl: RlConfig) -> Iterator[str]:
    if r.rollout.temperature != 1.0:
        yield (
            f"rollout.temperature {r.rollout.temperature:g}: {name} needs the sampler's own probabilities; set 1.0 "
            "(evaluation has a temperature of its own)"
        )
    for pool in rl.mix:
        if getattr(r.synthesis.train, pool) == 0:
            yield f"{name}.mix draws from pool {pool!r}, synthesis.train.{pool} is 0; author some or drop the pool"
    if rl.pack_tokens < r.rollout.context_limit:
        yield f"{name}.pack_tokens {rl.pack_tokens} is below rollout.context_limit {r.rollout.context_limit}; raise it"


def profile_names() -> list[str]:
    """Names of the shipped profiles."""
    folder = resources.files("occamy") / "profiles"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def rollout_config(overrides: Iterable[str], **options: Any) -> RolloutConfig:
    """The section `rollout` alone: `options` by name, and ``rollout.b=c`` overrides over them.

    Raises RecipeError as `load_recipe` does, and for a key of another section.
    """
    data: dict[str, Any] = {"rollout": dict(options)}
    for text in overrides:
        if not text.startswith("rollout."):
            raise RecipeError(
                f"--set {text!r}: without a recipe there is only rollout, such as rollout.temperature=0.7"
            )
        _override(data, text)
    _refuse_unknown(data, Recipe, "")
    try:
        return RolloutConfig.model_validate(data["rollout"])
    except ValidationError as e:
        raise RecipeError(_explain(e, "rollout")) from e


def load_recipe(source: str, overrides: Iterable[str] = (), seed: int | None = None) -> Recipe:
    """Read a recipe from a profile name, a YAML file's path or YAML text, and apply ``a.b=c`` overrides.

    Raises RecipeError naming the first thing that is wrong: an unknown profile or key (with the nearest known one),
    a value of the wrong type or range, or a combination that cannot work.
    """
    given = _read(source)
    _refuse_unknown(given, Recipe, "")
    data = _merge(_defaults(), given, Recipe)
    for text in overrides:
        _override(data, text)
    if seed is not None:
        data["seed"] = seed
    _refuse_unknown(data, Recipe, "")
    try:
        return Recipe.model_validate(data)
    except ValidationError as e:
        raise RecipeError(_explain(e)) from e


def recipe_from_json(text: str) -> Recipe:
    """Read a recipe that `load_recipe` made and a pipeline passed on as JSON."""
    return Recipe.model_validate_json(text)


def _read(source: str) -> dict[str, Any]:
    """Parse a profile, resolving ``extends: <profile>`` by deep merge."""
    if "\n" in source or ":" in source:
        text, origin = source, "recipe text"
    elif source.endswith((".yaml", ".yml")):
        path = Path(source)
        if not path.is_file():
            raise RecipeError(f"{source}: no such recipe file; give a YAML file or one of {', '.join(profile_names())}")
        text, origin = path.read_text(), source
    elif source in profile_names():
        text, origin = (resources.files("occamy") / "profiles" / f"{source}.yaml").read_text(), f"profile {source}"
    else:
        raise RecipeError(
            f"no profile {source!r}{_nearest(source, profile_names())}; known: {', '.join(profile_names())}"
        )
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise RecipeError(f"{origin}: not YAML: {' '.join(str(e).split())}") from e
    if not isinstance(data, dict):
        raise RecipeError(f"{origin}: holds {type(data).__name__}, expected a mapping of keys such as `name: mine`")
    parent = data.pop("extends", None)
    return _merge(_read(str(parent)), data, Recipe) if parent is not None else data


def _defaults() -> dict[str, Any]:
    """Defaults of all keys that have one, so that naming one key of a section leaves its others as they are."""
    fields = {name: field.default for name, field in Recipe.model_fields.items() if not field.is_required()}
    defaults = Recipe.model_construct(**fields).model_dump(mode="json", exclude={"name"})
    for rollout in (defaults["rollout"], defaults["demonstrations"]["rollout"]):
        del rollout["sandbox"]  # which keys it has depends on its backend
    return defaults


def _merge(below: Mapping[str, Any], above: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Lay `above` over `below`, section by section; any other value, also a mapping such as ``mix``, is replaced."""
    merged = dict(below)
    for key, value in above.items():
        old, field = merged.get(key), model.model_fields.get(key)
        merged[key] = value
        if field is not None and isinstance(old, Mapping) and isinstance(value, Mapping):
            section = _section(field, {**old, **value})
            if section is not None and section is _section(field, old):  # else another backend, with other keys
                merged[key] = _merge(old, value, section)
    return merged


def _override(data: dict[str, Any], text: str) -> None:
    key, found, value = text.partition("=")
    if not found or not key.strip():
        raise RecipeError(f"--set {text!r}: expected key=value, for example sao.steps=10")
    *parents, last = key.strip().split(".")
    node = data
    for part in parents:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise RecipeError(f"--set {text!r}: {part!r} is a value ({child!r}), it has no key {last!r}")
        node = child
    try:
        node[last] = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as e:
        raise RecipeError(f"--set {text!r}: the value is not YAML: {' '.join(str(e).split())}") from e


def _refuse_unknown(data: Mapping[str, Any], model: type[BaseModel], prefix: str) -> None:
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            path, known = prefix + str(key), [path for path, _ in _keys(Recipe, "")]
            why = f" for this {prefix}backend" if path in known else _nearest(path, known)
            raise RecipeError(f"unknown key {path!r}{why}")
        if isinstance(value, Mapping) and (section := _section(field, value)):
            _refuse_unknown(value, section, f"{prefix}{key}.")


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    """All dotted keys of a recipe, sections included, with their field."""
    for key, field in model.model_fields.items():
        yield prefix + key, field
        for section in _sections(field):
            yield from _keys(section, f"{prefix}{key}.")


def _sections(field: FieldInfo) -> list[type[BaseModel]]:
    """The record types that a section may have: none for a plain value, one for each backend where there are some."""
    found: list[Any] = [field.annotation]
    for candidate in found:
        found += get_args(candidate)
    return [t for t in found if isinstance(t, type) and issubclass(t, BaseModel)]


def _section(field: FieldInfo, value: Mapping[str, Any]) -> type[BaseModel] | None:
    """The record type of this value of a section: the first, unless its backend is that of another."""
    sections = _sections(field)
    named = (s for s in sections if "backend" in value and s.model_fields["backend"].default == value["backend"])
    return next(named, sections[0] if sections else None)


def _nearest(key: str, known: Iterable[str]) -> str:
    """`` (did you mean …?)`` by whole key first, then by its last part."""
    known = list(known)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        last = key.rsplit(".", 1)[-1]
        ends = {k.rsplit(".", 1)[-1]: k for k in known}
        close = [ends[m] for m in difflib.get_close_matches(last, list(ends), n=1, cutoff=0.6)]
    return f" (did you mean {close[0]!r}?)" if close else ""


def _explain(error: ValidationError, *section: str) -> str:
    lines = []
    for e in error.errors():
        place = (*section, *e["loc"])
        where = ".".join(str(part) for part, after in zip(place, ("", *place)) if after != "sandbox")  # no backend
        message = e["msg"].removeprefix("Value error, ")
        got = "" if e["type"] == "value_error" else f", got {e['input']!r}"
        lines.append(f"{where}: {message}{got}" if where else message)
    return "; ".join(lines)
