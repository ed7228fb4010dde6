"""Finds the shipped base checkpoint, which is package data, and checks it against its lineage card."""

from __future__ import annotations

from pathlib import Path

from occamy.contracts import lineage

FOLDER = Path(__file__).parent / "base"


def base_checkpoint(folder: Path = FOLDER) -> Path:
    """Return the folder of the base checkpoint.

    Raises FileNotFoundError naming a missing file, or ValueError when weights or tokenizer differ from the card.
    """
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", lineage.NAME):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder / name}: base weights are incomplete; install the package again or make them with "
                "`occamy nano pretrain`"
            )
    card = lineage.read_card(folder)
    for what, found, stated in (
        ("model.safetensors", lineage.weights_digest(folder), card.weights_digest),
        ("tokenizer.json", lineage.tokenizer_digest(folder), card.tokenizer_digest),
    ):
        if found != stated:
            raise ValueError(f"{folder / what}: digest {found} is not the card's {stated}; install the package again")
    return folder
