"""The experiment of a model family, and the rule that a tracking failure is reported but never fails a stage."""

from __future__ import annotations

import functools
import logging
import os
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec

if TYPE_CHECKING:
    from mlflow import MlflowClient

P = ParamSpec("P")
_log = logging.getLogger(__name__)

RUN = "kfp.run_id"
CANDIDATE = "occamy.candidate"
STAGE = "occamy.stage"
KIND = "occamy.kind"
WEIGHTS = "occamy.weights_digest"
PARENT = "mlflow.parentRunId"
"""Tag names. MLflow's UI hides runs that carry PARENT from a filtered comparison, so candidates never do."""

_SQLITE = "sqlite:///"
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Defaults for MLflow (our choice), so that a dead server holds a stage up for a minute or two at most."""


@dataclass(frozen=True)
class Experiment:
    """Where one model family is tracked."""

    uri: str
    family: str
    experiment_id: str

    def client(self) -> MlflowClient:
        """An MLflow client of this experiment's store."""
        return tracking_client(self.uri)


@dataclass(frozen=True)
class Logged:
    """What became of a call to tracking."""

    id: str = ""
    """MLflow run id or model version; empty when nothing was logged."""
    problem: str = ""
    """Why nothing was logged, ready to show; empty when all went well."""


def tracking_client(uri: str) -> MlflowClient:
    """Import MLflow (takes seconds), keep it from reporting usage, and make `uri` the store of this process.

    The registry of an sqlite store looks models up in the process's store, whatever client it is called by.
    Raises OSError when an sqlite file cannot be used, where MLflow itself would try again for minutes.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if uri.startswith(_SQLITE):
        _check_sqlite(uri)
    import mlflow

    mlflow.set_tracking_uri(uri)
    return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def open_experiment(uri: str, family: str, artifacts: str | None = None) -> Experiment:
    """Open the family's experiment, creating the store's schema when it is new.

    Call it once before stages fan out: parallel first writers of an sqlite store crash. Artifacts of an sqlite store
    lie beside its file unless `artifacts` names another URI. Raises what MLflow raises when the store cannot be used.
    """
    if artifacts is None and uri.startswith(_SQLITE):
        file = Path(uri.removeprefix(_SQLITE)).absolute()
        file.parent.mkdir(parents=True, exist_ok=True)
        artifacts = (file.parent / "mlartifacts").as_uri()
    client = tracking_client(uri)
    found = client.get_experiment_by_name(family)
    if found is None:
        return Experiment(uri, family, client.create_experiment(family, artifact_location=artifacts))
    if found.lifecycle_stage != "active":
        client.restore_experiment(found.experiment_id)
    return Experiment(uri, family, found.experiment_id)


def join_experiment(uri: str, family: str) -> tuple[Experiment | None, str]:
    """Like `open_experiment`, for stages: where that raises, return None and the problem, ready to show."""
    try:
        return open_experiment(uri, family), ""
    except Exception as e:
        problem = f"{uri}: {type(e).__name__}: {' '.join(str(e).split())[:300]}"
        _log.warning("not tracked, the stage goes on: %s", problem)
        return None, problem


def reported(
    call: Callable[Concatenate[Experiment, P], str],
) -> Callable[Concatenate[Experiment | None, P], Logged]:
    """Turn any exception of a tracking call into a `Logged.problem` and a warning in the log.

    With None for the experiment (tracking is off, or it could not be opened) nothing is called.
    """

    @functools.wraps(call)
    def wrapper(experiment: Experiment | None, /, *args: P.args, **kwargs: P.kwargs) -> Logged:
        if experiment is None:
            return Logged(problem="tracking is off")
        try:
            return Logged(id=call(experiment, *args, **kwargs))
        except Exception as e:
            problem = f"{call.__name__} on {experiment.uri}: {type(e).__name__}: {' '.join(str(e).split())[:300]}"
            _log.warning("not tracked, the stage goes on: %s", problem)
            return Logged(problem=problem)

    return wrapper


def find_runs(experiment: Experiment, tags: Mapping[str, str]) -> list[str]:
    """Ids of the runs that carry all these tags, oldest first. Raises ValueError on a value with a quote in it."""
    clauses = [f"tags.`{key}` = '{_plain(value)}'" for key, value in tags.items()]
    found = experiment.client().search_runs(
        [experiment.experiment_id], filter_string=" and ".join(clauses), order_by=["attributes.start_time ASC"]
    )
    return [run.info.run_id for run in found]


def _check_sqlite(uri: str) -> None:
    file = uri.removeprefix(_SQLITE)
    try:
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA schema_version")
    except sqlite3.Error as e:
        raise OSError(f"{file} cannot be used as a tracking store ({e}); check the path and the disk") from e


def _plain(value: str) -> str:
    if "'" in value or "`" in value:
        raise ValueError(f"{value!r} holds a quote, which MLflow's search cannot take; use a plain run id")
    return value
