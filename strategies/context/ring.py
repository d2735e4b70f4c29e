"""Keys and values travel around a ring by point-to-point messages, under the attention to those that are here.

Paper: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
"""

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


class _Shift:
    """A block on its way to the next rank, and another from the previous one. A rank alone keeps its own."""

    def __init__(self, block: Tensor, group: Group, purpose: str):
        self._sent = self._arriving = block
        self._works: list[comm.Waitable] = []
        if group.size == 1:
            return
        self._arriving = torch.empty_like(block)
        following, previous = (group.index + 1) % group.size, (group.index - 1) % group.size
        self._works += comm.exchange([(block, following)], [(self._arriving, previous)], group, purpose)

    def wait(self) -> Tensor:
        """Wait for both; return what has arrived."""
        for work in self._works:
            work.wait()
        return self._arriving


class RingTransport(Transport):
    """Of `group`: in step i a rank has the block of the rank i before it. cp - 1 messages in forward and in backward,
    and cp for the gradients, which end at home."""

    def __init__(self, group: Group):
        self.group = group

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        block, size = own, self.group.size
        for step in range(size):
            shift = _Shift(block, self.group, KEYS) if step + 1 < size else None
            yield (self.group.index - step) % size, block
            if shift is not None:
                block = shift.wait()

    def gradients(self, own: Tensor) -> GradientSum:
        return _TravellingSum(own, self.group)


class _TravellingSum(GradientSum):
    """The sum of a block's gradients follows the block, one step behind."""

    def __init__(self, own: Tensor, group: Group):
        self._own, self._group = own, group
        self._shift: _Shift | None = None

    def add(self, source: int, parts: Sequence[tuple[Tile, Tensor, Tensor]]) -> None:
        if self._shift is None:
            total = torch.zeros_like(self._own, dtype=accurate_dtype(self._own.dtype))
        else:
            total = self._shift.wait()
            self._shift = None  # with what was sent
        add_tiles(total, parts)
        self._shift = _Shift(total, self._group, GRADIENTS)

    def own(self) -> Tensor:
        assert self._shift is not None, "nothing was added"
        return self._shift.wait()
