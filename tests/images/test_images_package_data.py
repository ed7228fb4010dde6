"""What is in the source tree is in the installed package: images hold no more than the package does."""

from __future__ import annotations

import fnmatch
import tomllib

from .dockerfiles import ROOT, tracked


def test_every_data_file_of_the_library_is_package_data() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["occamy"]
    patterns = [pattern.replace("**/", "*") for pattern in globs]
    data = [p.removeprefix("occamy/") for p in tracked() if p.startswith("occamy/") and not p.endswith(".py")]
    assert len(data) > 20
    assert [path for path in data if not any(fnmatch.fnmatchcase(path, p) for p in patterns)] == []
