"""A headless Chromium, the report of a made run, and MLflow's UI over six candidate runs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from occamy.contracts.evaluation import EvaluationResult
from occamy.contracts.lineage import read_card
from occamy.evaluation.stage import read_result
from occamy.report.build import write_report
from occamy.report.inputs import collect
from occamy.storage.rundir import RunDirectory
from occamy.tracking.experiment import Experiment, open_experiment
from occamy.tracking.mlflow_runs import log_candidate, log_stage, open_pipeline_run

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    "disable-component-update disable-sync hide-scrollbars"
)
MISSING = "chromium and chromedriver are not installed; on Debian: apt-get install chromium chromium-driver"
SIX = ("base", "marathon-sft", "marathon", "sprint", "soup", "sao")
Browse = Callable[..., "Chrome"]


@pytest.fixture
def browse(tmp_path: Path) -> Iterator[Browse]:
    """Open Chromium at a width in CSS pixels, light or dark. Every browser is closed at the end."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(MISSING)
    from selenium.webdriver import Chrome
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    opened: list[Chrome] = []

    def start(width: int, height: int = 900, dark: bool = False) -> Chrome:
        options = Options()
        options.binary_location = CHROMIUM
        for flag in [*FLAGS.split(), f"user-data-dir={tmp_path / f'profile-{len(opened)}'}"]:
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        browser = Chrome(options=options, service=Service(DRIVER))
        opened.append(browser)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        scheme.append({"name": "prefers-reduced-motion", "value": "reduce"})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        return browser

    yield start
    for browser in opened:
        browser.quit()


@pytest.fixture(scope="session")
def made_run() -> ModuleType:
    """The module that fills run directories, shared with the report's own tests."""
    spec = spec_from_file_location("made_run", Path(__file__).parents[1] / "report" / "made_run.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def run(made_run: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished run."""
    made: RunDirectory = made_run.make_run(tmp_path_factory.mktemp("runs") / "autumn")
    return made


@pytest.fixture(scope="session")
def report(run: RunDirectory, made_run: ModuleType) -> str:
    """Address of its report."""
    inputs = collect(run.path, state="SUCCEEDED", base=made_run.base_folder(run), mlflow="occamy ui autumn")
    return write_report(inputs, run.path / "report.html").as_uri()


@pytest.fixture(scope="session")
def tracked(run: RunDirectory, made_run: ModuleType) -> Experiment:
    """The run in MLflow, as its stages log it: a pipeline run, two stages, six candidates."""
    experiment = open_experiment(run.tracking_uri, "occamy-nano")
    evaluation: EvaluationResult = read_result(run.stage("evaluation"))
    problems = [open_pipeline_run(experiment, "run-1", {"recipe": "laptop"}).problem]
    curves = [{"step": s, "reward": s / 9} for s in range(9)]
    problems += [log_stage(experiment, "run-1", stage, curves=curves).problem for stage in ("marathon", "sao")]
    for name in SIX:
        folder = made_run.base_folder(run) if name == "base" else run.stage(name)
        problems.append(
            log_candidate(experiment, "run-1", read_card(folder), folder.as_uri(), evaluation=evaluation).problem
        )
    assert problems == [""] * 9
    return experiment


@pytest.fixture(scope="session")
def mlflow_ui(tracked: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of MLflow's UI on a free loopback port."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(MISSING)
    pytest.importorskip("mlflow.server", reason="the full mlflow package is not installed (extra: ui)")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", tracked.uri, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    output = tmp_path_factory.mktemp("mlflow-ui") / "log"
    log = output.open("w")
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url + "/health", process, output)
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait()
        log.close()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError(f"MLflow's UI did not answer within {seconds} s:\n{log.read_text()}")
