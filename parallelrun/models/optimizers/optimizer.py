"""The optimizer of this rank's tensors, with state by one-device name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.run_schema import OptimizerConfig
from parallelrun.distributed import torch_private
from parallelrun.distributed.mesh import Mesh
from parallelrun.models import host_copies
from parallelrun.models.optimizers.muon import Muon
from parallelrun.planner.contract.optimizers import ADAMW, MUON, OPTIMIZERS, is_matrix, muon_matrices
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.contract.plan import Plan

STEP = "step"


class Optimizer:
    """Updates local tensors. Weight decay applies to logical matrices, not to biases and norms."""

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Sequence[LocalParameter],
        plan: Plan | None = None,
        mesh: Mesh | None = None,
    ):
        """parameters: contiguous, as their gradients in `step`: torch's fused updates do not look at strides.
        plan, mesh: Muon needs them."""
        self._tensors = {parameter.name: parameter.tensor for parameter in parameters}
        strided = [name for name, tensor in self._tensors.items() if not tensor.is_contiguous()]
        assert not strided, f"not contiguous: {strided}"
        assert len(self._tensors) == len(parameters), "two parameters of one rank have the same name"
        matrices: list[LocalParameter] = []
        if config.name == MUON and plan and mesh:
            config, own = replace(config, name=ADAMW), (config, plan, mesh)
            matrices = [p for p in parameters if p.spec.name in muon_matrices(plan)]
        names = {p.name for p in matrices}
        decayed = [p.tensor for p in parameters if is_matrix(p.spec) and p.name not in names]
        plain = [p.tensor for p in parameters if not is_matrix(p.spec)]
        groups = [
            {"params": tensors, "weight_decay": decay}
            for tensors, decay in ((decayed, config.weight_decay), (plain, 0.0))
            if tensors
        ]
        others: Any = _make(config, groups) if groups else None  # a stage may have only frozen parameters
        muon: Any = Muon(matrices, *own) if matrices else None
        self._updates = [update for update in (others, muon) if update]
        self._update_of = {name: muon if name in names else others for name in self._tensors}
        self._is_first = True

    def step(self, lr: float) -> None:
        """Update every tensor by its `.grad` with the learning rate `lr`."""
        for group in [group for update in self._updates for group in update.param_groups]:
            group["lr"] = lr
        if self._is_first:  # later, another look at every gradient would cost more than it could tell
            strided = [n for n, p in self._tensors.items() if p.grad is not None and not p.grad.is_contiguous()]
            assert not strided, f"gradients that are not contiguous: {strided}"
        self._is_first = False
        for update in self._updates:
            update.step()

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the live state of one parameter by kind: of the tensor's shape (`exp_avg`, ...) or 0-d (`step`).

        It is empty before the first step (except for Adagrad) and for SGD without momentum. Raises KeyError.
        """
        state = self._update_of[name].state.get(self._tensors[name], {})
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def load_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Set the state of one parameter to copies of the tensors of `state`, in any dtype. Raises KeyError."""
        tensor = self._tensors[name]
        loaded = {}
        for key, value in state.items():
            if value.dim() and value.shape != tensor.shape:
                raise ValueError(f"{key} of {name} has shape {tuple(value.shape)}, its part here {tuple(tensor.shape)}")
            # torch's Adam needs its step in fp32; the fused update needs it on the device.
            dtype = torch.float32 if key == STEP else tensor.dtype
            value = value.detach().to(device=tensor.device, dtype=dtype)
            loaded[key] = value.clone(memory_format=torch.contiguous_format)
        if loaded:
            self._update_of[name].state[tensor] = loaded


class OffloadedOptimizer(Optimizer):
    """The same with its state and update on the host. Gradients and weights are copied there in each step, because
    others may have changed the weights, and the updated weights are copied back."""

    def __init__(self, config: OptimizerConfig, parameters: Sequence[LocalParameter], *more: Any):
        self._on_device = [parameter.tensor for parameter in parameters]
        on_host = [replace(p, tensor=host_copies.host_copy(p.tensor)) for p in parameters]
        super().__init__(config, on_host, *more)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        both = list(zip(self._on_device, self._tensors.values()))
        for tensor, host in both:
            host.copy_(tensor, non_blocking=True)
            assert tensor.grad is not None
            if host.grad is None:
                host.grad = host_copies.host_copy(tensor.grad)
            else:
                host.grad.copy_(tensor.grad, non_blocking=True)
        if any(tensor.is_cuda for tensor, _ in both):
            torch.cuda.synchronize()
        super().step(lr)
        for tensor, host in both:
            tensor.copy_(host, non_blocking=True)


class Lion:
    """Lion (Chen et al. 2023): the sign of an interpolated momentum, with decoupled weight decay."""

    def __init__(self, groups: list[dict[str, Any]], betas: Sequence[float]):
        self.param_groups, self._betas = groups, betas
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update every tensor by its `.grad`."""
        first, second = self._betas
        for group in self.param_groups:
            for tensor in group["params"]:
                state = self.state.setdefault(tensor, {})
                if not state:
                    state["exp_avg"] = torch.zeros_like(tensor)
                average = state["exp_avg"]
                tensor.mul_(1 - group["lr"] * group["weight_decay"])
                tensor.add_(average.lerp(tensor.grad, 1 - first).sign_(), alpha=-group["lr"])
                average.lerp_(tensor.grad, 1 - second)


def _make(config: OptimizerConfig, groups: list[dict[str, Any]]) -> Any:
    """Return the elementwise optimizer, torch's fused one if there is one for the device. Raises ConfigError."""
    on_cpu = all(tensor.device.type == "cpu" for group in groups for tensor in group["params"])
    if config.name == "lion":
        return Lion(groups, config.betas)
    options: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, {"betas": tuple(config.betas), "eps": config.eps, "fused": True}),
        "sgd": (torch.optim.SGD, {"momentum": config.momentum, "fused": True}),
        "adagrad": (torch.optim.Adagrad, {"eps": config.eps, "fused": on_cpu or None}),  # not fused on GPUs
    }
    if config.name not in options:
        fix = " or ".join(f"optimizer={kind}" for kind in OPTIMIZERS)
        raise ConfigError(Problem(f"unknown optimizer.name={config.name}", "optimizer", fix))
    kind, values = options[config.name]
    make: Any = torch_private.uncompiled(kind)
    return make(groups, lr=config.lr, **values)
