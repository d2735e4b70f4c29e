"""The shared runtime of independent replicas: gradients and updates are local between synchronisations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from parallelrun.distributed.mesh import Mesh
from parallelrun.planner.contract.plan import SYNC, Plan
from parallelrun.training.loop.data_runtime import DataRuntime, Pair, match
from parallelrun.training.loop.flat_tensors import sum_buckets

from .independent_plan import IndependentReplicas
from .worker_runtime import WorkerRuntime


class IndependentRuntime(WorkerRuntime):
    """Trains one replica by itself. `synchronise` is called at the end of every step after which replicas `meet`."""

    @classmethod
    def attach(cls, parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> DataRuntime:
        return cls(match(parts, plan, mesh), plan, mesh)  # DiLoCo has an outer step at dp=1 too

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh):
        super().__init__(pairs, plan, mesh)
        self._strategy = IndependentReplicas.of(plan)
        self._weights = [parameter.tensor.detach() for parameter in self.parameters]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self._strategy.meets(step):
            self.synchronise()

    def synchronise(self) -> None:
        """Exchange with the other replicas, here their weights. Called without autograd."""
        self.average()

    def average(self) -> None:
        """Replace each weight by its mean over replicas, bitwise equal on all of them."""
        group = self._mesh.group(self._plan.worker_axis)
        sum_buckets([[weight.detach() for _, weight in own] for own in self._buckets], group, SYNC, group.size)
