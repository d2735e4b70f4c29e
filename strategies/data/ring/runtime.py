"""The runtime of ring: buckets are summed by the messages of the plan's algorithm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parallelrun.distributed.comm import Waitable
from parallelrun.distributed.mesh import Group

from ..common.allreduce.runtime import all_reduce
from ..common.reducer import BucketedRuntime


class RingRuntime(BucketedRuntime):
    """ddp's buckets, summed by `all_reduce` of this project."""

    def start_sum(self, tensor: Tensor, group: Group) -> Waitable:
        strategy: Any = self._plan.data  # an `AlgorithmAllReduce`, whose file says more than this one needs
        rounds = strategy.rounds(group.axis, group.size, group.index, tensor.numel(), self._plan)
        work = all_reduce(tensor, group, "gradients", rounds, async_op=True)
        assert work is not None, "a parameter without copies is in no bucket"
        return work


RUNTIME = RingRuntime
