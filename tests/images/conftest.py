"""Images that `make images` built, run as a cluster would: no network, read-only root, no capabilities."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from .dockerfiles import building

HARDENED = ("--network=none", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--tmpfs=/tmp")


def pytest_configure(config: pytest.Config) -> None:
    """The marker of tests that run built images."""
    config.addinivalue_line("markers", "images: runs the images that `make images` has built")


@dataclass
class Built:
    """A container tool and the images of ours that it has."""

    tool: str

    def call(self, *words: str, timeout: float = 120) -> str:
        """Run the tool and return what it printed."""
        command = [self.tool, *words]
        done = subprocess.run(
            command, env=building.environment(self.tool), capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def name(self, image: str) -> str:
        """Full name of an image. Skips when it is not built."""
        name: str = building.tag(image, self.tool)
        if not self.call("images", "--quiet", name).strip():
            pytest.skip(f"{name} is not built here; run: make images")
        return name

    def config(self, image: str) -> dict[str, Any]:
        """What the image says of itself."""
        found: dict[str, Any] = json.loads(self.call("image", "inspect", self.name(image)))[0]["Config"]
        return found

    def run(self, image: str, *command: str, entry: str | None = None, options: Sequence[str] = ()) -> str:
        """Run a container to its end as the manifests do, and return what it printed."""
        entry_point = () if entry is None else ("--entrypoint", entry)
        return self.call("run", "--rm", *HARDENED, *options, *entry_point, self.name(image), *command)


@pytest.fixture(scope="session")
def built() -> Built:
    """podman or docker. Skips when neither is installed."""
    try:
        return Built(building.find_tool())
    except building.CannotBuild as problem:
        pytest.skip(str(problem))
