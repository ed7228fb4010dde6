"""Workspaces: the same text files in memory and in a folder, and no way out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from occamy.worlds.workspace import FolderWorkspace, MemoryWorkspace, Workspace


@pytest.fixture(params=["memory", "folder"])
def workspace(request: pytest.FixtureRequest, tmp_path: Path) -> Workspace:
    return MemoryWorkspace() if request.param == "memory" else FolderWorkspace(tmp_path)


def test_what_was_written_is_read_listed_and_removed(workspace: Workspace) -> None:
    workspace.write("b", "2")
    workspace.write("a/c", "ü\n")
    assert workspace.list() == ["a/c", "b"]
    assert workspace.read("a/c") == "ü\n"
    workspace.remove("b")
    assert workspace.list() == ["a/c"]
    with pytest.raises(FileNotFoundError):
        workspace.read("b")
    with pytest.raises(FileNotFoundError):
        workspace.remove("b")


@pytest.mark.parametrize("path", ["", "/etc/x", "../x", "a/../../x", "a//b", ".", "a/.", "a\x00"])
def test_a_path_that_could_leave_the_workspace_is_refused(workspace: Workspace, path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        workspace.write(path, "x")


def test_a_file_and_a_folder_never_share_a_name(workspace: Workspace) -> None:
    workspace.write("a", "1")
    with pytest.raises(ValueError, match="a/b"):
        workspace.write("a/b", "2")
    workspace.write("c/d", "3")
    with pytest.raises(ValueError, match="'c'"):
        workspace.write("c", "4")


def test_links_are_neither_followed_nor_listed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(secret)
    workspace = FolderWorkspace(root)
    assert workspace.list() == []
    with pytest.raises(ValueError, match="symbolic link"):
        workspace.read("link")


def test_odd_names_that_an_agent_made_are_part_of_the_state(workspace: Workspace) -> None:
    workspace.write(".hidden/my file", "x")
    assert workspace.list() == [".hidden/my file"]
    assert workspace.read(".hidden/my file") == "x"


def test_bytes_that_are_no_text_still_have_one(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"\xff1")
    assert FolderWorkspace(tmp_path).read("raw") == "\\xff1"


@pytest.mark.parametrize("path", ["a" * 256, "é" * 128, "/".join(["ab"] * 400), "/".join("a" * 33)])
def test_a_name_that_a_disk_may_not_take_is_refused_everywhere(workspace: Workspace, path: str) -> None:
    with pytest.raises(ValueError, match="at most"):
        workspace.write(path, "x")
    for touch in (workspace.read, workspace.remove):
        with pytest.raises(FileNotFoundError):
            touch(path)
    longest = "/".join(["é" * 127] * 4)
    workspace.write(longest, "x")
    assert workspace.read(longest) == "x"
