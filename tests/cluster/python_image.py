"""A sandbox image made on the spot from this machine's Python, a static busybox, and the in-pod agent in one file."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from occamy.sandboxes.kubernetes.bundle import write_bundle

USER = 10001
AGENT = "/opt/occamy/sandbox-agent.pyz"
_LEFT_OUT = re.compile(r"/(site-packages|tests?|idlelib|tkinter|ensurepip|lib2to3|turtledemo|config-3[^/]*)(/|$)")


def python_image(busybox: Path, archive: Path, name: str, files: dict[str, bytes]) -> Path:
    """Write an image to `archive`, in the form of `docker save`: entry point, user and places as in images/sandbox.

    `files` are added, by absolute path.
    """
    layer = _layer(busybox, archive.with_suffix(".pyz"), files)
    settings = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "Entrypoint": ["python3", "-I", "-S", AGENT],
                "Env": ["PATH=/usr/bin:/bin", "LANG=C.UTF-8"],
                "User": f"{USER}:{USER}",
                "WorkingDir": "/workspace",
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
            "history": [{"created_by": "tests/cluster/python_image.py"}],
        }
    ).encode()
    listed = json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(archive, "w") as tar:
        for file, data in {"layer.tar": layer, "config.json": settings, "manifest.json": listed}.items():
            _add(tar, file, data)
    return archive


def _layer(busybox: Path, bundle: Path, files: dict[str, bytes]) -> bytes:
    write_bundle(bundle)
    python = Path(sys.executable).resolve()
    library = Path(json.__file__).parents[1]
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for folder in ("workspace", "tmp"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o1777, USER, USER
            tar.addfile(entry)
        for path in [python, *_libraries([python, *library.glob("lib-dynload/*.so")])]:
            _add(tar, str(path).lstrip("/"), path.read_bytes(), 0o755)
        for path in sorted(library.rglob("*")):
            if path.is_file() and not _LEFT_OUT.search(str(path)):
                _add(tar, str(path).lstrip("/"), path.read_bytes(), 0o755 if path.suffix == ".so" else 0o644)
        _add(tar, "bin/busybox", busybox.read_bytes(), 0o755)
        commands = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
        for command in set(commands) - {"busybox"}:
            _link(tar, f"bin/{command}", "busybox")
        _link(tar, "usr/bin/python3", str(python))
        _add(tar, "etc/passwd", f"agent:x:{USER}:{USER}:agent:/workspace:/bin/sh\n".encode())
        for name, content in {AGENT: bundle.read_bytes(), **files}.items():
            _add(tar, name.lstrip("/"), content)
    return data.getvalue()


def _libraries(programs: list[Path]) -> list[Path]:
    """What these programs load, by the paths at which they look for it."""
    found: set[str] = set()
    for program in programs:
        said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        found |= set(re.findall(r"(/[^ ]+) \(0x", said))
    return [Path(path) for path in sorted(found)]


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)
