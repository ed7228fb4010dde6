"""Makes one file of the in-pod agent: `python -m occamy.sandboxes.kubernetes.bundle FILE`."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import occamy

PARTS = (
    "__init__.py",
    "contracts/__init__.py",
    "contracts/outcome.py",
    *(f"sandboxes/{name}.py" for name in ("__init__", "archive", "keeper", "paths", "process", "protocol")),
    *(f"sandboxes/{name}.py" for name in ("roots", "tree", "watch")),
    *(f"sandboxes/kubernetes/{name}.py" for name in ("__init__", "agent", "http", "inside")),
)
"""Modules of this package that the agent is made of. They import nothing but one another and the standard library."""
_MAIN = "from occamy.sandboxes.kubernetes.agent import main\nmain()\n"
_MOMENT = (1980, 1, 1, 0, 0, 0)


def write_bundle(path: Path) -> None:
    """Write the agent as a zip archive that Python runs. Equal sources give equal bytes."""
    package = Path(occamy.__file__).parent
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr(zipfile.ZipInfo("__main__.py", _MOMENT), _MAIN)
        for part in PARTS:
            bundle.writestr(zipfile.ZipInfo(f"occamy/{part}", _MOMENT), (package / part).read_bytes())


if __name__ == "__main__":
    write_bundle(Path(sys.argv[1]))
