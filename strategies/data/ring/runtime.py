"""ring at run time: ddp, whose buckets are summed by messages between the ranks, under backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from parallelrun.mesh import Group, Mesh
from parallelrun.plan.structure import Plan

from ..allreduce.runtime import all_reduce
from ..allreduce.settings import over
from ..compression.runtime import Waitable
from ..ddp.runtime import DdpRuntime, shard
from ..local import LocalRuntime, match
from .settings import RingWay

__all__ = ["RingRuntime", "attach", "shard"]


def attach(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> LocalRuntime:
    """The DataRuntime over materialised weights."""
    pairs = match(parts, plan, mesh)
    return RingRuntime(pairs, plan, mesh.group) if mesh.group("dp").size > 1 else LocalRuntime(pairs)


class RingRuntime(DdpRuntime):
    """What the optimizer updates, and by which gradients, is as under ddp."""

    def _start_sum(self, tensor: Tensor, group: Group) -> Waitable:
        data = self._plan.data
        assert isinstance(data, RingWay)
        algorithm = over(data.algorithm, group.axis, self._plan)
        work = all_reduce(tensor, group, "gradients", algorithm.name, True, algorithm.group_size)
        assert work is not None, "what has no copies has nothing to sum"
        return work
