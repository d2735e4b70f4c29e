"""Only rows that an expert computes travel: counts first, then uneven all-to-alls (MegaBlocks, Gale et al. 2022).

With a router that limits its experts, what it drops does not travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallelrun.models.moe import rows
from parallelrun.models.moe.routing import Routing

from ..dispatch import Dispatch, Parcel, chunk_of_group
from ..exchange import Exchange, exchange_counts
from ..travel import Leg, sort_segments


@dataclass(frozen=True)
class _Counts:
    """Rows of every chunk by where they are: int64.

    packed: (chunks, inner, outer, local experts), by destination. halfway: (inner source, chunks, outer, local), on two
    levels: what the first leg brings. arrived: (source ranks, chunks, local).
    """

    packed: Tensor
    halfway: Tensor | None
    arrived: Tensor


@dataclass(frozen=True)
class _Rows:
    """As many rows as are kept. weights: of the whole Routing."""

    order: rows.Order
    weights: Tensor

    def spread(self, x: Tensor) -> Tensor:
        return rows.spread(x, self.order)

    def combine(self, returned: Tensor) -> Tensor:
        return rows.combine(returned, self.weights, self.order)


class DroplessDispatch(Dispatch):
    """Rows lie sorted by expert, as many as there are."""

    def parcels(self, routing: Routing) -> list[Parcel]:
        """See `Dispatch`. Waits for the device once: the sizes of what is sent must be known."""
        chunks, num_experts = self.strategy.chunks, routing.num_experts
        expert = self.levels.places(routing.tokens.device)[routing.experts]
        key = chunk_of_group(routing, chunks)[0] * num_experts + expert
        ordered, order = torch.sort(torch.where(routing.kept, key, chunks * num_experts), stable=True)
        bounds = torch.searchsorted(ordered, torch.arange(chunks * num_experts + 1, device=key.device))
        counts = self._exchange(bounds.diff().view(chunks, *self.levels.shape, self.levels.num_local))
        sizes = self._sizes(counts)
        parts = [size.packed for size in sizes]
        return [
            self._parcel(chunk, self._load(routing, kept, counts.packed[chunk]), counts, size)
            for chunk, (kept, size) in enumerate(zip(order[: sum(parts)].split(parts), sizes))
        ]

    def _load(self, routing: Routing, kept: Tensor, counts: Tensor) -> _Rows:
        """Of one chunk. kept: the assignments that travel, in the order in which they lie."""
        num_tokens = routing.num_tokens // self.strategy.chunks
        tokens = routing.tokens[kept].remainder(num_tokens)
        return _Rows(rows.order_rows(kept, tokens, counts.flatten(), num_tokens), routing.weights)

    def _exchange(self, packed: Tensor) -> _Counts:
        inner, *outer = self.levels.groups
        first = exchange_counts(packed.transpose(0, 1), inner, self.meter)  # (inner source, chunks, outer, local)
        if not outer:
            return _Counts(packed, None, first.squeeze(2))
        second = exchange_counts(first.permute(2, 0, 1, 3), outer[0], self.meter)  # (outer, inner, chunks, local)
        return _Counts(packed, first, second.flatten(0, 1))

    def _sizes(self, counts: _Counts) -> list[_Sizes]:
        """Of every chunk, read from the device at once."""
        inner, outer = self.levels.shape
        by_chunk = counts.arrived.sum(-1).t()  # (chunks, source ranks)
        parts = [counts.packed.sum((2, 3)), by_chunk]
        if counts.halfway is not None:
            halfway = counts.halfway.sum(3)  # (inner source, chunks, outer)
            parts = [parts[0], halfway.sum(2).t(), halfway.sum(0), by_chunk.unflatten(1, (outer, inner)).sum(2)]
        widths = [part.size(1) for part in parts]
        return [_Sizes(*_cut(row, widths)) for row in torch.cat(parts, dim=1).tolist()]

    def _parcel(self, chunk: int, load: _Rows, counts: _Counts, sizes: _Sizes) -> Parcel:
        arrived = counts.arrived[:, chunk]
        local = torch.arange(arrived.size(1), device=arrived.device).repeat(arrived.size(0))
        by_expert = sort_segments(arrived.flatten(), local, sizes.arrived)
        return Parcel(load, self._legs(chunk, counts, sizes), by_expert, arrived.sum(0))

    def _legs(self, chunk: int, counts: _Counts, sizes: _Sizes) -> tuple[Leg, ...]:
        exchanges = [
            Exchange(group, self.meter, self.strategy.overlap, sends, receives)
            for group, (sends, receives) in zip(self.levels.groups, sizes.legs)
        ]
        if counts.halfway is None:
            return (Leg(exchanges[0]),)
        lengths = counts.halfway[:, chunk]  # (inner source, outer, local)
        outer = torch.arange(lengths.size(1), device=lengths.device).view(1, -1, 1).expand_as(lengths)
        halfway = sort_segments(lengths.flatten(), outer.flatten(), sum(sizes.legs[0][1]))
        return Leg(exchanges[0]), Leg(exchanges[1], halfway)


class _Sizes:
    """Of one chunk. legs: (rows to every member, rows from every member) of each leg in turn."""

    def __init__(self, *rows: list[int]):
        self.legs = tuple(zip(rows[::2], rows[1::2]))
        self.packed, self.arrived = sum(rows[0]), sum(rows[-1])


def _cut(values: list[int], widths: list[int]) -> list[list[int]]:
    cut = iter(values)
    return [[next(cut) for _ in range(width)] for width in widths]
