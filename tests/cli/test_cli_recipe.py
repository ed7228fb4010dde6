"""Recipes: profiles, overrides, refusals with the nearest known key, combinations that cannot work."""

import json
from pathlib import Path

import pytest

from occamy.recipe import Recipe, RecipeError, load_recipe, profile_names, recipe_from_json
from occamy.sandboxes.config import Limits, LocalSandboxConfig
from occamy.sandboxes.kubernetes.config import POD_LIMITS, KubernetesSandboxConfig

PODS = "rollout.sandbox.backend=kubernetes"


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_load(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe_from_json(recipe.model_dump_json()) == recipe


def test_override_reaches_a_nested_key_and_changes_the_digest() -> None:
    plain = load_recipe("laptop")
    other = plain.sao.gate.high + 1.0  # whatever the profile says
    changed = load_recipe("laptop", [f"sao.gate.high={other}"])
    assert changed.sao.gate.high == other
    assert changed.sao.gate.low == plain.sao.gate.low
    assert changed.digest() != plain.digest()


def test_name_and_disk_do_not_change_the_digest() -> None:
    assert load_recipe("laptop", ["name=other", "disk_gib=9"]).digest() == load_recipe("laptop").digest()


def test_seed_option_wins_over_the_profile() -> None:
    assert load_recipe("laptop", ["seed=3"], seed=7).seed == 7


def test_a_resolved_recipe_is_a_recipe_text() -> None:
    recipe = load_recipe("ci", ["hdpo.steps=2"])
    assert load_recipe(recipe.model_dump_json()) == recipe
    assert load_recipe(json.dumps(recipe.model_dump(mode="json"), indent=2)) == recipe


def test_file_extends_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: ci\nname: mine\nhdpo: {steps: 7}\n")
    mine, ci = load_recipe(str(path)), load_recipe("ci")
    assert (mine.name, mine.hdpo.steps) == ("mine", 7)
    assert mine.hdpo.group == ci.hdpo.group


@pytest.mark.parametrize(
    ("source", "overrides", "words"),
    [
        ("labtop", [], ["no profile 'labtop'", "did you mean 'laptop'", "known: ci, laptop"]),
        ("missing.yaml", [], ["missing.yaml", "no such recipe file"]),
        ("name: [", [], ["not YAML"]),
        ("- a\n- b", [], ["holds list", "mapping"]),
        ("laptop", ["sao.stpes=3"], ["unknown key 'sao.stpes'", "did you mean 'sao.steps'"]),
        ("laptop", ["stpes=3"], ["unknown key 'stpes'", "steps'"]),
        ("laptop", ["hdpo.optimiser.lrr=1"], ["unknown key 'hdpo.optimiser.lrr'", "'hdpo.optimiser.lr'"]),
        ("laptop", ["hdpo.steps"], ["--set 'hdpo.steps'", "expected key=value"]),
        ("laptop", ["seed={a: b"], ["--set 'seed={a: b'", "not YAML"]),
        ("laptop", ["seed=2026-13-45"], ["--set 'seed=2026-13-45'", "month must be in 1..12"]),
        ("laptop", ["rollout.servers={proxy_port: 8100, tools_port: 8100}"], ["both 8100", "needs its own"]),
        ("laptop", ["seed.x=1", "seed=2"], ["seed"]),
        ("laptop", ["name.x=1"], ["'name' is a value"]),
        ("laptop", ["hdpo.group=1"], ["hdpo.group", "greater than or equal to 2", "got 1"]),
        ("laptop", ["hdpo.w_eff=much"], ["hdpo.w_eff", "got 'much'"]),
        ("laptop", ["rollout.temperature=0.5"], ["rollout.temperature 0.5", "hdpo", "set 1.0"]),
        ("laptop", ["evaluation.tasks=9999"], ["evaluation.tasks 9999", "synthesis.test.long"]),
        ("laptop", ["demonstrations.pool=long"], ["demonstrations.pool is 'long'", "leave it out"]),
        ("laptop", ["demonstrations.rollout.temperature=0"], ["demonstrations.rollout is set", "set rollout"]),
        ("laptop", ["merging.weights=[0.2, 0.3, 0.5]"], ["merging.weights has 3 values", "2 experts"]),
        ("laptop", ["rollout.harness=raect"], ["rollout.harness", "did you mean 'react'"]),
        ("laptop", ["rollout.context_limit=128"], ["compacts at 224", "rollout.context_limit 128"]),
        ("laptop", ["sprint.max_length=512"], ["sprint.max_length 512", "raise it"]),
        ("laptop", ["synthesis.train.short=0"], ["sao.mix draws from pool 'short'"]),
        ("laptop", ["hdpo.pack_tokens=100"], ["hdpo.pack_tokens 100", "raise it"]),
        ("laptop", [PODS], ["rollout.sandbox.namespace: Field required"]),
        ("laptop", [PODS, "rollout.sandbox.namespac=x"], ["unknown key", "did you mean 'rollout.sandbox.namespace'"]),
        ("laptop", [PODS, "rollout.sandbox.network=none"], ["'rollout.sandbox.network' for this rollout.sandbox.back"]),
        ("laptop", ["rollout.sandbox.namespace=x"], ["'rollout.sandbox.namespace' for this rollout.sandbox.backend"]),
        ("laptop", ["rollout.sandbox.backend=docker"], ["rollout.sandbox: ", "'docker'", "'local', 'kubernetes'"]),
        ("laptop", ["rollout.servers.host=0.0.0.0"], ["rollout.servers.host: '0.0.0.0' is no IPv4 address"]),
        ("laptop", ["rollout.servers.host=pod"], ["rollout.servers.host", "'pod'"]),
        ("laptop", ["rollout.hold_seconds=.inf"], ["rollout.hold_seconds: Input should be a finite number, got inf"]),
    ],
)
def test_refuses_with_value_and_fix(source: str, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(source, overrides)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_a_recipe_chooses_where_agents_act() -> None:
    pods = load_recipe("laptop", ["rollout.sandbox.namespace=x", PODS, "rollout.sandbox.limits.processes=7"])
    sandbox = KubernetesSandboxConfig(namespace="x", limits=POD_LIMITS.model_copy(update={"processes": 7}))
    assert pods.rollout.sandbox == sandbox
    assert recipe_from_json(pods.model_dump_json()) == pods
    section = "rollout: {sandbox: {minimum_isolation: gvisor, namespace: x, backend: kubernetes}}"
    below = load_recipe(f"extends: laptop\nname: mine\n{section}\n").rollout.sandbox
    assert (below.backend, below.minimum_isolation) == ("kubernetes", "gvisor")
    here = load_recipe("laptop", ["rollout.sandbox.limits.processes=7"]).rollout.sandbox
    assert here == LocalSandboxConfig(limits=Limits(processes=7))


def test_a_file_may_change_the_backend_of_the_one_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "pods.yaml").write_text(
        "extends: laptop\nname: pods\nrollout: {sandbox: {backend: kubernetes, namespace: x, pool: p}}\n"
    )
    more = load_recipe(f"extends: {tmp_path}/pods.yaml\nname: a\nrollout: {{sandbox: {{pool: q}}}}\n")
    assert more.rollout.sandbox == KubernetesSandboxConfig(namespace="x", pool="q")
    back = load_recipe(f"extends: {tmp_path}/pods.yaml\nname: b\nrollout: {{sandbox: {{backend: local}}}}\n")
    assert back.rollout.sandbox == LocalSandboxConfig()


def test_all_conflicts_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("laptop", ["rollout.temperature=0.5", "evaluation.tasks=9999", "demonstrations.pool=long"])
    for word in ("rollout.temperature", "evaluation.tasks", "demonstrations.pool"):
        assert word in str(error.value)


def test_every_key_says_what_it_is() -> None:
    import inspect

    from occamy import recipe

    source = inspect.getsource(recipe.Recipe)
    for name in Recipe.model_fields:
        after = source.split(f"\n    {name}: ")[1].splitlines()[1].strip()
        assert after.startswith('"""'), f"{name} has no docstring under it"
