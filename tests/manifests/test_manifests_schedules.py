"""The scheduled retraining says what `occamy run` understands, on storage that outlives its pod."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from occamy.cli.main import build_parser

from .rendering import OVERLAYS, ROOT, of_kind, overlay


def cron_job(name: str) -> dict[str, Any]:
    """The one schedule of an overlay."""
    (found,) = of_kind(overlay(name), "CronJob")
    return found["spec"]


def said(container: dict[str, Any], folder: Path) -> list[str]:
    """The words that its shell hands to `occamy`, whose place is taken by a script that prints them."""
    (folder / "occamy").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "occamy").chmod(0o755)
    env = {e["name"]: e["value"] for e in container["env"]} | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = [*container["command"], *container["args"]]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_schedule_runs_a_profile_that_is_there_into_the_run_directory(name: str, tmp_path: Path) -> None:
    pod = cron_job(name)["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = said(container, tmp_path)
    args = build_parser().parse_args(words)
    assert words[0] == "run"
    assert (ROOT / "occamy" / "profiles" / f"{args.profile}.yaml").is_file()
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    kept = [mounts[v["name"]] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert [folder for folder in kept if Path(args.out).is_relative_to(folder)]
    assert Path(args.out).name[4:6] == "-W", "one folder a week, so that a pod that is started again goes on"


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_schedule_that_nobody_asked_for_is_off_and_none_catches_up(name: str) -> None:
    spec = cron_job(name)
    assert spec["suspend"] is (name == "kind")
    assert spec["startingDeadlineSeconds"] < 7 * 86400, "a missed week is not made up for"
    job = spec["jobTemplate"]["spec"]
    assert job["activeDeadlineSeconds"] + spec["startingDeadlineSeconds"] < 7 * 86400, "it is over before the next"
