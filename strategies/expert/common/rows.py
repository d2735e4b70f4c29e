"""Rows of tokens on their way to experts and back, over one all-to-all or two (the two-level one).

Two-level (Tutel's 2-D hierarchical all-to-all): rank (outer o, inner i) first sends inside its inner group to the
member with the inner index of each row's destination, which then sends over its outer group: few large messages
between the inner groups instead of many small ones. Rows come back over the same levels in reverse order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallelrun.distributed.mesh import Group
from parallelrun.models.autograd import apply

from .all_to_all import AllToAll, finish, start


@dataclass(frozen=True)
class BlockTranspose:
    """Equal blocks of rows, (first, second) of them, become (second, first)."""

    first: int
    second: int

    def apply(self, rows: Tensor) -> Tensor:
        block = rows.size(0) // (self.first * self.second)
        blocks: Tensor = rows.unflatten(0, (self.first, self.second, block))
        return blocks.transpose(0, 1).flatten(0, 2)

    @property
    def inverse(self) -> BlockTranspose:
        return BlockTranspose(self.second, self.first)


class _Permute(torch.autograd.Function):
    """Rows by index; the gradient by the inverse: a gather both ways, where index_select's own backward adds up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


@dataclass(frozen=True)
class RowPermutation:
    """Row index[n] becomes row n; row n becomes row target[n]."""

    index: Tensor
    target: Tensor

    def apply(self, rows: Tensor) -> Tensor:
        return apply(_Permute, rows, self.index, self.target)

    @property
    def inverse(self) -> RowPermutation:
        return RowPermutation(self.target, self.index)


Reorder = BlockTranspose | RowPermutation


def sort_segments(lengths: Tensor, keys: Tensor, num_rows: int) -> RowPermutation:
    """Return the stable sort of segments of rows by their keys. lengths, keys: int64, one per segment."""
    of_row = keys.repeat_interleave(lengths, output_size=num_rows)
    index = torch.sort(of_row, stable=True).indices
    target = torch.empty_like(index)
    target[index] = torch.arange(num_rows, device=index.device)
    return RowPermutation(index, target)


@dataclass(frozen=True)
class ExpertGroups:
    """The process groups of a layer's levels: (ep,), or (ep_inner, ep_outer). num_local: experts of a rank."""

    groups: tuple[Group, ...]
    num_local: int

    @property
    def num_ranks(self) -> int:
        """The ranks of the ep axis."""
        return self.shape[0] * self.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """(inner, outer) sizes; (ep, 1) with one level."""
        return self.groups[0].size, self.groups[1].size if len(self.groups) > 1 else 1

    def send_order(self, device: torch.device) -> Tensor:
        """Return int64 (experts,): the position of each expert's rows in a rank's send buffer.

        Rows are ordered by the inner index of their destination, then its outer index, then the expert. With one level
        experts keep their own order.
        """
        inner, outer = self.shape
        order = torch.arange(inner * outer * self.num_local, device=device)
        return order.view(inner, outer, self.num_local).transpose(0, 1).reshape(-1)


@dataclass(frozen=True)
class Level:
    """One all-to-all of rows. before, after: how rows are reordered before they are sent, and when they have arrived;
    None where they are in order."""

    all_to_all: AllToAll
    before: Reorder | None = None
    after: Reorder | None = None

    @property
    def reversed(self) -> Level:
        """The level that brings every row back to where it was."""
        before, after = (reorder.inverse if reorder else None for reorder in (self.after, self.before))
        return Level(self.all_to_all.reversed(), before, after)


class RowsInTransit:
    """Rows on their way over `levels`; the first level has begun."""

    def __init__(self, rows: Tensor, levels: Iterable[Level]):
        self._levels = list(levels)
        self._send(rows)

    def advance(self) -> None:
        """Wait for all levels but the last, which has begun afterwards."""
        while len(self._levels) > 1:
            self._send(self._receive())

    def wait(self) -> Tensor:
        """Return the rows that have arrived over the last level."""
        self.advance()
        return self._receive()

    def _send(self, rows: Tensor) -> None:
        level = self._levels[0]
        self._arriving = start(level.before.apply(rows) if level.before else rows, level.all_to_all)

    def _receive(self) -> Tensor:
        level = self._levels.pop(0)
        rows = finish(self._arriving, level.all_to_all)
        return level.after.apply(rows) if level.after else rows
