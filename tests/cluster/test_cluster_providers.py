"""The same tests on a cluster that somebody else runs: `--k8s-provider external`, as on a developer's own cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from .cluster import Cluster

HERE = Path(__file__).parent


def test_the_tests_of_access_and_resources_pass_on_an_external_cluster(cluster: Cluster) -> None:
    files = [str(HERE / f"test_cluster_{topic}.py") for topic in ("access", "resources")]
    chosen = ["--k8s-provider", "external", "--k8s-kubeconfig", str(cluster.admin)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *chosen],
        cwd=HERE.parents[1],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"needs the local control plane, not ExternalManager: run without --k8s-provider", done.stdout)
    assert re.search(r"^7 passed, 2 skipped", done.stdout, re.MULTILINE), done.stdout
