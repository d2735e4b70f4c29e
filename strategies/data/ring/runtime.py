"""The runtime of ring: buckets are summed by the messages of the plan's algorithm."""

from __future__ import annotations

from torch import Tensor

from parallelrun.comm import Waitable
from parallelrun.mesh import Group

from ..common.allreduce.algorithm import over
from ..common.allreduce.runtime import all_reduce
from ..common.compression.runtime import CompressedRuntime
from .plan import Ring


class RingRuntime(CompressedRuntime):
    """ddp's buckets, summed by `all_reduce` of this project."""

    def start_sum(self, tensor: Tensor, group: Group) -> Waitable:
        algorithm = over(Ring.of(self._plan).algorithm, group.axis, self._plan)
        work = all_reduce(tensor, group, "gradients", algorithm.name, True, algorithm.group_size)
        assert work is not None, "a parameter without copies is in no bucket"
        return work


RUNTIME = RingRuntime
