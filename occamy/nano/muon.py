"""Muon for hidden matrices (stacks of experts included), AdamW for embeddings, routers and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of each matrix g [..., R, C] towards 1: the quintic iteration of Muon (Jordan, 2024)."""
    a, b, c = _NEWTON_SCHULZ
    tall = g.shape[-2] > g.shape[-1]
    x = g.transpose(-1, -2) if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.transpose(-1, -2)
        x = a * x + (b * s + c * s @ s) @ x
    result: Tensor = x.transpose(-1, -2) if tall else x
    return result


class Muon:
    """Nesterov momentum, orthogonalised per matrix, scaled by 0.2*sqrt(max side) (Moonlight); torch.optim.Muon takes
    2-D tensors only, expert stacks here are 3-D. Learning rates and decay are our choice."""

    def __init__(
        self, weights: dict[str, Tensor], lr: float = 3e-3, momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        self.lr, self.momentum, self.decay = lr, momentum, decay
        hidden = [n for n, p in weights.items() if p.ndim >= 2 and "embed" not in n and "gate.weight" not in n]
        self.matrices = [weights[n] for n in hidden]
        self.velocity = [torch.zeros_like(p) for p in self.matrices]
        rest = [p for n, p in weights.items() if n not in set(hidden)]
        self.adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply one update with learning rates scaled by `factor`, then clear the gradients."""
        for p, v in zip(self.matrices, self.velocity, strict=True):
            if p.grad is None:
                continue
            v.mul_(self.momentum).add_(p.grad)
            update = orthogonalise(p.grad + self.momentum * v)
            p.mul_(1 - self.lr * factor * self.decay)
            p.add_(update, alpha=-self.lr * factor * 0.2 * max(p.shape[-2:]) ** 0.5)
            p.grad = None
        for group in self.adam.param_groups:
            group["lr"] = self.lr * factor
        self.adam.step()
        self.adam.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """State for resuming."""
        return {"velocity": self.velocity, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict returned."""
        self.velocity = state["velocity"]
        self.adam.load_state_dict(state["adam"])
