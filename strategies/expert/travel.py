"""Rows on their way to their experts and back, over one all-to-all or two (the two-level one).

Two-level (Tutel's 2-D hierarchical all-to-all): rank (outer o, inner i) first sends inside its inner group to the
member with the inner place of every row's destination, which then sends over its outer group: few large messages
between the inner groups in place of many small ones. Rows come back over the same legs the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from . import exchange as exchanges
from .exchange import Exchange


class Arrangement(Protocol):
    """Another order of rows."""

    def there(self, rows: Tensor) -> Tensor: ...

    def back(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Swap:
    """Equal blocks of rows, (first, second) of them, become (second, first)."""

    first: int
    second: int

    def there(self, rows: Tensor) -> Tensor:
        return _swapped(rows, self.first, self.second)

    def back(self, rows: Tensor) -> Tensor:
        return _swapped(rows, self.second, self.first)


def _swapped(rows: Tensor, first: int, second: int) -> Tensor:
    block = rows.size(0) // (first * second)
    return rows.unflatten(0, (first, second, block)).transpose(0, 1).flatten(0, 2)


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
class Order:
    """Row n becomes row inverse[n]; row index[n] comes to n."""

    index: Tensor
    inverse: Tensor

    def there(self, rows: Tensor) -> Tensor:
        return _Permute.apply(rows, self.index, self.inverse)

    def back(self, rows: Tensor) -> Tensor:
        return _Permute.apply(rows, self.inverse, self.index)


def sort_segments(lengths: Tensor, keys: Tensor, num_rows: int) -> Order:
    """Segments of rows in the order of their keys, equal keys as they are. lengths, keys: int64, one a segment."""
    of_row = keys.repeat_interleave(lengths, output_size=num_rows)
    index = torch.sort(of_row, stable=True).indices
    inverse = torch.empty_like(index)
    inverse[index] = torch.arange(num_rows, device=index.device)
    return Order(index, inverse)


@dataclass(frozen=True)
class Leg:
    """One all-to-all of the way: rows are arranged, then sent. arranged None: they lie as they must."""

    exchange: Exchange
    arranged: Arrangement | None = None


class Travel:
    """Rows on their way out over `legs`; the first leg has begun."""

    def __init__(self, rows: Tensor, legs: Sequence[Leg]):
        self._legs = list(legs)
        self._depart(rows)

    def change(self) -> None:
        """Go on until the last leg has begun."""
        while len(self._legs) > 1:
            self._depart(self._arrived())

    def arrive(self) -> Tensor:
        """The rows, by the rank that they come from."""
        self.change()
        return self._arrived()

    def _depart(self, rows: Tensor) -> None:
        leg = self._legs[0]
        self._arriving = exchanges.start(leg.arranged.there(rows) if leg.arranged else rows, leg.exchange)

    def _arrived(self) -> Tensor:
        return exchanges.finish(self._arriving, self._legs.pop(0).exchange)


class Return(Travel):
    """Rows on their way back over the legs that brought them."""

    def __init__(self, rows: Tensor, legs: Sequence[Leg]):
        super().__init__(rows, [Leg(leg.exchange.reversed(), leg.arranged) for leg in reversed(legs)])

    def _depart(self, rows: Tensor) -> None:
        self._arriving = exchanges.start(rows, self._legs[0].exchange)

    def _arrived(self) -> Tensor:
        leg = self._legs.pop(0)
        rows = exchanges.finish(self._arriving, leg.exchange)
        return leg.arranged.back(rows) if leg.arranged else rows
