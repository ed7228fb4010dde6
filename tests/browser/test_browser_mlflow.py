"""MLflow's own UI shows all six candidates side by side, also under a filter (nested runs would vanish there)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from occamy.tracking.experiment import Experiment

SIX = ("base", "marathon-sft", "marathon", "sprint", "soup", "sao")


def seen(browser: Any, wanted: tuple[str, ...], seconds: float = 60) -> set[str]:
    """Which of the wanted names stand on the page as whole texts, waiting until all do."""
    deadline, found = time.monotonic() + seconds, set[str]()
    while found != set(wanted) and time.monotonic() < deadline:
        lines = browser.execute_script("return document.body.innerText").splitlines()
        found = {line.strip() for line in lines} & set(wanted)
        time.sleep(0.3)
    return found


@pytest.mark.parametrize("condition", ["", "metrics.`mixed.success` > 0.1", "tags.`occamy.kind` = 'candidate'"])
def test_all_six_stand_in_the_runs_table(
    browse: Any, mlflow_ui: str, tracked: Experiment, condition: str, tmp_path: Path
) -> None:
    browser = browse(1600, 1000)
    browser.get(f"{mlflow_ui}/#/experiments/{tracked.experiment_id}/runs?searchFilter={quote(condition)}")
    assert seen(browser, SIX) == set(SIX)
    assert browser.save_screenshot(str(tmp_path / "mlflow.png"))
