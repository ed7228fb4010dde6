"""Value functions over the states before policy tokens: SAO's separate copy of the policy, or a head on its trunk.

Import it only after `occamy.training.device.prepare()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import GELU, Linear, Module, Sequential

from occamy.training.learner import Learner
from occamy.training.losses import LossOutput, critic_loss
from occamy.training.model import PolicyModel
from occamy.training.packing import Pack
from occamy.training.rl_config import CriticConfig


class Critic(Protocol):
    """Estimates returns. `packs` hold this rank's share; all tensors [m] follow a pack's targets."""

    def values(self, policy: PolicyModel, packs: Sequence[Pack]) -> list[Tensor]:
        """V of the state before each target, one float32 [m] per pack, without gradient."""

    def learn(self, packs: Sequence[Pack], targets: Sequence[Tensor], tokens: int, batch: int) -> dict[str, Tensor]:
        """K updates towards `targets` on batch number `batch` (from 1), after `values` of the same packs.

        `tokens` counts the policy tokens of the global batch. Returns figures as sums over this rank's share.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class ValueModel(MegatronModule):
    """A decoder trunk with a scalar head in place of its output layer."""

    def __init__(self, trunk: PolicyModel) -> None:
        super().__init__(config=trunk.config)
        self.trunk = trunk
        self.head = _starting_at_zero(Linear(trunk.config.hidden_size, 1))

    def forward(self, pack: Pack) -> Tensor:
        """Value [m] of the state before each target."""
        value: Tensor = self.head(self.trunk.hidden(pack).float())
        return value.squeeze(-1)


class ValueHead(MegatronModule):
    """A network with one hidden layer over hidden states that were computed elsewhere."""

    def __init__(self, policy: PolicyModel, width: int) -> None:
        super().__init__(config=policy.config)
        last = _starting_at_zero(Linear(width, 1))
        self.layers = Sequential(Linear(policy.config.hidden_size, width), GELU(), last)

    def forward(self, states: Tensor) -> Tensor:
        """Value [m] of states [m, hidden]."""
        value: Tensor = self.layers(states)
        return value.squeeze(-1)


class SeparateCritic:
    """SAO's critic: an own copy of the policy checkpoint with a scalar head, trained whole; one step per update."""

    def __init__(self, trunk: PolicyModel, config: CriticConfig, batches: int) -> None:
        """`trunk`: a model of its own with the policy checkpoint's weights. `batches`: how many the stage trains on."""
        model = ValueModel(trunk).to(next(trunk.parameters()).device)
        self._learner = Learner(model, config.optimiser, batches * config.updates)
        self._updates = config.updates

    def values(self, policy: PolicyModel, packs: Sequence[Pack]) -> list[Tensor]:
        """See Critic; the policy is not used."""
        with torch.no_grad():
            return [self._learner.model(pack) for pack in packs]

    def learn(self, packs: Sequence[Pack], targets: Sequence[Tensor], tokens: int, batch: int) -> dict[str, Tensor]:
        """See Critic."""
        figures: dict[str, Tensor] = {}
        for _ in range(self._updates):
            self._learner.begin()
            outputs = []
            for pack, target in zip(packs, targets, strict=True):
                output = _regression(self._learner.model(pack), target, tokens)
                self._learner.backward(output.loss)
                outputs.append(output)
            self._learner.finish()
            figures = _sums(outputs)
        return figures

    def state_dict(self) -> dict[str, Any]:
        """See Critic."""
        return self._learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Critic."""
        self._learner.load_state_dict(state)


class SharedDetachedCritic:
    """A small network on the policy's hidden states: costs no backward pass of the trunk and never trains it."""

    def __init__(self, policy: PolicyModel, config: CriticConfig, batches: int, *, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = ValueHead(policy, config.head_width).to(next(policy.parameters()).device)
        self._config = config
        self._seed = seed
        self._learner = Learner(head, config.optimiser, batches)
        self._states: list[Tensor] = []

    def values(self, policy: PolicyModel, packs: Sequence[Pack]) -> list[Tensor]:
        """See Critic. Keeps the hidden states for the following `learn`."""
        with torch.no_grad():
            self._states = [policy.hidden(pack).float() for pack in packs]
            return [self._learner.model(states) for states in self._states]

    def learn(self, packs: Sequence[Pack], targets: Sequence[Tensor], tokens: int, batch: int) -> dict[str, Tensor]:
        """See Critic. One update is a pass over the tokens in random minibatches, each of them an optimiser step."""
        if len(self._states) != len(packs):
            raise RuntimeError(f"{len(packs)} packs, but hidden states of {len(self._states)}; call values() first")
        device = next(self._learner.model.parameters()).device
        states = torch.cat([torch.zeros(0, self._learner.model.config.hidden_size, device=device), *self._states])
        wanted = torch.cat([torch.zeros(0, device=device), *targets])
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + batch)
        parts = max(1, -(-tokens // self._config.minibatch_tokens))
        outputs: list[LossOutput] = []
        for _ in range(self._config.updates):
            order = torch.randperm(len(wanted), generator=generator)
            outputs = []
            for index in order.to(device).tensor_split(parts):
                self._learner.step = batch - 1  # the rate follows batches: minibatches to come are not known
                self._learner.begin()
                output = _regression(self._learner.model(states[index]), wanted[index], tokens / parts)
                self._learner.backward(output.loss)
                self._learner.finish()
                outputs.append(output)
        self._states = []
        return {name: value / parts for name, value in _sums(outputs).items()}

    def state_dict(self) -> dict[str, Any]:
        """See Critic."""
        return self._learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Critic."""
        self._learner.load_state_dict(state)


def _starting_at_zero(layer: Linear) -> Module:
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    return layer


def _regression(values: Tensor, targets: Tensor, tokens: float) -> LossOutput:
    return critic_loss(values, targets, torch.ones_like(values, dtype=torch.bool), tokens=tokens)


def _sums(outputs: Sequence[LossOutput]) -> dict[str, Tensor]:
    """Add up the figures of micro-batches."""
    out: dict[str, Tensor] = {}
    for output in outputs:
        for name, value in output.sums.items():
            out[name] = out[name] + value if name in out else value
    return out
