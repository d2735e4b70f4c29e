"""Local SGD at run time: gradients and updates stay in the replica; every H steps weights are averaged over dp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelrun import comm
from parallelrun.mesh import Mesh
from parallelrun.plan.structure import SYNC, Plan
from parallelrun.train.data_runtime import DataRuntime, Pair, match

from ..buckets import fill
from .plan import LocalSGD


class IndependentRuntime(DataRuntime):
    """A replica that trains by itself; `synchronise` is called at the end of every step of which the plan says so."""

    @classmethod
    def attach(cls, parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> DataRuntime:
        return cls(match(parts, plan, mesh), plan, mesh)  # DiLoCo has an outer step at dp=1 too

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh):
        super().__init__(pairs, plan, mesh)
        self._strategy, self._group = LocalSGD.of(plan), mesh.group("dp")
        self._weights = [parameter.tensor.detach() for parameter in self.parameters]
        sizes = [weight.numel() * weight.element_size() for weight in self._weights]
        self._buckets = fill(sizes, plan.data.bucket_bytes)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Meet the other replicas if it is time to."""
        if self._strategy.is_sync(step):
            self.synchronise()

    def synchronise(self) -> None:
        """What the replicas do when they meet."""
        raise AssertionError("each way has its own")

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor (one per weight, of its shape) by its mean over replicas, bitwise alike on all of them.

        Two buckets are under way at a time: their flat copies are all the memory it takes.
        """
        if self._group.size == 1:
            return
        pending: list[tuple[Tensor, list[Tensor], dist.Work | None]] = []
        for bucket in self._buckets:
            members = [tensors[index] for index in bucket]
            flat = torch.cat([member.flatten() for member in members])
            pending.append((flat, members, comm.all_reduce(flat, self._group, SYNC, async_op=True)))
            if len(pending) == 2:
                self._finish(*pending.pop(0))
        for one in pending:
            self._finish(*one)

    def _finish(self, flat: Tensor, members: list[Tensor], work: dist.Work | None) -> None:
        assert work is not None, "a group of one averages nothing"
        work.wait()
        flat.div_(self._group.size)
        for member, part in zip(members, flat.split([member.numel() for member in members])):
            member.copy_(part.view_as(member))


class LocalSGDRuntime(IndependentRuntime):
    """Replicas meet by averaging their weights; the optimizer's state stays local."""

    def synchronise(self) -> None:
        """Everyone's weights become their mean."""
        self.average(self._weights)


RUNTIME = LocalSGDRuntime
