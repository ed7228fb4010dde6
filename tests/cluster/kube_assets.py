"""`make kube-assets`: Kubernetes' own programs, built once from Debian's sources and kept outside the tree.

Nothing is installed and the machine's package sources stay as they are: packages are unpacked into a scratch folder,
and the result appears in one rename. A build that was interrupted goes on where it stood. Needs no root.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .assets import CNI, CONTROL_PLANE, ENVIRONMENT, NODE, RECIPE, Assets, MissingAssetsError, built_folder, find_assets

FREE_BYTES = 5 << 30  # sources 0.4 GB, compiler 0.5 GB, its cache 1.5 GB, programs 0.5 GB, and air
TOOLS = {
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "dpkg-source": "dpkg-dev",
    "make": "make",
    "patch": "patch",
    "nice": "coreutils",
}


class BuildError(Exception):
    """The programs cannot be built here. The message says why and what to do."""


def check_machine(scratch: Path) -> None:
    """Refuse early, with everything that is missing.

    Raises:
        BuildError: not Debian 12, tools missing, or too little room.
    """
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME") if Path("/etc/os-release").exists() else None
    if codename != "bookworm":
        raise BuildError(
            f"this recipe is for Debian 12 (bookworm), this is {codename or platform.system()}. Put kube-apiserver, "
            f"kube-controller-manager, etcd and kubectl of one release into a folder and name it in {ENVIRONMENT}, or "
            "test on a cluster of yours with --k8s-provider"
        )
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing:
        raise BuildError(f"missing tools; run: sudo apt-get install {' '.join(missing)}")
    scratch.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(scratch).free) < FREE_BYTES:
        raise BuildError(f"{scratch} has {free >> 20} MiB free, {FREE_BYTES >> 20} are needed; set XDG_CACHE_HOME")


def source_lists(codename: str, etc: Path = Path("/etc/apt")) -> dict[str, str]:
    """The machine's own package sources for this release, with the source packages added, by file name."""
    lists = {}
    for path in sorted([*etc.glob("sources.list"), *etc.glob("sources.list.d/*")]):
        if path.suffix == ".sources":
            stanzas = [
                s for s in re.split(r"\n\s*\n", path.read_text()) if re.search(rf"(?m)^Suites:.*\b{codename}", s)
            ]
            lists[path.name] = "\n\n".join(re.sub(r"(?m)^Types:.*$", "Types: deb deb-src", s) for s in stanzas)
        elif path.suffix == ".list":
            lines = re.findall(rf"(?m)^deb\s.*\s{codename}.*$", path.read_text())
            lists[path.name] = "".join(f"{line}\n{re.sub('^deb', 'deb-src', line)}\n" for line in lines)
    return {name: text for name, text in lists.items() if text}


def download(scratch: Path) -> Path:
    """Fetch the source package and the binary packages, checked by apt, into one folder."""
    room, packages = scratch / "apt", scratch / "packages"
    parts = room / "sources"
    for folder in (parts, room / "lists" / "partial", room / "cache" / "archives" / "partial", packages):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in source_lists("bookworm").items():
        (parts / name).write_text(text)
    options = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": parts,
        "Dir::State::lists": room / "lists",
        "Dir::Cache": room / "cache",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-q", "-q", *(f"-o{name}={value}" for name, value in options.items())]
    compiler = RECIPE.compiler
    _run([*apt, "update"], packages)
    _run([*apt, "download", f"{compiler}-go", f"{compiler}-src", RECIPE.replaced, *RECIPE.packaged], packages)
    _run([*apt, "source", "--download-only", RECIPE.source], packages)
    return packages


def unpack(scratch: Path, packages: Path) -> tuple[Path, Path]:
    """Unpack everything; returns the root of the binary packages and the patched source tree.

    Raises:
        BuildError: Debian's source package is not of the version that the recipe was made for.
    """
    root, source = scratch / "root", scratch / "source"
    for package in sorted(packages.glob("*.deb")):
        _run(["dpkg-deb", "-x", package, root], scratch)
    described = list(packages.glob(f"{RECIPE.source}_*{RECIPE.version}-*.dsc"))
    if len(described) != 1:
        found = [path.name for path in packages.glob("*.dsc")]
        raise BuildError(f"the recipe is for {RECIPE.source} {RECIPE.version}, the package source has {found}")
    if source.exists():
        return root, source
    fresh = scratch / "source.fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    _run(["dpkg-source", "--no-check", "-q", "-x", described[0], fresh], scratch)
    bundled = fresh / "vendor/github.com/modern-go/reflect2"
    packaged = root / "usr/share/gocode/src/github.com/modern-go/reflect2"
    for old in [*bundled.glob("*.go"), *bundled.glob("*.s")]:
        old.unlink()
    for new in [*packaged.glob("*.go"), *packaged.glob("*.s")]:
        shutil.copy2(new, bundled)
    home = fresh / ".go/src/k8s.io"
    home.mkdir(parents=True)
    (home / "kubernetes").symlink_to("../../..")
    fresh.rename(source)
    return root, source


def compile_programs(scratch: Path, root: Path, source: Path, jobs: int) -> Path:
    """Build with Kubernetes' own make; returns the folder of the programs. Go's cache makes a second try short."""
    go_root, tools = root / "usr/lib" / RECIPE.compiler.replace("golang", "go"), scratch / "tools"
    tools.mkdir(exist_ok=True)
    copy = tools / "rsync"  # the build copies its results with `rsync -pc`, and needs it for nothing else
    copy.write_text('#!/bin/sh\nshift\nexec cp -p "$@"\n')
    copy.chmod(0o755)
    environment = {
        "PATH": f"{go_root}/bin:{tools}:{os.environ['PATH']}",
        "HOME": str(scratch),
        "GOROOT": str(go_root),
        "GOPATH": str(source / ".go"),
        "GOMAXPROCS": str(jobs),
        "CGO_ENABLED": "0",
        "LC_ALL": "C",
    }
    what = " ".join(f"cmd/{name}" for name in RECIPE.build)
    flags = f"-p={jobs} -tags={RECIPE.tags}"  # in this order: the build takes all up to the next dash for tags
    _run(["nice", "-n", "10", "make", f"WHAT={what}", f"GOFLAGS={flags}"], source, environment)
    return source / "_output/local/go/bin"


def collect(scratch: Path, root: Path, programs: Path, target: Path) -> None:
    """Put the programs together and make them the result in one rename."""
    done = scratch / "done"
    shutil.rmtree(done, ignore_errors=True)
    (done / "cni").mkdir(parents=True)
    places = (programs, root / "usr/bin", root / "usr/sbin", root / "bin", root / "usr/lib")
    for name in (*CONTROL_PLANE, *NODE, *CNI):
        found = next((place / name for place in places if (place / name).is_file()), None)
        if found is None:
            raise BuildError(f"{name} is in none of {[str(place) for place in places]}")
        shutil.copy2(found, done / name)
    shutil.rmtree(target, ignore_errors=True)
    done.rename(target)


def build(jobs: int) -> Path:
    """Folder with all programs: the one that is there, or a new one.

    Raises:
        BuildError: the programs cannot be built here.
    """
    target = built_folder()
    if target.is_dir():
        Assets(target).need(*CONTROL_PLANE, *NODE, *CNI)
        return target
    scratch = target.with_suffix(".partial")
    with _alone(target.with_suffix(".lock")):
        if target.is_dir():
            return target
        check_machine(scratch)
        start = time.monotonic()
        print(f"download Kubernetes {RECIPE.version} and its compiler into {scratch}", flush=True)
        packages = download(scratch)
        root, source = unpack(scratch, packages)
        print(f"compile {', '.join(RECIPE.build)}: several minutes", flush=True)
        collect(scratch, root, compile_programs(scratch, root, source, jobs), target)
        shutil.rmtree(scratch)
        print(f"done in {time.monotonic() - start:.0f} s", flush=True)
    return target


def main(argv: list[str] | None = None) -> int:
    """Print the folder of the programs and their sizes, or why there are none."""
    parser = argparse.ArgumentParser(prog="make kube-assets", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time (default 2)")
    arguments = parser.parse_args(argv)
    try:
        assets = find_assets() if os.environ.get(ENVIRONMENT) else Assets(build(arguments.jobs))
        assets.need(*CONTROL_PLANE)
    except (BuildError, MissingAssetsError) as problem:
        print(f"make kube-assets: {problem}", file=sys.stderr)
        return 1
    for name in (*CONTROL_PLANE, *NODE, *CNI):
        path = assets.folder / name
        print(f"{path.stat().st_size / 2**20:7.1f} MiB  {name}" if path.exists() else f"          -  {name}")
    print(f"Kubernetes 1.{assets.minor()} in {assets.folder}")
    return 0


def _run(command: Sequence[str | Path], folder: Path, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-25:])
        shown = " ".join(str(word) for word in command)
        raise BuildError(f"`{shown}` ended with {done.returncode}; run the same again to go on from here:\n{tail}")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another build is running: waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
