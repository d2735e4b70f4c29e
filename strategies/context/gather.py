"""Keys and values are gathered, and their gradients reduce-scattered; the own block is attended to meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group
from parallelrun.models.functions import accurate_dtype

from .blockwise_plan import GRADIENTS, KEYS
from .product import GradientSum, Transport, add_tiles
from .tiles import Tile


class GatherTransport(Transport):
    """One all-gather in forward, and again in backward with one reduce-scatter."""

    def __init__(self, group: Group):
        self.group = group

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        size, index = self.group.size, self.group.index
        everyone = own.new_empty((size, *own.shape))
        work = comm.all_gather_into(everyone.flatten(0, 1), own, self.group, KEYS, async_op=True)
        yield index, own
        if work is not None:
            work.wait()
        for source in range(size):
            if source != index:
                yield source, everyone[source]

    def gradients(self, own: Tensor) -> GradientSum:
        return _ScatteredSum(own, self.group)


class _ScatteredSum(GradientSum):
    def __init__(self, own: Tensor, group: Group):
        self._group = group
        self._totals = own.new_zeros((group.size, *own.shape), dtype=accurate_dtype(own.dtype))

    def add(self, source: int, parts: Sequence[tuple[Tile, Tensor, Tensor]]) -> None:
        add_tiles(self._totals[source], parts)

    def own(self) -> Tensor:
        mine = torch.empty_like(self._totals[0])
        comm.reduce_scatter_into(mine, self._totals.flatten(0, 1), self._group, GRADIENTS)
        return mine
