"""The tensors that are a training's state, and a copy of them in host memory to which it can return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallelrun.distributed import torch_private
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.data_runtime import match
from parallelrun.training.loop.schedules import LossScaler


def stored_weights(training: Training) -> dict[str, LocalParameter]:
    """Return the weights of this rank's stages as its modules store them, with their layouts.

    They are `training.held` itself unless the optimizer updates copies of chunks (ZeRO).
    """
    plan, data = training.plan, training.plan.data
    stored = {}
    for p, weight in match(training.model_parts, plan, training.mesh):
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        layout = data.weight_layout(p.spec, p.layout, plan)
        stored[p.name] = LocalParameter(p.name, local.detach(), p.spec, layout, p.shared)
    return stored


def weights_at_rest(training: Training) -> dict[str, Tensor]:
    """Return every tensor that stores weights and that only the update may change, by name."""
    tensors = {name: parameter.tensor for name, parameter in stored_weights(training).items()}
    if training.plan.data.independent:  # an evaluation averages running statistics
        for parameter in training.data.frozen:
            del tensors[parameter.name]
    pointers = {tensor.data_ptr() for tensor in tensors.values()}
    for parameter in training.parameters:
        if parameter.tensor.numel() and parameter.tensor.data_ptr() not in pointers:
            tensors[f"{parameter.name} (updated part)"] = parameter.tensor.detach()
    return tensors


def state_of(training: Training) -> dict[str, Tensor]:
    """Return the live tensors that a step reads and changes: weights, the optimizer's and the strategy's state."""
    tensors = {f"{parameter.name} weight": parameter.tensor.detach() for parameter in training.held}
    for parameter in training.parameters:
        state = training.optimizer.state(parameter.name)
        tensors |= {f"{parameter.name} {kind}": tensor for kind, tensor in state.items()}
    for kind, parameters in training.data.kept.items():
        tensors |= {f"{parameter.name} kept {kind}": parameter.tensor.detach() for parameter in parameters}
    return tensors


class Snapshot:
    """A copy of a training's state after one step, in host memory. `step` is that step."""

    def __init__(self, training: Training, scaler: LossScaler):
        self._training, self._scaler = training, scaler
        self._copies: dict[str, Tensor] = {}
        self._scaling: dict[str, Any] = {}
        self.step = 0

    @torch.no_grad()
    def take(self, step: int) -> None:
        """Copy the state after `step` over the last copy."""
        live = state_of(self._training)
        for name in live.keys() - self._copies.keys():
            self._copies[name] = torch.empty_like(live[name], device="cpu")
        torch_private.copy_all([self._copies[name] for name in live], [*live.values()])
        self._scaling, self.step = self._scaler.state(), step

    @torch.no_grad()
    def restore(self) -> int:
        """Return the training to the copied state; return its step. Collective where weights are gathered.

        State that the optimizer has created since then begins with zeros, as when it is created.
        """
        self._training.data.drop_step()  # an update that was skipped
        for name, tensor in state_of(self._training).items():
            copy = self._copies.get(name)
            tensor.zero_() if copy is None else tensor.copy_(copy)
        self._scaler.load_state(self._scaling)
        self._training.data.finish_update()
        return self.step
