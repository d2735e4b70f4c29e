"""torch's AdamW, SGD and Adagrad on this rank's tensors, with state by one-device name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallelrun.config.schema import OptimizerConfig
from parallelrun.errors import ConfigError, Problem
from parallelrun.plan.optimizers import OPTIMIZERS
from parallelrun.plan.parameters import LocalParameter

STEP = "step"


class Optimizer:
    """Updates local tensors. Weight decay applies to logical tensors of two or more dims, not to biases and norms."""

    def __init__(self, config: OptimizerConfig, parameters: Sequence[LocalParameter]):
        self._tensors = {parameter.name: parameter.tensor for parameter in parameters}
        assert len(self._tensors) == len(parameters), "two parameters of one rank have the same name"
        decayed = [p.tensor for p in parameters if len(p.spec.shape) >= 2]
        plain = [p.tensor for p in parameters if len(p.spec.shape) < 2]
        groups = [
            {"params": tensors, "weight_decay": decay}
            for tensors, decay in ((decayed, config.weight_decay), (plain, 0.0))
            if tensors
        ]
        self._torch = _make(config, groups) if groups else None  # a stage may have only frozen parameters

    def step(self, lr: float) -> None:
        """Update every tensor by its `.grad` with the learning rate `lr`."""
        if self._torch is None:
            return
        for group in self._torch.param_groups:
            group["lr"] = lr
        self._torch.step()

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the live state of one parameter by kind: of the tensor's shape (`exp_avg`, ...) or 0-d (`step`).

        It is empty before the first step (except for Adagrad) and for SGD without momentum. Raises KeyError.
        """
        found = self._torch.state.get(self._tensors[name], {}) if self._torch else {}
        return {key: value for key, value in found.items() if isinstance(value, Tensor)}

    def load_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Set the state of one parameter to copies of the tensors of `state`, in any dtype. Raises KeyError."""
        tensor = self._tensors[name]
        loaded = {}
        for key, value in state.items():
            if value.dim() and value.shape != tensor.shape:
                raise ValueError(f"{key} of {name} has shape {tuple(value.shape)}, its part here {tuple(tensor.shape)}")
            # torch's Adam needs its step in fp32; the fused update needs it on the device.
            dtype = torch.float32 if key == STEP else tensor.dtype
            loaded[key] = value.detach().to(device=tensor.device, dtype=dtype).clone()
        if loaded and self._torch:
            self._torch.state[tensor] = loaded


def _make(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the torch optimizer, fused if torch supports it on the device. Raises ConfigError."""
    if config.name == "adamw":
        beta1, beta2 = config.betas
        return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=True)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    if config.name == "adagrad":
        on_cpu = all(tensor.device.type == "cpu" for group in groups for tensor in group["params"])
        return torch.optim.Adagrad(
            groups, lr=config.lr, eps=config.eps, fused=on_cpu or None
        )  # torch has fused Adagrad only on CPU
    fix = " or ".join(f"optimizer={kind}" for kind in OPTIMIZERS)
    raise ConfigError(Problem(f"unknown optimizer.name={config.name}", "optimizer", fix))
