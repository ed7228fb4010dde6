"""Builds the images with podman or docker and prints their sizes: `python images/build.py [IMAGE ...]`.

Without `--python-image` nothing is pulled: the Python image is made from Debian packages by debootstrap (root).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = Path(__file__).resolve().parent
DEBIAN = "occamy-debian:bookworm"
"""The Python image made here: Debian 12 with its Python 3.11."""
PACKAGES = "ca-certificates,python3,python3-venv"
ON_PYTHON = ("base", "operator", "sandbox", "grader", "trainer")
"""Images that stand on a plain Python image; `trainer` is for CPUs then."""
ON_OURS = {"rollout": {"BASE_IMAGE": "base"}, "harnesses": {"BASE_IMAGE": "sandbox", "PROGRAMS_IMAGE": "rollout"}}
"""Images that are made of images of ours, in the order that they need one another: of which, by build argument."""
ALSO = {"trainer": "python"}
"""Second names: kfp.local warns of images for tasks whose name does not say python, so that pipelines use that one."""
ON_GPU = ("trainer-gpu", "engine")
"""Images whose CUDA base has to be pulled."""


class CannotBuild(RuntimeError):
    """Something that building needs is not there; the message says how to get it."""


def version() -> str:
    """The version that tags every image. Read, not imported: building needs no environment."""
    for line in (ROOT / "occamy" / "__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.partition("=")[2].strip().strip('"')
    raise CannotBuild("occamy/__init__.py has no __version__")


def tag(image: str, tool: str) -> str:
    """Full name of one of our images; podman keeps what was built here under localhost/."""
    name = image if ":" in image else f"occamy-{image}:{version()}"
    return f"localhost/{name}" if tool == "podman" else name


def find_tool() -> str:
    """podman, else docker. Raises CannotBuild."""
    for tool in ("podman", "docker"):
        if shutil.which(tool):
            return tool
    raise CannotBuild("neither podman nor docker is installed; on Debian: apt-get install podman runc debootstrap")


def environment(tool: str) -> dict[str, str]:
    """Environment of every call: our containers.conf for podman as root with runc, unless another is named."""
    ours = tool == "podman" and os.geteuid() == 0 and shutil.which("runc") and "CONTAINERS_CONF" not in os.environ
    return {**os.environ, "CONTAINERS_CONF": str(IMAGES / "containers.conf")} if ours else dict(os.environ)


def build_command(image: str, tool: str, arguments: Mapping[str, str], source: str) -> list[str]:
    """The build of one image. The machine's CA bundle, where one is named, is a secret and stays out of the layers."""
    name = image.removesuffix("-gpu")
    labels = {"VERSION": version(), "REVISION": _revision(), "SOURCE": source}
    command = [tool, "build", "--network=host", "--quiet", "--file", str(IMAGES / name / "Dockerfile")]
    for key, value in {**labels, **arguments}.items():
        command += ["--build-arg", f"{key}={value}"]
    if bundle := os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE"):
        command += ["--secret", f"id=ca,src={bundle}"]
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    if name == "trainer" and tool == "podman" and Path(wheels).is_dir() and wheels:
        command += ["--volume", f"{wheels}:{wheels}:ro", "--build-arg", f"PIP_FIND_LINKS={wheels}"]
    for name in (image, ALSO.get(image)):
        command += ["--tag", tag(name, tool)] if name else []
    return [*command, str(ROOT)]


def debootstrap_command(folder: str) -> list[str]:
    """Debian into a folder. Without the check, a missing keyring would be a warning, and anybody's packages taken."""
    return ["debootstrap", "--force-check-gpg", "--variant=minbase", f"--include={PACKAGES}", "bookworm", folder]


def make_debian(tool: str) -> str:
    """The Python image, made once from Debian packages. Raises CannotBuild."""
    name = tag(DEBIAN, tool)
    env = environment(tool)
    if subprocess.run([tool, "image", "inspect", name], env=env, capture_output=True, check=False).returncode == 0:
        return name
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        raise CannotBuild(
            "root and debootstrap make the Python image; or pull one: --python-image python:3.11.14-slim-bookworm"
        )
    with tempfile.TemporaryDirectory() as folder:
        _run(debootstrap_command(folder), env)
        for leftover in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(Path(folder, leftover), ignore_errors=True)
        archive = Path(folder).with_suffix(".tar")
        try:
            _run(["tar", "--create", "--file", str(archive), "--directory", folder, "."], env)
            _run([tool, "import", "--change", 'CMD ["python3"]', str(archive), name], env)
        finally:
            archive.unlink(missing_ok=True)
    return name


def build(image: str, tool: str, python_image: str, source: str) -> None:
    """Build one image."""
    if image in ON_PYTHON:
        arguments = {"BASE_IMAGE": python_image}
    else:
        arguments = {argument: tag(name, tool) for argument, name in ON_OURS.get(image, {}).items()}
    _run(build_command(image, tool, arguments, source), environment(tool))


def size(image: str, tool: str) -> int:
    """Bytes of an image with all its layers."""
    command = [tool, "image", "inspect", "--format", "{{.Size}}", tag(image, tool)]
    return int(subprocess.run(command, env=environment(tool), capture_output=True, text=True, check=True).stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Build what is named, in the order that the images need one another."""
    ordered = (*ON_PYTHON, *ON_OURS, *ON_GPU)
    parser = argparse.ArgumentParser(description="Build the images and print their sizes.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(ordered)}; all but the last two")
    parser.add_argument("--python-image", metavar="NAME", help="Python 3.11 image to build on, instead of making one")
    parser.add_argument("--source", default="occamy-pipelines", metavar="URL", help="label: where the source is")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.images) - set(ordered)):
        parser.error(f"no such image: {', '.join(unknown)}; there are {', '.join(ordered)}")
    chosen = [i for i in ordered if i in args.images] if args.images else [*ON_PYTHON, *ON_OURS]
    try:
        tool = find_tool()
        python_image = args.python_image or (make_debian(tool) if set(chosen) & set(ON_PYTHON) else "")
        for image in chosen:
            begun = time.monotonic()
            build(image, tool, python_image, args.source)
            name, seconds = tag(image, tool), time.monotonic() - begun
            print(f"{name:<40} {size(image, tool) / 1e6:>8.1f} MB {seconds:>7.1f} s", flush=True)
    except CannotBuild as problem:
        print(f"images: {problem}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as failed:
        print(f"images: `{' '.join(failed.cmd)}` ended with {failed.returncode}", file=sys.stderr)
        return 1
    return 0


def _revision() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _run(command: Sequence[str], env: Mapping[str, str]) -> None:
    subprocess.run(command, env=dict(env), stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    sys.exit(main())
