"""GShard's dispatch: every expert has `capacity` places for each routing group, filled or not, so that all-to-alls are
equal and nothing waits for counts (Lepikhin et al. 2020, 3.2)."""

from __future__ import annotations

from torch import Tensor

from parallelrun.models.moe.routing import Routing

from ..dispatch import Dispatch, Parcel, chunk_of_group
from ..exchange import Exchange
from ..travel import Leg, Swap
from .places import pack


class CapacityDispatch(Dispatch):
    """Rows lie as (experts, groups, capacity) in every chunk; places that nobody takes hold zeros."""

    def parcels(self, routing: Routing) -> list[Parcel]:
        """See `Dispatch`."""
        by_expert = Swap(self.levels.num_ranks, self.levels.num_local)
        loads = pack(routing, self._places(routing), self.strategy.chunks)
        return [Parcel(load, self._legs(), by_expert, None) for load in loads]

    def _places(self, routing: Routing) -> Tensor:
        """Place of every kept assignment in (chunk, expert, group, slot)."""
        chunk, group = chunk_of_group(routing, self.strategy.chunks)
        groups = routing.num_groups // self.strategy.chunks
        expert = self.levels.places(routing.tokens.device)[routing.experts]
        return ((chunk * routing.num_experts + expert) * groups + group) * routing.capacity + routing.slots

    def _legs(self) -> tuple[Leg, ...]:
        swap = Swap(*self.levels.shape)  # from the order of inner arrival to that of outer destinations
        return tuple(
            Leg(Exchange(group, self.meter, self.strategy.overlap), swap if level else None)
            for level, group in enumerate(self.levels.groups)
        )
