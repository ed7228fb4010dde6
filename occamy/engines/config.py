"""Settings of the local CPU engine."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from occamy.contracts.record import Record


class EngineConfig(Record):
    """How one local engine process runs. All values are our choice."""

    max_running: int = Field(default=128, ge=1)
    """Sequences that generate at the same time; later requests wait in order of arrival."""
    cached_rows: int = Field(default=64, ge=2)
    """Further sequences whose keys and values stay in memory after they finished, for prefix re-use."""
    context_length: int | None = Field(default=None, ge=2)
    """Tokens of input plus output that a request may have; None takes `max_position_embeddings` of the model."""
    prefill_tokens: int = Field(default=512, ge=1)
    """Prompt tokens computed per step, over all requests; bounds the pause that a long prompt causes to the others."""
    threads: int = Field(default=1, ge=1)
    """torch threads of the generation loop."""
    deterministic: bool = False
    """Same seed and weights give the same ids and log-probs to the last bit, whatever else runs; about half as fast."""

    @model_validator(mode="after")
    def _one_thread(self) -> Self:
        if self.deterministic and self.threads != 1:
            raise ValueError(f"deterministic needs threads = 1, not {self.threads}: threads cut sums at other places")
        return self
