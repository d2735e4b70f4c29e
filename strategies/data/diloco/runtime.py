"""DiLoCo at run time: every H steps the mean movement of the replicas is the gradient of an outer Nesterov SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from parallelrun.mesh import Group, Mesh
from parallelrun.plan.structure import Plan

from ..local import LocalRuntime, Pair, match
from ..local_sgd.runtime import IndependentRuntime, shard
from .settings import DilocoWay

__all__ = ["attach", "shard"]

SHARED, MOMENTUM = "outer/shared", "outer/momentum"


def attach(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> LocalRuntime:
    """The DataRuntime over materialised weights."""
    return DilocoRuntime(match(parts, plan, mesh), plan, mesh.group("dp"))


class DilocoRuntime(IndependentRuntime):
    """shared: the weights that all replicas began the round with; momentum: the outer optimizer's. Alike everywhere."""

    def __init__(self, pairs: Sequence[Pair], plan: Plan, group: Group):
        super().__init__(pairs, plan, group)
        assert isinstance(plan.data, DilocoWay)
        self._outer = plan.data
        self._shared = [weight.clone() for weight in self._weights]
        self._momentum = [torch.zeros_like(weight) for weight in self._weights]
        self.kept = {
            kind: [replace(p, tensor=tensor) for p, tensor in zip(self.parameters, tensors)]
            for kind, tensors in ((SHARED, self._shared), (MOMENTUM, self._momentum))
        }

    def synchronise(self) -> None:
        """The outer step; everyone goes on from the new shared weights."""
        for weight, shared in zip(self._weights, self._shared):
            torch.sub(shared, weight, out=weight)  # the storage of the weights carries the movement
        self.average(self._weights)
        outer = self._outer
        for movement, shared, momentum in zip(self._weights, self._shared, self._momentum):
            momentum.mul_(outer.outer_momentum).add_(movement)
            step = movement.add_(momentum, alpha=outer.outer_momentum) if outer.outer_nesterov else momentum
            shared.sub_(step, alpha=outer.outer_lr)
            movement.copy_(shared)

    @torch.no_grad()
    def after_load(self, kept: Sequence[str]) -> None:
        """A checkpoint of another way has no outer state: a round begins with the weights it has."""
        if SHARED in kept:
            return
        for weight, shared, momentum in zip(self._weights, self._shared, self._momentum):
            shared.copy_(weight)
            momentum.zero_()
