"""Evidence is kept whatever the agent put into its calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from occamy.contracts.task import FieldSpec, WorldSpec
from occamy.rollout.evidence import Evidence, EvidenceStore
from occamy.worlds.workspace import FolderWorkspace
from occamy.worlds.world import World

SPEC = WorldSpec(
    services={"crm": {"visits": FieldSpec(kind="int")}}, records={"crm": {"A01": {"visits": 4}}}, fresh_ids=()
)


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("crm_update", '{"id":"A01","visits":123456789012345678901234567890}', "invalid_argument"),
        ("crm_update", '{"id":"A01","visits":1e999}', "invalid_argument"),
        ("crm_get", '{"id":"\\ud800"}', "invalid_argument"),
        ("file_write", '{"path":"' + "a" * 300 + '","text":"x"}', "invalid_argument"),
        ("file_read", '{"path":"' + "a" * 300 + '"}', "not_found"),
        ("file_read", '{"path":"' + "a/" * 3000 + 'a"}', "not_found"),
    ],
)
def test_a_clumsy_call_is_a_typed_error_and_kept_as_it_was(
    name: str, arguments: str, error: str, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    world = World(SPEC, FolderWorkspace(tmp_path / "files"))
    assert world.call(name, arguments).error == error
    store = EvidenceStore(tmp_path / "evidence.db")
    kept = Evidence(world.state(), tuple(world.events), [{"kind": "tool", "ms": 0.5}], "done", (True,), ("file x",))
    store.put("e", kept)
    assert store.get("e") == kept
    store.close()
