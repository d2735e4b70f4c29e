"""An all-to-all of rows as two autograd nodes, so that what is computed between them hides it, in backward as well.

The start node sends and the finish node waits; neither computes anything. Backward begins with the finish node, which
sends the gradient the other way, and ends in the start node, which waits for it. Autograd runs the nodes that were made
last first, so that what forward computed between the two is between them in backward too. As nodes of their own they
are gone through once where a schedule takes gradients of inputs and of weights apart (zero bubble), and they keep no
tensor, so that recomputation has nothing to find again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun import comm
from parallelrun.mesh import Group

from .traffic import COUNTS, ROWS


class Meter:
    """Payload bytes of the all-to-alls of a layer's training: forward, backward, and what is sent again."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, tensor: Tensor) -> None:
        """`tensor` is sent."""
        self._bytes += tensor.numel() * tensor.element_size()

    def take(self) -> int:
        """Bytes since this was last asked."""
        taken, self._bytes = self._bytes, 0
        return taken


class Exchange:
    """One all-to-all of rows (dim 0), and of their gradient the other way.

    sends, receives: rows to and from every member of the group in turn; None: equal parts. overlap: begin and go on
    computing; else every all-to-all is waited for where it begins.
    """

    def __init__(
        self,
        group: Group,
        meter: Meter,
        overlap: bool,
        sends: Sequence[int] | None = None,
        receives: Sequence[int] | None = None,
    ):
        self.group, self.meter, self.overlap = group, meter, overlap
        self.sends, self.receives = sends, receives
        self._under_way: tuple[dist.Work | None, Tensor, Tensor] | None = None

    def reversed(self) -> Exchange:
        """The exchange that brings every row back to where it came from."""
        return Exchange(self.group, self.meter, self.overlap, self.receives, self.sends)

    def begin(self, rows: Tensor, backward: bool = False, counted: bool = True) -> Tensor:
        """Start sending; the tensor returned may be read after `end`."""
        assert self._under_way is None, "the rows before these have not arrived"
        sends, receives = (self.receives, self.sends) if backward else (self.sends, self.receives)
        rows = rows.contiguous()  # gradients come in any strides, and the output must not take them over
        arriving = rows.new_empty((rows.size(0) if receives is None else sum(receives), *rows.shape[1:]))
        work = comm.all_to_all(arriving, rows, self.group, ROWS, receives, sends, async_op=self.overlap)
        self._under_way = work, rows, arriving
        if counted:
            self.meter.add(rows)
        return arriving

    def end(self) -> Tensor:
        """Wait for what has begun: the rows that have arrived."""
        assert self._under_way is not None, "nothing is under way"
        work, _, arrived = self._under_way
        self._under_way = None
        if work is not None:
            work.wait()
        return arrived


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, counted: bool) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows, counted=counted)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.end(), None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.end().view_as(arriving)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.begin(grad, backward=True)
        return grad, None  # in the shape that the edge to the start node has; that one gives what arrives


def start(rows: Tensor, exchange: Exchange) -> Tensor:
    """Send `rows`; nobody but `finish` may read what is returned. Evaluation is not metered."""
    return _Start.apply(rows, exchange, torch.is_grad_enabled())


def finish(arriving: Tensor, exchange: Exchange) -> Tensor:
    """The rows that have arrived, by the rank that they come from."""
    return _Finish.apply(arriving, exchange)


def exchange_counts(counts: Tensor, group: Group, meter: Meter) -> Tensor:
    """Equal parts of int64 `counts` (size, ...) to every member, theirs back; blocking, without gradient."""
    counts = counts.contiguous()
    arrived = torch.empty_like(counts)
    comm.all_to_all(arrived, counts, group, COUNTS)
    if torch.is_grad_enabled():
        meter.add(counts)
    return arrived
