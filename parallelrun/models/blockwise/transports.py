"""How the keys and values of the other ranks of a group reach this rank, and their gradients return.

Both transports have `blocks(own)`, which yields (rank of the group, its keys and values), this rank's first, while what
comes next travels; and `gradients(own)`, the sum of the gradients of these blocks, which are added in the same order.
own: (2, batch, kv heads, tokens, head_dim), contiguous. Ring: Liu et al. 2023, "Ring Attention with Blockwise
Transformers for Near-Infinite Context".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group
from parallelrun.models.blockwise.tiles import GRADIENTS, KEYS, Tile
from parallelrun.models.functions import accurate_dtype

TileGradients = Sequence[tuple[Tile, Tensor, Tensor]]  # of the keys and the values of a tile


class RingTransport:
    """In step i a rank has the block of the rank i before it. cp - 1 messages in forward and in backward, and cp for
    the gradients, which end at home."""

    def __init__(self, group: Group):
        self.group = group

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        block, size = own, self.group.size
        for step in range(size):
            arriving = _start_shift(block, self.group, KEYS) if step + 1 < size else None
            yield (self.group.index - step) % size, block
            if arriving is not None:
                block = arriving()

    def gradients(self, own: Tensor) -> TravellingSum:
        return TravellingSum(own, self.group)


class TravellingSum:
    """The sum of a block's gradients follows the block, one step behind."""

    def __init__(self, own: Tensor, group: Group):
        self._group = group
        self._arriving: Callable[[], Tensor] = lambda: torch.zeros_like(own, dtype=accurate_dtype(own.dtype))

    def add(self, source: int, parts: TileGradients) -> None:
        total = self._arriving()
        _add_tiles(total, parts)
        self._arriving = _start_shift(total, self._group, GRADIENTS)

    def own(self) -> Tensor:
        """Wait; return the sum of this rank's gradients, in at least fp32."""
        return self._arriving()


def _start_shift(block: Tensor, group: Group, purpose: str) -> Callable[[], Tensor]:
    """Send a block to the next rank of the ring; the result waits for that of the previous one."""
    if group.size == 1:
        return lambda: block
    arriving = torch.empty_like(block)
    following, previous = (group.index + 1) % group.size, (group.index - 1) % group.size
    in_transit = [(block, list(comm.exchange([(block, following)], [(arriving, previous)], group, purpose)))]

    def finish() -> Tensor:
        for _, works in in_transit:
            for work in works:
                work.wait()
        in_transit.clear()  # with what was sent
        return arriving

    return finish


class GatherTransport:
    """One all-gather in forward, and again in backward with one reduce-scatter."""

    def __init__(self, group: Group):
        self.group = group

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        size, index = self.group.size, self.group.index
        everyone = own.new_empty((size, *own.shape))
        work = comm.all_gather_into(everyone.flatten(0, 1), own, self.group, KEYS, async_op=True)
        yield index, own
        work.wait()
        yield from ((source, everyone[source]) for source in range(size) if source != index)

    def gradients(self, own: Tensor) -> ScatteredSum:
        return ScatteredSum(own, self.group)


class ScatteredSum:
    """The sums of all ranks' gradients, reduce-scattered at the end."""

    def __init__(self, own: Tensor, group: Group):
        self._group = group
        self._totals = own.new_zeros((group.size, *own.shape), dtype=accurate_dtype(own.dtype))

    def add(self, source: int, parts: TileGradients) -> None:
        _add_tiles(self._totals[source], parts)

    def own(self) -> Tensor:
        """Return the sum of this rank's gradients, in at least fp32."""
        mine = torch.empty_like(self._totals[0])
        comm.reduce_scatter_into(mine, self._totals.flatten(0, 1), self._group, GRADIENTS)
        return mine


Transport = RingTransport | GatherTransport


def _add_tiles(total: Tensor, parts: TileGradients) -> None:
    """Add gradients to those of a rank's keys and values (2, batch, kv heads, tokens, head_dim)."""
    for tile, *both in parts:
        for sums, gradient in zip(total, both):
            sums[tile.samples, :, tile.key] += gradient
