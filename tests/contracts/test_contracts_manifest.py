"""Seals: every way a folder can differ from its manifest is refused by name; writes are whole or not at all."""

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from occamy.contracts.manifest import Counts, SealError, seal, verify, write_atomic
from occamy.contracts.record import canonical_json, digest, digest_bytes, digest_file


def _sealed(folder: Path) -> Path:
    (folder / "tasks").mkdir(parents=True)
    (folder / "tasks" / "a.json").write_text("one")
    (folder / "b.bin").write_bytes(bytes(range(256)))
    seal(folder, "tasks", counts={"task_packages": Counts(raw=2, validated=2)}, facts={"seed": 3})
    return folder


def test_a_sealed_folder_verifies_and_keeps_its_facts(tmp_path: Path) -> None:
    manifest = verify(_sealed(tmp_path / "x"), "tasks")
    assert set(manifest.files) == {"tasks/a.json", "b.bin"}
    assert manifest.files["tasks/a.json"] == digest_bytes(b"one")
    assert manifest.counts["task_packages"].raw == 2 and manifest.facts == {"seed": 3}


def test_sealing_the_same_content_twice_gives_the_same_digest(tmp_path: Path) -> None:
    assert verify(_sealed(tmp_path / "x"), "tasks").digest() == verify(_sealed(tmp_path / "y"), "tasks").digest()


def test_missing_extra_truncated_and_foreign_are_refused_by_name(tmp_path: Path) -> None:
    folder = _sealed(tmp_path / "x")
    with pytest.raises(SealError, match="holds 'tasks', expected 'episodes'"):
        verify(folder, "episodes")
    (folder / "extra.txt").write_text("?")
    with pytest.raises(SealError, match=r"extra\.txt is not in the manifest"):
        verify(folder, "tasks")
    (folder / "extra.txt").unlink()
    (folder / "b.bin").write_bytes(bytes(range(255)))
    with pytest.raises(SealError, match=r"b\.bin was altered or truncated"):
        verify(folder, "tasks")
    (folder / "b.bin").unlink()
    with pytest.raises(SealError, match=r"b\.bin is missing"):
        verify(folder, "tasks")


def test_an_unfinished_or_unreadable_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SealError, match="did not finish, run it again"):
        verify(tmp_path, "tasks")
    (tmp_path / "manifest.json").write_text('{"kind": "tasks"')
    with pytest.raises(SealError, match="not a manifest of this version"):
        verify(tmp_path, "tasks")


def test_a_failed_write_keeps_the_old_content_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, b"old")

    def full_disk(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_canonical_json_is_sorted_compact_utf8_and_finite() -> None:
    assert canonical_json({"b": [1, "é"], "a": None}) == '{"a":null,"b":[1,"é"]}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": float("nan")})


@given(st.dictionaries(st.text(), st.integers() | st.text()))
def test_digest_ignores_the_order_of_keys(value: dict[str, int | str]) -> None:
    assert digest(value) == digest(dict(reversed(value.items())))


def test_file_and_byte_digests_agree(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 3_000_000)
    assert digest_file(tmp_path / "f") == digest_bytes(b"x" * 3_000_000)


def test_what_a_killed_seal_left_behind_is_not_sealed(tmp_path: Path) -> None:
    clean = verify(_sealed(tmp_path / "x"), "tasks")
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / ".manifest.json.4711.tmp").write_bytes(b'{"kind":')
    assert verify(_sealed(tmp_path / "y"), "tasks").digest() == clean.digest()
