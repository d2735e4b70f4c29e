"""What the expert dispatchers' dispatches share: rows out, experts, rows back, weighted sums; chunk by chunk.

All chunks' rows are on their way while the shared expert computes; a chunk's results go back while the next chunk's
experts compute. The order in which nodes are made gives backward the same overlap, from the last chunk to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parallelrun.models.moe.experts import Experts
from parallelrun.models.moe.routing import Routing
from parallelrun.plan.structure import ExpertWay

from .exchange import Meter
from .levels import Levels
from .travel import Arrangement, Leg, Return, Travel


class Load(Protocol):
    """How the rows of one chunk of tokens are packed for sending."""

    def spread(self, x: Tensor) -> Tensor:
        """x (tokens, hidden) -> rows in the order of `Levels.places`."""

    def combine(self, rows: Tensor) -> Tensor:
        """Rows as `spread` gave them, through the experts and back -> (tokens, hidden), their weighted sums."""


@dataclass(frozen=True)
class Parcel:
    """What a rank sends of one chunk of its tokens.

    legs: the way out. by_expert: from the order of arrival, by source rank, to that of experts. counts: rows of each of
    this rank's experts; None: equally many.
    """

    load: Load
    legs: tuple[Leg, ...]
    by_expert: Arrangement
    counts: Tensor | None


class Dispatch:
    """Brings the rows of one layer's tokens to the experts of all ranks of the expert axis, and their results back."""

    def __init__(self, strategy: ExpertWay, levels: Levels):
        self.strategy, self.levels, self.meter = strategy, levels, Meter()

    def take_bytes(self) -> int:
        """Payload of this layer's all-to-alls in training since this was last asked."""
        return self.meter.take()

    def parcels(self, routing: Routing) -> list[Parcel]:
        """One a chunk."""
        raise AssertionError(f"{type(self)} packs nothing")

    def __call__(
        self, x: Tensor, routing: Routing, experts: Experts, beside: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """x: (tokens, hidden). The sums of what the experts make of every token, and what `beside` gives."""
        parcels = self.parcels(routing)
        tokens = x.split(x.size(0) // len(parcels))
        going = [Travel(parcel.load.spread(own), parcel.legs) for own, parcel in zip(tokens, parcels)]
        found = beside() if beside is not None else None
        for travel in going:
            travel.change()
        coming: list[Travel] = []
        for travel, parcel in zip(going, parcels):
            rows = parcel.by_expert.there(travel.arrive())
            if parcel.counts is None:
                rows = experts(rows.unflatten(0, (self.levels.num_local, -1)), None).flatten(0, 1)
            else:
                rows = experts(rows, parcel.counts)
            coming.append(Return(parcel.by_expert.back(rows), parcel.legs))
        for travel in coming:
            travel.change()
        arrived = [travel.arrive() for travel in coming]
        sums = [parcel.load.combine(rows) for parcel, rows in zip(parcels, arrived)]
        return sums[0] if len(sums) == 1 else torch.cat(sums), found


def chunk_of_group(routing: Routing, chunks: int) -> tuple[Tensor, Tensor]:
    """(chunk, group within the chunk) of each assignment."""
    assert routing.num_groups % chunks == 0, f"{routing.num_groups} routing groups in {chunks} chunks"
    group = routing.tokens.div(routing.num_tokens // routing.num_groups, rounding_mode="floor")
    per_chunk = routing.num_groups // chunks
    return group.div(per_chunk, rounding_mode="floor"), group.remainder(per_chunk)
