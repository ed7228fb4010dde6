"""What a trainer leaves on disk: resumable trainer states while it runs, and the lineage card of what it finished."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from occamy.contracts.lineage import LineageCard, read_card, tokenizer_digest, weights_digest, write_card


class StateStore:
    """Trainer states of one run, each in one file that appears whole or not at all.

    A state belongs to an identity (a digest of everything that shapes the run). States of another identity are removed:
    a run with other inputs must not continue from them.
    """

    def __init__(self, folder: Path, identity: str, *, keep: int = 2) -> None:
        """Use `folder` (created on the first save) and keep the newest `keep` states."""
        self.folder, self.identity, self.keep = folder, identity, keep

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the state after `step` steps, then drop old ones. A crash leaves earlier states untouched.

        Raises OSError naming the file when it cannot be written (a full disk); nothing half-written stays behind.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"step-{step:08d}.pt"
        temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as f:
                torch.save({"identity": self.identity, "rng": torch.get_rng_state(), "state": state}, f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, final)
        except (OSError, RuntimeError) as e:  # torch reports a failed write as a RuntimeError of its archive writer
            temporary.unlink(missing_ok=True)
            cause = e.__context__ if isinstance(e.__context__, OSError) else e
            raise OSError(f"{final}: trainer state not written ({cause}); free disk space and start again") from e
        for old in self._complete()[: -self.keep]:
            old.unlink()

    def restore(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """Return the newest state of this identity and set the random generator as it was; None when there is none."""
        for path in reversed(self._complete()):
            held = torch.load(path, map_location=device, weights_only=True)
            if held["identity"] == self.identity:
                torch.set_rng_state(held["rng"].cpu())
                state: dict[str, Any] = held["state"]
                return state
        return None

    def discard_foreign(self) -> None:
        """Remove half-written files and states of other identities. Call it in the one process that saves."""
        for half in self.folder.glob(".step-*.tmp"):
            half.unlink()
        for path in self._complete():
            if torch.load(path, map_location="cpu", weights_only=True, mmap=True)["identity"] != self.identity:
                path.unlink()

    def clear(self) -> None:
        """Remove all states: the run is finished."""
        for path in self._complete():
            path.unlink()
        if self.folder.is_dir():
            self.folder.rmdir()

    def _complete(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))


def derive_card(
    init: Path,
    out: Path,
    *,
    name: str,
    stage: str,
    data: dict[str, str],
    recipe_digest: str,
    seed: int,
    facts: dict[str, Any],
) -> LineageCard:
    """Write and return the card of checkpoint `out`, trained from checkpoint `init`. The last file of a finished run.

    `data` maps roles to manifest digests; `facts` must not hold times, so that equal runs have equal cards.
    Raises FileNotFoundError when `init` has no lineage card.
    """
    parent = read_card(init)
    card = LineageCard(
        name=name,
        stage=stage,
        root=parent.root,
        parents=(parent.weights_digest,),
        parent_names=(parent.name,),
        data=data,
        recipe_digest=recipe_digest,
        seed=seed,
        tokenizer_digest=tokenizer_digest(out),
        weights_digest=weights_digest(out),
        facts=facts,
    )
    write_card(out, card)
    return card
