"""GShard's dispatch: every expert has `capacity` slots per routing group, filled or not (Lepikhin et al. 2020, 3.2).

All-to-alls are therefore equal, and nothing waits for counts.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from parallelrun.models.moe.routing import Routing

from ..common import dispatcher
from ..common.all_to_all import AllToAll
from ..common.dispatcher import ChunkDispatch, TokenDispatcher, chunk_and_group
from ..common.rows import BlockTranspose, Level
from .slots import assign_slots


class CapacityTokenDispatcher(TokenDispatcher):
    """Rows are ordered as (experts, groups, capacity) in every chunk; empty slots hold zeros."""

    def chunks(self, routing: Routing) -> list[ChunkDispatch]:
        slots = assign_slots(routing, self._slots(routing), self.settings.chunks)
        return [ChunkDispatch(own.permute, own.combine, self._levels(), None) for own in slots]

    def _slots(self, routing: Routing) -> Tensor:
        """Return the slot of every kept assignment in (chunk, expert, group, slot)."""
        chunk, group = chunk_and_group(routing, self.settings.chunks)
        groups = routing.num_groups // self.settings.chunks
        expert = self.groups.send_order(routing.tokens.device)[routing.experts]
        return ((chunk * routing.num_experts + expert) * groups + group) * routing.capacity + routing.slots

    def _levels(self) -> tuple[Level, ...]:
        """The second level sends in the order of outer destinations what arrived in that of inner sources."""
        first, *second = (AllToAll(group, self.counter, self.settings.overlap) for group in self.groups.groups)
        by_expert = BlockTranspose(self.groups.num_ranks, self.groups.num_local)
        if not second:
            return (Level(first, after=by_expert),)
        return Level(first), Level(second[0], BlockTranspose(*self.groups.shape), by_expert)


parallelize = partial(dispatcher.parallelize, dispatcher=CapacityTokenDispatcher)
