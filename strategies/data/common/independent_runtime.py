"""The shared runtime of independent replicas: gradients and updates are local between synchronisations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Mesh
from parallelrun.planner.contract.plan import SYNC, Plan
from parallelrun.training.loop.data_runtime import DataRuntime, Pair, match
from parallelrun.training.loop.flat_tensors import bucket_pairs, flatten, unflatten

from .independent_plan import IndependentReplicas


class IndependentRuntime(DataRuntime):
    """Trains one replica by itself. `synchronise` is called at the end of every step after which replicas `meet`."""

    @classmethod
    def attach(cls, parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> DataRuntime:
        return cls(match(parts, plan, mesh), plan, mesh)  # DiLoCo has an outer step at dp=1 too

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh):
        super().__init__(pairs, plan, mesh)
        self._strategy, self._group = IndependentReplicas.of(plan), mesh.group("dp")
        self._weights = [parameter.tensor.detach() for parameter in self.parameters]
        self._buckets = [[weight.detach() for _, weight in own] for _, own in bucket_pairs(pairs, plan)[0]]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self._strategy.meets(step):
            self.synchronise()

    def synchronise(self) -> None:
        """Exchange with the other replicas, here their weights. Called without autograd."""
        self.average()

    def average(self) -> None:
        """Replace each weight by its mean over replicas, bitwise equal on all of them.

        Two buckets are pending at a time. Their flat copies are the only additional memory.
        """
        pending: list[tuple[Tensor, list[Tensor], dist.Work | None]] = []
        for weights in self._buckets:
            flat = flatten(weights)
            pending.append((flat, weights, comm.all_reduce(flat, self._group, SYNC, async_op=True)))
            if len(pending) == 2:
                self._finish(*pending.pop(0))
        for exchange in pending:
            self._finish(*exchange)

    def _finish(self, flat: Tensor, weights: list[Tensor], work: dist.Work | None) -> None:
        assert work is not None, "a group of one averages nothing"
        work.wait()
        unflatten(flat.div_(self._group.size), weights)
