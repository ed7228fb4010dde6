"""What a driver tells the trainer processes of an RL stage, and where the stage keeps its work."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from occamy.contracts.record import Record, digest
from occamy.training.rl_config import HdpoConfig, SaoConfig

CONFIGS = {"hdpo": HdpoConfig, "sao": SaoConfig}


class RlJob(Record):
    """One RL stage."""

    algorithm: Literal["hdpo", "sao"]
    init: Path
    """Checkpoint folder to start from: weight version 0."""
    out: Path
    """Checkpoint folder to write."""
    config: HdpoConfig | SaoConfig
    name: str
    """Name of the candidate, for its lineage card and episode ids."""
    seed: int
    recipe_digest: str
    init_digest: str
    """Weights digest of `init`."""
    release_digest: str
    """Manifest digest of the task release."""
    rollout_digest: str
    """Digest of the rollout configuration and the resolved harness."""
    driver: str = ""
    """Token of the driver that holds the exchange; a worker ends when it no longer does."""

    @model_validator(mode="after")
    def _matches(self) -> RlJob:
        if not isinstance(self.config, CONFIGS[self.algorithm]):
            raise ValueError(f"algorithm {self.algorithm!r} was given a {type(self.config).__name__}")
        return self

    @property
    def identity(self) -> str:
        """Digest of everything that shapes the result; folders are left out, their contents count."""
        return digest(self.model_dump(mode="json", exclude={"init", "out", "driver"}))

    @property
    def workplace(self) -> Path:
        """Folder of the spec, log and trainer states."""
        return self.out / "trainer"

    @property
    def log(self) -> Path:
        """Output of the trainer processes."""
        return self.workplace / "log.txt"

    @property
    def exchange(self) -> Path:
        """Folder of the file exchange; its metrics.jsonl has one line per batch."""
        return self.workplace / "exchange"

    @property
    def rollout(self) -> Path:
        """Folder of the rollout session."""
        return self.workplace / "rollout"
