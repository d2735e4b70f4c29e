"""DiLoCo at run time: every H steps the mean movement of the replicas is the gradient of an outer Nesterov SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from parallelrun.distributed.mesh import Mesh
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.data_runtime import Pair

from ..common.independent_runtime import IndependentRuntime
from .plan import DiLoCo

SHARED, MOMENTUM = "outer/shared", "outer/momentum"


class DiLoCoRuntime(IndependentRuntime):
    """shared: the weights with which all replicas began the round; momentum: of the outer optimizer."""

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh):
        super().__init__(pairs, plan, mesh)
        self._outer = DiLoCo.of(plan)
        self._shared = [weight.clone() for weight in self._weights]
        self._momentum = [torch.zeros_like(weight) for weight in self._weights]
        self.kept = {
            kind: [replace(p, tensor=tensor) for p, tensor in zip(self.parameters, tensors)]
            for kind, tensors in ((SHARED, self._shared), (MOMENTUM, self._momentum))
        }

    def synchronise(self) -> None:
        """Take the outer step; every replica continues from the new shared weights."""
        for weight, shared in zip(self._weights, self._shared):
            torch.sub(shared, weight, out=weight)  # the storage of the weights carries the movement
        self.average()
        outer = self._outer
        for movement, shared, momentum in zip(self._weights, self._shared, self._momentum):
            momentum.mul_(outer.outer_momentum).add_(movement)
            step = movement.add_(momentum, alpha=outer.outer_momentum) if outer.outer_nesterov else momentum
            shared.sub_(step, alpha=outer.outer_lr)
            movement.copy_(shared)

    @torch.no_grad()
    def after_load(self, kinds: Sequence[str]) -> None:
        """Begin a round with the loaded weights, if the checkpoint of another strategy has no outer state."""
        if SHARED in kinds:
            return
        for weight, shared, momentum in zip(self._weights, self._shared, self._momentum):
            shared.copy_(weight)
            momentum.zero_()


RUNTIME = DiLoCoRuntime
