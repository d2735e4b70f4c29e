"""The base of runtimes whose workers have gradients of their own, which are not summed over all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from parallelrun.distributed.mesh import Mesh
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.expert_axes import inner_axis
from parallelrun.training.loop.data_runtime import DataRuntime, Pair
from parallelrun.training.loop.flat_tensors import bucket_pairs, sum_buckets


class WorkerRuntime(DataRuntime):
    """Sums gradients over those ranks of a worker that have copies of a weight, so that they act as one."""

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh):
        super().__init__(pairs, plan, mesh)
        self._buckets = [own for _, own in bucket_pairs(pairs, plan)[0]]

    def finish_gradients(self) -> None:
        super().finish_gradients()
        for axis, same in groupby(self._buckets, key=lambda pairs: inner_axis(pairs[0][0].layout, self._plan)):
            gradients = [[weight.grad for _, weight in pairs if weight.grad is not None] for pairs in same]
            sum_buckets(gradients, self._mesh.group(axis), "gradients")
