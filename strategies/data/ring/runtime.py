"""ring at run time: ddp, whose buckets are summed by messages between the ranks, under backward."""

from __future__ import annotations

from torch import Tensor

from parallelrun.comm import Waitable
from parallelrun.mesh import Group

from ..allreduce.runtime import all_reduce
from ..allreduce.settings import over
from ..ddp.runtime import DDPRuntime
from .plan import Ring


class RingRuntime(DDPRuntime):
    """What the optimizer updates, and by which gradients, is as under ddp."""

    def _start_sum(self, tensor: Tensor, group: Group) -> Waitable:
        algorithm = over(Ring.of(self._plan).algorithm, group.axis, self._plan)
        work = all_reduce(tensor, group, "gradients", algorithm.name, True, algorithm.group_size)
        assert work is not None, "what has no copies has nothing to sum"
        return work


RUNTIME = RingRuntime
