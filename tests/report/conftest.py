"""A complete run directory and its report, made once."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from occamy.report.build import write_report
from occamy.report.inputs import ReportInputs, collect


@pytest.fixture(scope="session")
def made_run() -> ModuleType:
    """The module that fills run directories."""
    spec = spec_from_file_location("made_run", Path(__file__).parent / "made_run.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def gather(made_run: ModuleType) -> Callable[..., ReportInputs]:
    """Make a run directory and collect what a report needs from it."""

    def build(folder: Path, upto: str = "promotion", state: str = "SUCCEEDED") -> ReportInputs:
        run = made_run.make_run(folder, upto=upto)
        return collect(run.path, state=state, base=made_run.base_folder(run), mlflow="occamy ui")

    return build


@pytest.fixture(scope="session")
def whole(gather: Callable[..., ReportInputs], tmp_path_factory: pytest.TempPathFactory) -> ReportInputs:
    """Inputs of a finished run. Do not change its folder."""
    return gather(tmp_path_factory.mktemp("runs") / "autumn")


@pytest.fixture(scope="session")
def page(whole: ReportInputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the finished run."""
    return write_report(whole, tmp_path_factory.mktemp("report") / "report.html")
