"""The buckets of a rank's weights, and tensors that are sent together as one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.data_runtime import Pair, trained


def bucket_pairs(pairs: Sequence[Pair], plan: Plan) -> tuple[list[tuple[str, list[Pair]]], list[Pair]]:
    """The axis and the trained pairs of each bucket, in launch order; then the trained pairs that are in none."""
    pairs = trained(pairs)
    shapes = [tuple(weight.shape) for _, weight in pairs]
    buckets = plan.data.buckets([parameter for parameter, _ in pairs], shapes, plan)
    summed = {index for bucket in buckets for index in bucket.indices}
    rest = [pair for index, pair in enumerate(pairs) if index not in summed]
    return [(bucket.axis, [pairs[index] for index in bucket.indices]) for bucket in buckets], rest


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A new flat tensor of all elements."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def flat_views(flat: Tensor, shapes: Iterable[Sequence[int]]) -> list[Tensor]:
    """Consecutive views of a flat tensor, one per shape."""
    shapes = [tuple(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split([prod(shape) for shape in shapes]), shapes)]


def unflatten(flat: Tensor, into: Sequence[Tensor]) -> None:
    """Copy a flat tensor back into the tensors that it was made of."""
    for tensor, view in zip(into, flat_views(flat, [tensor.shape for tensor in into])):
        tensor.copy_(view)


@torch.no_grad()
def sum_buckets(buckets: Sequence[Sequence[Tensor]], group: Group, purpose: str, divisor: int = 1) -> None:
    """Replace each tensor by its sum over a group, divided by `divisor`; bitwise equal on all of its ranks.

    Each bucket is sent as one flat tensor. Two are pending at a time: no other memory is needed.
    """
    pending: list[tuple[Tensor, Sequence[Tensor], comm.Waitable]] = []

    def finish(flat: Tensor, tensors: Sequence[Tensor], work: comm.Waitable) -> None:
        with comm.label(group.axis, purpose):  # by which the time of a wait is counted
            work.wait()
        unflatten(flat if divisor == 1 else flat.div_(divisor), tensors)

    for tensors in buckets if group.size > 1 else ():
        flat = flatten(tensors)
        pending.append((flat, tensors, comm.all_reduce(flat, group, purpose, async_op=True)))
        if len(pending) == 2:
            finish(*pending.pop(0))
    for exchange in pending:
        finish(*exchange)
