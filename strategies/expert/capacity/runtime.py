"""GShard's dispatch: every expert has `capacity` slots per routing group, filled or not (Lepikhin et al. 2020, 3.2).

All-to-alls are therefore equal, and nothing waits for counts.
"""

from __future__ import annotations

from torch import Tensor

from parallelrun.mesh import Mesh
from parallelrun.models.moe.routing import Routing
from parallelrun.models.network import Network
from parallelrun.plan.structure import Plan

from ..common import dispatcher
from ..common.all_to_all import AllToAll
from ..common.dispatcher import ChunkDispatch, TokenDispatcher, chunk_and_group
from ..common.rows import BlockTranspose, Level
from .slots import assign_slots


def parallelize(network: Network, plan: Plan, mesh: Mesh) -> None:
    """Keep this rank's experts and dispatch tokens into capacity slots."""
    dispatcher.parallelize(network, plan, mesh, CapacityTokenDispatcher)


class CapacityTokenDispatcher(TokenDispatcher):
    """Rows are ordered as (experts, groups, capacity) in every chunk; empty slots hold zeros."""

    def chunks(self, routing: Routing) -> list[ChunkDispatch]:
        by_expert = BlockTranspose(self.groups.num_ranks, self.groups.num_local)
        slots = assign_slots(routing, self._slots(routing), self.settings.chunks)
        return [ChunkDispatch(own, self._levels(), by_expert, None) for own in slots]

    def _slots(self, routing: Routing) -> Tensor:
        """Return the slot of every kept assignment in (chunk, expert, group, slot)."""
        chunk, group = chunk_and_group(routing, self.settings.chunks)
        groups = routing.num_groups // self.settings.chunks
        expert = self.groups.send_order(routing.tokens.device)[routing.experts]
        return ((chunk * routing.num_experts + expert) * groups + group) * routing.capacity + routing.slots

    def _levels(self) -> tuple[Level, ...]:
        transpose = BlockTranspose(*self.groups.shape)  # from the order of inner arrival to outer destinations
        return tuple(
            Level(AllToAll(group, self.counter, self.settings.overlap), transpose if number else None)
            for number, group in enumerate(self.groups.groups)
        )
