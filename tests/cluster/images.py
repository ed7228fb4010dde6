"""A container image made on the spot from one static busybox: nothing can be pulled, and 2 MB do for most tests."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

IDLE = ["/bin/sh", "-c", "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done"]
"""Does nothing until it is told to end; also what holds a pod's namespaces open."""


def tiny_image(busybox: Path, archive: Path, name: str) -> Path:
    """Write an image with a shell and busybox's other commands to `archive`, in the form of `docker save`.

    Its default command idles. It has the users root and nobody (65534), `/tmp` for everyone, and no libraries.
    """
    layer = _layer(busybox)
    settings = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Cmd": IDLE, "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
            "history": [{"created_by": "tests/cluster/images.py"}],
        }
    ).encode()
    listed = json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(archive, "w") as tar:
        for file, data in {"layer.tar": layer, "config.json": settings, "manifest.json": listed}.items():
            _add(tar, file, data)
    return archive


def _layer(busybox: Path) -> bytes:
    commands = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for folder, mode in {"bin": 0o755, "etc": 0o755, "tmp": 0o1777}.items():
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        _add(tar, "bin/busybox", busybox.read_bytes(), 0o755)
        _add(tar, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")
        _add(tar, "etc/group", b"root:x:0:\nnogroup:x:65534:\n")
        for command in commands:
            if command != "busybox":
                link = tarfile.TarInfo(f"bin/{command}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
    return data.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))
