"""Components carry no logic: short, typed, and each body imports the library only."""

import ast
from pathlib import Path

import pytest
from kfp import dsl

import components
from components.synthesis import synthesis
from occamy.recipe import load_recipe
from occamy.storage.rundir import RunDirectory

FILES = sorted(p for p in Path(components.__file__).parent.glob("*.py") if p.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_is_short_and_only_calls_the_library(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    tree = ast.parse(text)
    body = next(n for n in tree.body if isinstance(n, ast.FunctionDef))
    assert body.name == path.stem
    imported = [n.module for n in ast.walk(body) if isinstance(n, ast.ImportFrom)]
    assert imported
    assert all(str(module).startswith("occamy.stages") for module in imported)
    assert not [n for n in ast.walk(body) if isinstance(n, ast.While | ast.If | ast.Try)] or path.stem == "evaluation"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_runs_in_an_image_that_holds_everything(path: Path) -> None:
    component = getattr(__import__(f"components.{path.stem}", fromlist=[path.stem]), path.stem)
    container = component.component_spec.implementation.container
    assert container.image == components.IMAGE
    assert "python" in container.image  # kfp.local warns about images without it
    assert "pip install" not in " ".join(container.command)


def test_synthesis_publishes_location_and_digest(tmp_path: Path) -> None:
    counts = "{long: 2, short: 2}"
    sets = [f"synthesis.train={counts}", f"synthesis.test={counts}", "synthesis.validation={long: 0, short: 0}"]
    recipe = load_recipe("ci", [*sets, "evaluation.tasks=2"])
    RunDirectory(tmp_path).open(recipe, recipe.name, recipe.digest(), recipe.seed)
    tasks = dsl.Dataset(name="tasks", uri=str(tmp_path / "elsewhere"))

    digest = synthesis.python_func(recipe=recipe.model_dump_json(), run_dir=str(tmp_path), code="", tasks=tasks)

    assert tasks.uri == str(tmp_path / "stages" / "synthesis")
    assert tasks.metadata["digest"] == digest
    assert tasks.metadata["raw"] == 8
    again = dsl.Dataset(name="tasks", uri="")
    assert synthesis.python_func(recipe=recipe.model_dump_json(), run_dir=str(tmp_path), code="", tasks=again) == digest
