"""Updates of weights that are stored in bf16 alone, without copies in fp32, by stochastic rounding.

Rounded to nearest, a weight would never move by less than half of its last bit. Here it moves by that bit as often as
the update is a part of it (Gupta et al. 2015). The random bits are a hash of the step and the element's place in the
logical tensor, so that shards, replicas and resumed runs round alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parallelrun.config.schema.run_schema import OptimizerConfig
from parallelrun.distributed.mesh import Mesh
from parallelrun.models import dropout
from parallelrun.models.optimizers.optimizer import STEP, Optimizer
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.contract.plan import Plan


class RoundedOptimizer(Optimizer):
    """One weight after the other is widened, updated with its state in fp32, and rounded: beside weights and state
    there are copies of a single tensor."""

    def __init__(self, config: OptimizerConfig, parameters: Sequence[LocalParameter], plan: Plan, mesh: Mesh):
        wide = [replace(parameter, tensor=parameter.tensor.detach().float()) for parameter in parameters]
        self._parameters, self._sizes, self._coordinate = parameters, plan.mesh.sizes, mesh.coordinate
        self._tensors = {parameter.name: parameter.tensor for parameter in wide}
        self._update_of = {p.name: Optimizer(config, [p])._updates[0] for p in wide}
        for tensor in self._tensors.values():
            tensor.untyped_storage().resize_(0)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for parameter in self._parameters:
            tensor, wide, update = parameter.tensor, self._tensors[parameter.name], self._update_of[parameter.name]
            assert tensor.grad is not None
            wide.untyped_storage().resize_(wide.nbytes)
            wide.copy_(tensor)
            wide.grad, update.param_groups[0]["lr"] = tensor.grad.float(), lr
            update.step()
            wide.grad = None
            step = update.state[wide][STEP].to(wide.device, torch.int64)
            wide.view(torch.int32).add_(self._random_bits(parameter, step)).bitwise_and_(-0x10000)  # as bf16 has
            tensor.copy_(wide)
            wide.untyped_storage().resize_(0)

    def _random_bits(self, parameter: LocalParameter, step: Tensor) -> Tensor:
        """int32 numbers of 16 bits, of the local shape. step: int64, 0-d."""
        shape, rows = parameter.spec.shape, step.new_zeros(1)
        ranges = parameter.layout.ranges(shape, self._sizes, self._coordinate)
        *others, columns = (torch.arange(*bounds, device=step.device) for bounds in ranges)
        for size, places in zip(shape, others):
            rows = (rows.unsqueeze(1) * size + places).flatten()
        key = dropout.site_key(0, f"rounding/{parameter.spec.name}")
        bits = dropout.random_bits(key, step.view(1), rows, columns)
        return bits.bitwise_and_(0xFFFF).view(parameter.tensor.shape)
