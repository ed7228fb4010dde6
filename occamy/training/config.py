"""Settings of supervised fine-tuning. "paper" is the source the recipe follows, "our choice" is ours."""

from __future__ import annotations

from pydantic import Field, model_validator

from occamy.contracts.record import Record


class OptimiserConfig(Record):
    """AdamW with linear warm-up, cosine decay and gradient clipping."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate (paper: 1e-5)."""
    min_lr: float = Field(default=2e-7, ge=0)
    """Learning rate at the last step (paper: 2e-7)."""
    warmup_steps: int = Field(default=5, ge=0)
    """Steps of linear warm-up from lr/warmup_steps to lr (our choice)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment (our choice)."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment (our choice)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only (our choice)."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global gradient norm; larger gradients are scaled down to it (our choice)."""

    @model_validator(mode="after")
    def _ordered(self) -> OptimiserConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}; lower it")
        return self


class SFTConfig(Record):
    """Supervised fine-tuning on demonstrations."""

    optimiser: OptimiserConfig = OptimiserConfig()
    epochs: int = Field(default=5, ge=1)
    """Passes over the demonstrations (paper: 5)."""
    batch_sequences: int = Field(default=16, ge=1)
    """Sequences in a global batch, over all ranks and packs (our choice). The last batch of an epoch may be smaller."""
    max_length: int = Field(default=4096, ge=2)
    """Tokens in a pack (paper: 131,072). Longer sequences are rejected and counted, never cut."""
    aux_loss_coefficient: float = Field(default=0.001, ge=0)
    """Weight of the experts' load-balancing loss; 0 switches it off (our choice)."""
    freeze: tuple[str, ...] = ()
    """Shell patterns over megatron parameter names that do not train, like "embedding.*" (paper: the vision tower)."""
    successful_only: bool = True
    """Leave out demonstrations that did not reach their task's goals (our choice)."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Optimiser steps between saved trainer states (our choice)."""
    processes: int = Field(default=1, ge=1)
    """Data-parallel trainer processes on this machine (our choice)."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per process; more than one may change the last bits of the result (our choice)."""
