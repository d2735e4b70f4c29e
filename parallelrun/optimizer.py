"""torch's AdamW, SGD and Adagrad on this rank's parts, with state by one-device name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallelrun.config.schema import OptimizerConfig
from parallelrun.errors import ConfigError, Problem
from parallelrun.plan.optimizers import OPTIMIZERS
from parallelrun.plan.parameters import LocalParameter

STEP = "step"


class Optimizer:
    """Steps local tensors. Weight decay applies to logical tensors of two or more dims: not to biases and norms."""

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
        self._torch = _make(config, groups) if groups else None  # a stage may have frozen parameters only

    def step(self, lr: float) -> None:
        """Update every tensor by its `.grad` at learning rate `lr`."""
        if self._torch is None:
            return
        for group in self._torch.param_groups:
            group["lr"] = lr
        self._torch.step()

    def state(self, name: str) -> dict[str, Tensor]:
        """The state of one parameter, by what it is (`exp_avg`, ...), each of the tensor's shape, or 0-d (`step`).

        The live tensors, not copies. Empty before the first step (Adagrad's are zeros), and for SGD without momentum.
        Raises KeyError.
        """
        found = self._torch.state.get(self._tensors[name], {}) if self._torch else {}
        return {key: value for key, value in found.items() if isinstance(value, Tensor)}

    def load_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Take over `state` (as `state` gave it, perhaps under another plan) for one parameter. Raises KeyError."""
        tensor = self._tensors[name]
        taken = {}
        for key, value in state.items():
            if value.dim() and value.shape != tensor.shape:
                raise ValueError(f"{key} of {name} has shape {tuple(value.shape)}, its part here {tuple(tensor.shape)}")
            # torch keeps the step of Adam in fp32, on the device only when the update is fused there.
            dtype = torch.float32 if key == STEP else tensor.dtype
            taken[key] = value.detach().to(device=tensor.device, dtype=dtype).clone()
        if taken and self._torch:
            self._torch.state[tensor] = taken


def _make(config: OptimizerConfig, groups: list[dict]) -> torch.optim.Optimizer:
    """The torch optimizer, fused where it is built for the device (CPU and CUDA are). Raises ConfigError."""
    if config.name == "adamw":
        beta1, beta2 = config.betas
        return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=True)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    if config.name == "adagrad":
        on_cpu = all(tensor.device.type == "cpu" for group in groups for tensor in group["params"])
        return torch.optim.Adagrad(groups, lr=config.lr, eps=config.eps, fused=on_cpu or None)  # built for CPU alone
    fix = " or ".join(f"optimizer={kind}" for kind in OPTIMIZERS)
    raise ConfigError(Problem(f"unknown optimizer.name={config.name}", "optimizer", fix))
