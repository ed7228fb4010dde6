"""The lineage card of a checkpoint: what it was made from. Lies beside the weights as lineage.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from occamy.contracts.manifest import write_atomic
from occamy.contracts.record import Record, canonical_json, digest, digest_file

NAME = "lineage.json"


class LineageCard(Record):
    """What made a checkpoint."""

    name: str
    """Candidate name: base, marathon-sft, marathon, sprint, soup, sao, or of the user's choice."""
    stage: str
    """pretrain, sft, hdpo, merge or sao."""
    root: str
    """Weights digest of the first ancestor: two checkpoints may be merged only if their roots agree."""
    parents: tuple[str, ...] = ()
    """Weights digests of the direct parents, in order."""
    parent_names: tuple[str, ...] = ()
    data: dict[str, str] = Field(default_factory=dict)
    """Role -> manifest digest of the data that trained it."""
    recipe_digest: str = ""
    code_digest: str = ""
    seed: int = 0
    tokenizer_digest: str
    weights_digest: str
    facts: dict[str, Any] = Field(default_factory=dict)


def read_card(checkpoint: Path) -> LineageCard:
    """Read the card of a checkpoint folder. Raises FileNotFoundError naming the folder when it has none."""
    path = checkpoint / NAME
    if not path.is_file():
        raise FileNotFoundError(f"{checkpoint}: no {NAME}; not a checkpoint of this system")
    return LineageCard.model_validate_json(path.read_bytes())


def write_card(checkpoint: Path, card: LineageCard) -> None:
    """Write the card beside the weights, atomically."""
    write_atomic(checkpoint / NAME, canonical_json(card))


def weights_digest(checkpoint: Path) -> str:
    """Digest of ``model.safetensors``, or of the digests of all shards by name when the checkpoint has an index."""
    index = checkpoint / "model.safetensors.index.json"
    if not index.is_file():
        return digest_file(checkpoint / "model.safetensors")
    shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    return digest({shard: digest_file(checkpoint / shard) for shard in shards})


def tokenizer_digest(checkpoint: Path) -> str:
    """Digest of ``tokenizer.json``."""
    return digest_file(checkpoint / "tokenizer.json")
