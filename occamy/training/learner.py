"""A model in training: data-parallel gradients (megatron), AdamW, schedule and clipping. Losses live elsewhere.

One step is: `begin()`, any number of `backward(loss)`, `finish()`. A loss handed to `backward` is already divided by
the normaliser of the whole global batch; gradients are summed over packs and ranks and never divided again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Generic, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from occamy.training.config import OptimiserConfig
from occamy.training.schedule import cosine_with_warmup

Model = TypeVar("Model", bound=MegatronModule)


@dataclass(frozen=True)
class StepFacts:
    """What one optimiser step did."""

    step: int
    """0-based number of the step just taken."""
    lr: float
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""


class Learner(Generic[Model]):
    """Owns a model's gradients and optimiser state. Any module with a megatron `config` will do (policy or critic)."""

    def __init__(self, model: Model, config: OptimiserConfig, total_steps: int, freeze: Sequence[str] = ()) -> None:
        """Prepare `model` for `total_steps` optimiser steps; `freeze` holds shell patterns over parameter names.

        Raises ValueError for a pattern that matches no parameter, or patterns that leave nothing to train.
        """
        self.model, self.config, self.total_steps = model, config, total_steps
        self.step = 0
        """Number of optimiser steps taken so far."""
        _freeze(model, freeze)
        plain = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        self._parallel = DistributedDataParallel(model.config, plain, model)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in self._trained if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in self._trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        # The fused form is one pass over each tensor; the others take several.
        self._optimiser = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.epsilon, fused=True
        )

    def begin(self) -> None:
        """Clear all gradients."""
        self._parallel.zero_grad_buffer()

    def backward(self, loss: Tensor, *, aux_share: float = 0.0) -> None:
        """Add the gradient of one pack's loss.

        Pass `aux_share` = 1 / tokens of the global batch: megatron multiplies a pack's load-balancing loss by the
        pack's tokens, so that it enters once per step, as the token-weighted mean over packs. 0 leaves it out.
        """
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(aux_share, device=loss.device))
        loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> StepFacts:
        """Sum gradients over ranks, clip, and take one step.

        Raises FloatingPointError, with the weights untouched, when the gradient is not finite, and ValueError after
        `total_steps` steps.
        """
        adam = self.config
        lr = cosine_with_warmup(self.step, self.total_steps, peak=adam.lr, floor=adam.min_lr, warmup=adam.warmup_steps)
        finalize_model_grads([self._parallel])
        norm = self._clip()
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"optimiser step {self.step}: the gradient norm is {norm}; lower lr {adam.lr} or check the data"
            )
        for group in self._optimiser.param_groups:
            group["lr"] = lr
        for parameter in self._trained:
            parameter.grad = parameter.main_grad
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return StepFacts(self.step - 1, lr, norm)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs: weights, optimiser moments, step."""
        weights = {name: p for name, p in self.model.state_dict().items() if isinstance(p, Tensor)}
        return {"step": self.step, "model": weights, "optimiser": self._optimiser.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, bit for bit."""
        self.model.load_state_dict(state["model"], strict=False)  # megatron's *_extra_state entries are empty
        self._optimiser.load_state_dict(state["optimiser"])
        self.step = int(state["step"])

    def _clip(self) -> float:
        buffers = [b.grad_data for b in self._parallel.buffers + self._parallel.expert_parallel_buffers]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(b) for b in buffers]))
        if norm > self.config.clip_norm:
            for b in buffers:
                b.mul_(self.config.clip_norm / (norm + 1e-6))
        return float(norm)


def _freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    names = dict(model.named_parameters())
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise ValueError(f"freeze pattern {pattern!r} matches no parameter; names look like {next(iter(names))!r}")
        for name in hits:
            names[name].requires_grad_(False)
    if not any(p.requires_grad for p in names.values()):
        raise ValueError(f"freeze patterns {list(patterns)} leave nothing to train; remove one")
