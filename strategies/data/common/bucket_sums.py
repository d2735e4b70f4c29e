"""Sums of buckets of separate tensors, each as one flat tensor: of weights of workers, of gradients inside a worker."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group, Mesh
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.expert_axes import inner_axis
from parallelrun.training.loop.data_runtime import Pair
from parallelrun.training.loop.flat_tensors import flatten, unflatten


@torch.no_grad()
def sum_buckets(buckets: Sequence[Sequence[Tensor]], group: Group, purpose: str, divisor: int = 1) -> None:
    """Replace each tensor by its sum over a group, divided by `divisor`; bitwise equal on all of its ranks.

    Two buckets are pending at a time. Their flat copies are the only additional memory.
    """
    pending: list[tuple[Tensor, Sequence[Tensor], comm.Waitable]] = []
    for tensors in buckets if group.size > 1 else ():
        flat = flatten(tensors)
        work = comm.all_reduce(flat, group, purpose, async_op=True)
        pending.append((flat, tensors, work))
        if len(pending) == 2:
            _finish(*pending.pop(0), divisor)
    for exchange in pending:
        _finish(*exchange, divisor)


def sum_inside_worker(buckets: Sequence[Sequence[Pair]], plan: Plan, mesh: Mesh) -> None:
    """Sum the gradients of buckets of weights over those ranks of a worker that have copies; they then act as one."""
    for axis, same in groupby(buckets, key=lambda pairs: inner_axis(pairs[0][0].layout, plan)):
        gradients = [[weight.grad for _, weight in pairs if weight.grad is not None] for pairs in same]
        sum_buckets(gradients, mesh.group(axis), "gradients")


def _finish(flat: Tensor, tensors: Sequence[Tensor], work: comm.Waitable, divisor: int) -> None:
    work.wait()
    unflatten(flat.div_(divisor), tensors)
