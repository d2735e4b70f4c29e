"""A matrix in blocks, multiplied in place: the result of an all-gather, or what a reduce-scatter is to send.

Gathered blocks and send buffers are contiguous per rank, not as one matrix. Products read and write them block by
block, so that nothing is copied before or after.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix cut along `dim` (0: rows, 1: columns) into 2-d tensors, in order. One part: an ordinary matrix."""

    parts: tuple[Tensor, ...]
    dim: int = 0

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the whole."""
        rows, columns = self.parts[0].shape
        return (self._cuts[-1], columns) if self.dim == 0 else (rows, self._cuts[-1])

    @cached_property
    def _cuts(self) -> tuple[int, ...]:
        """Where each part begins along `dim`, and the end."""
        return 0, *accumulate([part.shape[self.dim] for part in self.parts])

    def cuts(self, dim: int) -> tuple[int, ...]:
        """MoveGroup `dim`: where parts begin, and the end."""
        return self._cuts if dim == self.dim else (0, self.shape[dim])

    def t(self) -> BlockMatrix:
        """The transposed matrix; no copy."""
        return BlockMatrix(tuple(part.t() for part in self.parts), 1 - self.dim)

    def at(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Return a view of a range that is within one block."""
        part, ranges = self.parts[0], [rows, columns]
        if len(self.parts) > 1:
            start, stop = ranges[self.dim]
            index = bisect_left(self._cuts, stop, 1) - 1
            part, begins = self.parts[index], self._cuts[index]
            ranges[self.dim] = (start - begins, stop - begins)
        for dim, (start, stop) in enumerate(ranges):
            if stop - start != part.shape[dim]:
                part = part.narrow(dim, start, stop - start)
        return part

    def joined(self) -> Tensor:
        """As one tensor: copied unless there is one part."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, self.dim)

    def fill(self, matrix: Tensor) -> None:
        """Copy a tensor of the same shape into the parts."""
        for part, source in zip(self.parts, matrix.split([part.size(self.dim) for part in self.parts], self.dim)):
            part.copy_(source)


def multiply_into(out: BlockMatrix, terms: Sequence[tuple[BlockMatrix, BlockMatrix]]) -> None:
    """Overwrite `out` with the sum over terms of a @ b.

    All a's are cut alike along their rows, all b's along their columns, so that one region of `out` after the other can
    be accumulated in place.
    """
    first, second = terms[0]
    for rows in _ranges(out.cuts(0), first.cuts(0)):
        for columns in _ranges(out.cuts(1), second.cuts(1)):
            target, begun = out.at(rows, columns), False
            for a, b in terms:
                for inner in _ranges(a.cuts(1), b.cuts(0)):
                    left, right = a.at(rows, inner), b.at(inner, columns)
                    if begun:
                        target.addmm_(left, right)
                    else:
                        torch.mm(left, right, out=target)
                    begun = True


@lru_cache(maxsize=1024)
def _ranges(cuts: tuple[int, ...], others: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Consecutive ranges that cross no cut of either list. A dim of length 0 has one empty range."""
    assert cuts[-1] == others[-1], f"{cuts} and {others} cut different lengths"
    bounds = sorted({*cuts, *others})
    return tuple(pairwise(bounds)) if len(bounds) > 1 else ((0, 0),)
