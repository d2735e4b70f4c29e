"""An all-to-all of rows as two autograd nodes, so that the computation between them hides it, in backward as well.

The start node sends and the finish node waits; neither computes anything. Backward begins with the finish node, which
sends the gradient in the other direction, and ends in the start node, which waits for it. Autograd runs the nodes
created last first, so the operations between the two nodes in forward are between them in backward too. Because these
are separate nodes, a schedule that computes input and weight gradients separately (zero bubble) runs them once. They
save no tensor, so recomputation has nothing to restore.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group
from parallelrun.distributed.turns import Turns
from parallelrun.models.autograd import apply

from .plan import COUNTS, ROWS


class ByteCounter:
    """Counts payload bytes of a layer's all-to-alls in training: forward, backward and recomputed forward."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that is sent."""
        self._bytes += tensor.numel() * tensor.element_size()

    def take(self) -> int:
        """Return the bytes since the last call."""
        taken, self._bytes = self._bytes, 0
        return taken


class AllToAll:
    """One all-to-all of rows (dim 0), and of their gradient the other way.

    sends, receives: rows to and from every member of the group in turn; None: equal parts. turns: of the passes that
    compute while others wait here. overlap: return before the all-to-all has finished; otherwise wait where it begins.
    """

    def __init__(
        self,
        group: Group,
        counter: ByteCounter,
        turns: Turns,
        overlap: bool,
        sends: Sequence[int] | None = None,
        receives: Sequence[int] | None = None,
    ):
        self.group, self.counter, self.turns, self.overlap = group, counter, turns, overlap
        self.sends, self.receives = sends, receives
        self._under_way: tuple[comm.Waitable, Tensor, Tensor] | None = None

    def reversed(self) -> AllToAll:
        """Return the all-to-all that brings every row back to its source."""
        return AllToAll(self.group, self.counter, self.turns, self.overlap, self.receives, self.sends)

    def begin(self, rows: Tensor, backward: bool = False, counted: bool = True) -> Tensor:
        """Start sending; the tensor returned may be read after `end`."""
        assert self._under_way is None, "the previous rows have not arrived"
        sends, receives = (self.receives, self.sends) if backward else (self.sends, self.receives)
        rows = rows.contiguous()  # gradients come in any strides, and the output must not inherit them
        arriving = rows.new_empty((rows.size(0) if receives is None else sum(receives), *rows.shape[1:]))
        work = comm.all_to_all(arriving, rows, self.group, ROWS, receives, sends, async_op=self.overlap)
        self._under_way = work, rows, arriving
        if counted:
            self.counter.add(rows)
        return arriving

    def end(self) -> Tensor:
        """Wait and return the rows that have arrived."""
        assert self._under_way is not None, "no all-to-all has begun"
        work, _, arrived = self._under_way
        self._under_way = None
        if work is not None:
            self.turns.hand_over()
            work.wait()
        return arrived


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, all_to_all: AllToAll, counted: bool) -> Tensor:
        ctx.all_to_all = all_to_all
        return all_to_all.begin(rows, counted=counted)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.all_to_all.end(), None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, all_to_all: AllToAll) -> Tensor:
        ctx.all_to_all = all_to_all
        return all_to_all.end().view_as(arriving)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.all_to_all.begin(grad, backward=True)
        return grad, None  # of the shape that the edge to the start node expects, which returns the arrived gradient


def start(rows: Tensor, all_to_all: AllToAll) -> Tensor:
    """Send `rows`; only `finish` may read the returned tensor. Evaluation is not counted."""
    return apply(_Start, rows, all_to_all, torch.is_grad_enabled())


def finish(arriving: Tensor, all_to_all: AllToAll) -> Tensor:
    """Return the rows that have arrived, ordered by source rank."""
    return apply(_Finish, arriving, all_to_all)


def exchange_counts(counts: Tensor, group: Group, counter: ByteCounter) -> Tensor:
    """Exchange equal parts of int64 `counts` (size, ...) with every member; blocking, without gradient."""
    counts = counts.contiguous()
    arrived = torch.empty_like(counts)
    comm.all_to_all(arrived, counts, group, COUNTS)
    if torch.is_grad_enabled():
        counter.add(counts)
    return arrived
