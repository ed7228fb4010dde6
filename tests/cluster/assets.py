"""Where Kubernetes' own programs for tests are: a folder that the user names, or the one that `make kube-assets` built.

Only the standard library may enter: `kube_assets` runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
NODE = ("kube-scheduler", "kubelet", "containerd", "containerd-shim-runc-v2", "ctr", "runc", "busybox")
CNI = ("cni/ptp", "cni/host-local", "cni/loopback")


@dataclass(frozen=True)
class Recipe:
    """What `make kube-assets` builds and takes from Debian 12. A digest of it names the folder of the result."""

    source: str = "kubernetes"
    version: str = "1.20.2"
    build: tuple[str, ...] = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
    tags: str = "providerless,dockerless"
    compiler: str = "golang-1.19"
    replaced: str = "golang-github-modern-go-reflect2-dev"
    """The bundled copy reads tables of the runtime that Go 1.18 moved; this package is up to date."""
    packaged: tuple[str, ...] = ("etcd-server", "containerd", "runc", "containernetworking-plugins", "busybox-static")


RECIPE = Recipe()
ENVIRONMENT = "KUBEBUILDER_ASSETS"
"""The variable by which users of Kubernetes' own test tools name a folder of these programs."""


class MissingAssetsError(Exception):
    """A program is not there. The message says which, where it was looked for, and how to get it."""


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/occamy/kube-assets`, with `~/.cache` as default."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "occamy" / "kube-assets"


def built_folder() -> Path:
    """Where the result of the present recipe lies, or will lie."""
    result = json.dumps([asdict(RECIPE), CONTROL_PLANE, NODE, CNI], sort_keys=True)
    digest = hashlib.sha256(result.encode()).hexdigest()
    return cache_folder() / digest[:16]


@dataclass(frozen=True)
class Assets:
    """Programs of one Kubernetes release, and what runs beside them."""

    folder: Path
    """The programs of Kubernetes itself come from here alone, so that their versions agree."""

    def program(self, name: str) -> Path:
        """Path of a program. Those that are not Kubernetes' own may also be the machine's.

        Raises:
            MissingAssetsError: it is nowhere.
        """
        places = [self.folder / name]
        if not name.startswith("kube"):
            places += [built_folder() / name, Path("/opt") / f"{name.replace('cni/', 'cni/bin/')}"]
            places += [Path(found)] if (found := shutil.which(name)) else []
        for place in places:
            if os.access(place, os.X_OK):
                return place.absolute()
        raise MissingAssetsError(
            f"{name} is not in {self.folder}. Run `make kube-assets` without {ENVIRONMENT}, or put the program of the "
            "same release beside the others."
        )

    def need(self, *names: str) -> None:
        """Raises MissingAssetsError for the first of the programs that is nowhere."""
        for name in names:
            self.program(name)

    def minor(self) -> int:
        """The y of Kubernetes 1.y, for options that came or went."""
        said = subprocess.run([self.program("kube-apiserver"), "--version"], capture_output=True, text=True, check=True)
        found = re.search(r"v1\.(\d+)", said.stdout)
        if found is None:
            raise MissingAssetsError(
                f"{self.program('kube-apiserver')} --version says {said.stdout.strip()!r}, not v1.y"
            )
        return int(found.group(1))


def find_assets() -> Assets:
    """The programs of a control plane: those that `KUBEBUILDER_ASSETS` names, else those built here.

    Raises:
        MissingAssetsError: neither is there, or one of the programs is missing.
    """
    named = os.environ.get(ENVIRONMENT)
    folder = Path(named) if named else built_folder()
    if not folder.is_dir():
        reason = f"{ENVIRONMENT}={named} is no folder" if named else "the control plane for tests is not built"
        raise MissingAssetsError(
            f"{reason}: run `make kube-assets` once (Debian 12), name a folder with kube-apiserver, etcd and "
            f"kube-controller-manager in {ENVIRONMENT}, or test on a cluster of yours with --k8s-provider"
        )
    assets = Assets(folder)
    assets.need(*CONTROL_PLANE)
    return assets
