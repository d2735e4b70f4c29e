"""GShard's dispatch: every expert has `capacity` places for each routing group, filled or not, so that all-to-alls are
equal and nothing waits for counts (Lepikhin et al. 2020, 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from parallelrun.models.moe.routing import Routing

from ..dispatch import Dispatch, Parcel, chunk_of_group
from ..exchange import Exchange
from ..travel import Leg, Swap


class CapacityDispatch(Dispatch):
    """Rows lie as (experts, groups, capacity) in every chunk; places that nobody takes hold zeros."""

    has_empty_rows = True

    def parcels(self, routing: Routing, dtype: torch.dtype) -> list[Parcel]:
        """See `Dispatch`."""
        chunks = self.way.chunks
        places, num_places = self._places(routing)
        tokens_per_chunk = routing.num_tokens // chunks
        sources = places.new_full((num_places + 1,), tokens_per_chunk)
        sources.index_copy_(0, places, routing.tokens.remainder(tokens_per_chunk))
        weights = routing.weights.to(dtype)
        weights = weights.new_zeros(num_places + 1).index_copy(0, places, weights)
        by_expert = Swap(self.levels.num_ranks, self.levels.num_local)
        return [
            Parcel(own_sources, own_weights, self._legs(), by_expert, None)
            for own_sources, own_weights in zip(sources[:-1].chunk(chunks), weights[:-1].chunk(chunks))
        ]

    def _places(self, routing: Routing) -> tuple[Tensor, int]:
        """(place of every assignment in (chunk, expert, group, slot), their number: also the place of who is dropped).

        Of fixed size, so that no device is waited for.
        """
        chunk, group = chunk_of_group(routing, self.way.chunks)
        groups = routing.num_groups // self.way.chunks
        expert = self.levels.places(routing.tokens.device)[routing.experts]
        place = ((chunk * routing.num_experts + expert) * groups + group) * routing.capacity + routing.slots
        num_places = routing.num_experts * routing.num_groups * routing.capacity
        return torch.where(routing.kept, place, num_places), num_places

    def _legs(self) -> tuple[Leg, ...]:
        swap = Swap(*self.levels.shape)  # from the order of inner arrival to that of outer destinations
        return tuple(
            Leg(Exchange(group, self.meter, self.way.overlap), swap if level else None)
            for level, group in enumerate(self.levels.groups)
        )
