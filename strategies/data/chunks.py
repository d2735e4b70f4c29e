"""A weight cut into chunks, one for each of its copies, and where they lie in a buffer on its way (zero1, zero2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from parallelrun.layout import chunk_range
from parallelrun.mesh import Group
from parallelrun.plan.parameters import HeldParameter, LocalParameter
from parallelrun.plan.structure import Plan

from .buckets import sum_axis
from .sharding import shard_dim, shard_layout


@dataclass(frozen=True)
class Cut:
    """One weight and its chunks along `dim`.

    shape: of a chunk; along dim 0 it may be padded. mine: this rank's chunk in one piece, as optimizers need it: it
    shares the weight's storage where it lies so there (`sharding.shard_dim` 0, or one expert), else is a copy.
    """

    weight: nn.Parameter
    dim: int
    shape: tuple[int, ...]
    mine: Tensor

    @property
    def numel(self) -> int:
        """Elements of a chunk, padding included."""
        return prod(self.shape)

    def regions(self, rows: Tensor) -> Tensor:
        """`rows` (copies, numel), a chunk each, as (copies, *shape)."""
        return rows.unflatten(1, self.shape)

    def pieces(self, regions: Tensor, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(part of `regions`, part of `whole`) pairs: the full chunks at once, then the shorter last one.

        whole: of the weight's shape. Padding is in no pair.
        """
        dim, size = self.dim, self.shape[self.dim]
        if size == 0:
            return []
        full, rest = divmod(whole.shape[dim], size)
        chunks = whole.narrow(dim, 0, full * size).unflatten(dim, (full, size))
        out = [(regions[:full].movedim(0, dim), chunks)] if full else []
        return [*out, (regions[full].narrow(dim, 0, rest), whole.narrow(dim, full * size, rest))] if rest else out

    def own(self, row: Tensor) -> Tensor:
        """What of one chunk's `row` (numel,) is no padding, in the shape and strides of `mine`."""
        return row[: self.mine.numel()].view(self.mine.shape)


def cut(held: HeldParameter, weight: nn.Parameter, group: Group, plan: Plan) -> Cut:
    """The chunks of a weight that has copies on the ranks of `group`."""
    dim = shard_dim(held.spec, held.layout, sum_axis(held, plan), plan)
    shape = list(weight.shape)
    shape[dim] = -(-shape[dim] // group.size)
    start, stop = chunk_range(weight.shape[dim], group.size, group.index)
    part = weight.detach().narrow(dim, start, stop - start)
    # Flat and back: torch's fused optimizers compare strides, those of dims of one element too.
    return Cut(weight, dim, tuple(shape), part.contiguous().view(-1).view(part.shape))


def local_parameter(held: HeldParameter, mine: Tensor, plan: Plan) -> LocalParameter:
    """What the optimizer updates of a parameter: this rank's chunk, or all of what has no copies."""
    layout = shard_layout(held.spec, held.layout, sum_axis(held, plan), plan)
    return LocalParameter(held.name, mine, held.spec, layout, held.shared)


def starts_of(cuts: Sequence[Cut]) -> list[int]:
    """Where each chunk begins in a row of all of them, and where the row ends."""
    return [sum(one.numel for one in cuts[:i]) for i in range(len(cuts) + 1)]
