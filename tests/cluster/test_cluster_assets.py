"""The programs of the control plane: found where the user says, refused by name, and how to get them."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from . import kube_assets
from .assets import CONTROL_PLANE, Assets, MissingAssetsError, built_folder, find_assets
from .kube_assets import source_lists


def fill(folder: Path, *names: str, version: str = "v1.31.0") -> Path:
    """A folder of programs that know their version and nothing else."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(f"#!/bin/sh\necho Kubernetes {version}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)


def test_nothing_is_there_and_the_message_says_how_to_get_it(tmp_path: Path) -> None:
    assert built_folder().parent == tmp_path / "cache/occamy/kube-assets"
    with pytest.raises(MissingAssetsError, match=r"not built: run `make kube-assets` once .*--k8s-provider"):
        find_assets()


def test_built_programs_are_found(tmp_path: Path) -> None:
    fill(built_folder(), *CONTROL_PLANE, version="v1.20.2")
    found = find_assets()
    assert found == Assets(built_folder())
    assert found.minor() == 20
    assert found.program("etcd") == built_folder() / "etcd"


def test_the_folder_of_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(built_folder(), *CONTROL_PLANE, "runc", version="v1.20.2")
    mine = fill(tmp_path / "mine", *CONTROL_PLANE)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(mine))
    assert find_assets().minor() == 31
    assert find_assets().program("runc") == built_folder() / "runc"


def test_programs_of_two_releases_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(built_folder(), *CONTROL_PLANE, version="v1.20.2")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(fill(tmp_path / "mine", "etcd", "kube-apiserver", "kubectl")))
    with pytest.raises(MissingAssetsError, match=f"kube-controller-manager is not in {tmp_path / 'mine'}"):
        find_assets()


def test_a_named_folder_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", "/nowhere")
    with pytest.raises(MissingAssetsError, match="KUBEBUILDER_ASSETS=/nowhere is no folder"):
        find_assets()
    assert kube_assets.main([]) == 1
    assert "/nowhere is no folder" in capsys.readouterr().err


def test_the_recipe_refuses_another_system(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"VERSION_CODENAME": "noble"})
    assert kube_assets.main([]) == 1
    assert "for Debian 12 (bookworm), this is noble" in capsys.readouterr().err
    assert not built_folder().exists()


def test_missing_tools_are_named_together(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"VERSION_CODENAME": "bookworm"})
    monkeypatch.setenv("PATH", "/nowhere")
    assert kube_assets.main([]) == 1
    assert "sudo apt-get install apt coreutils dpkg dpkg-dev make patch" in capsys.readouterr().err


def test_source_packages_are_added_to_the_sources_of_this_release_only(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(
        "# deb http://m/d bookworm main\ndeb [arch=amd64] http://m/d bookworm main\n"
    )
    (tmp_path / "sources.list.d/debian.sources").write_text(
        "Types: deb\nURIs: http://m/d\nSuites: bookworm bookworm-updates\nComponents: main\n\n"
        "Types: deb\nURIs: http://m/other\nSuites: stable\nComponents: main\n"
    )
    (tmp_path / "sources.list.d/other.list").write_text("deb http://m/other stable main\n")
    (tmp_path / "sources.list.d/off.sources.disabled").write_text("Types: deb\nSuites: bookworm\n")
    assert source_lists("bookworm", tmp_path) == {
        "sources.list": "deb [arch=amd64] http://m/d bookworm main\ndeb-src [arch=amd64] http://m/d bookworm main\n",
        "debian.sources": "Types: deb deb-src\nURIs: http://m/d\nSuites: bookworm bookworm-updates\nComponents: main",
    }
