"""Dispatch, experts and combine of one layer, chunk by chunk, with communication behind computation.

All chunks' rows are being sent while the shared expert computes; a chunk's results are sent back while the next chunk's
experts compute. The order in which autograd nodes are created gives backward the same overlap, from the last chunk to
the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallelrun.distributed.mesh import Group, Mesh
from parallelrun.distributed.turns import Turns
from parallelrun.models.moe import own_experts
from parallelrun.models.moe.layer import LocalDispatcher, MoE
from parallelrun.models.moe.routing import Routing
from parallelrun.models.network import Network
from parallelrun.planner.contract.expert_dispatcher import ExpertDispatcher
from parallelrun.planner.contract.plan import Plan

from . import token_slices
from .all_to_all import AllToAll, ByteCounter
from .plan import AXIS, levels
from .rows import ExpertGroups, Level, RowsInTransit


@dataclass(frozen=True)
class ChunkDispatch:
    """How a rank sends one chunk of its tokens.

    pack: x (tokens, hidden) -> rows in the order of `ExpertGroups.send_order`. combine: rows as `pack` ordered them,
    after the experts -> their weighted sums (tokens, hidden). levels: the all-to-alls, after which rows are ordered by
    expert. counts: rows of each of this rank's experts; None where all have equally many.
    """

    pack: Callable[[Tensor], Tensor]
    combine: Callable[[Tensor], Tensor]
    levels: tuple[Level, ...]
    counts: Tensor | None


class TokenDispatcher(LocalDispatcher, ABC):
    """Brings the rows of one layer's tokens to the experts of all ep ranks, and the results back."""

    def __init__(self, settings: ExpertDispatcher, groups: ExpertGroups, turns: Turns):
        self.settings, self.groups, self.turns, self.counter = settings, groups, turns, ByteCounter()

    def take_bytes(self) -> int:
        return self.counter.take()

    def all_to_all(
        self, group: Group, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> AllToAll:
        """Return an all-to-all of rows; None: equal parts."""
        return AllToAll(group, self.counter, self.turns, self.settings.overlap, sends, receives)

    @abstractmethod
    def chunks(self, routing: Routing) -> list[ChunkDispatch]:
        """Return how each chunk is sent."""

    def __call__(
        self, x: Tensor, routing: Routing, experts: Callable[..., Tensor], beside: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        chunks = self.chunks(routing)
        tokens = x.split(x.size(0) // len(chunks))
        sent = [RowsInTransit(chunk.pack(own), chunk.levels) for own, chunk in zip(tokens, chunks)]
        shared = beside() if beside is not None else None
        for rows_of_chunk in sent:
            rows_of_chunk.advance()
        returning: list[RowsInTransit] = []
        for rows_of_chunk, chunk in zip(sent, chunks):
            rows = rows_of_chunk.wait()
            if chunk.counts is None:
                rows = experts(rows.unflatten(0, (self.groups.num_local, -1)), None).flatten(0, 1)
            else:
                rows = experts(rows, chunk.counts)
            returning.append(RowsInTransit(rows, (level.reversed for level in reversed(chunk.levels))))
        for rows_of_chunk in returning:
            rows_of_chunk.advance()
        arrived = [rows_of_chunk.wait() for rows_of_chunk in returning]
        sums = [chunk.combine(rows) for chunk, rows in zip(chunks, arrived)]
        return sums[0] if len(sums) == 1 else torch.cat(sums), shared


def chunk_and_group(routing: Routing, chunks: int) -> tuple[Tensor, Tensor]:
    """Return (chunk, group within the chunk) of each assignment."""
    assert routing.num_groups % chunks == 0, f"{routing.num_groups} routing groups in {chunks} chunks"
    group = routing.tokens.div(routing.num_tokens // routing.num_groups, rounding_mode="floor")
    per_chunk = routing.num_groups // chunks
    return group.div(per_chunk, rounding_mode="floor"), group.remainder(per_chunk)


def parallelize(network: Network, plan: Plan, mesh: Mesh, dispatcher: type[TokenDispatcher]) -> None:
    """Keep only this rank's experts in every MoE layer (parameters uninitialised) and give the layer its dispatcher."""
    assert plan.expert is not None
    groups = ExpertGroups(tuple(map(mesh.group, levels(plan))), plan.spec.experts // plan.mesh.size(AXIS))
    for layer in network.modules():
        if isinstance(layer, MoE):
            _keep_own(layer.experts, groups.num_local)
            layer.dispatch = dispatcher(plan.expert, groups, mesh.turns)
            if plan.ep_spans_tp and plan.token_ranks > 1:
                group = mesh.group(plan.tensor.token_axis(plan))
                token_slices.divide(layer, group, plan.seq, plan.tensor.slices_tokens)
        elif own_experts.is_own(layer):
            _keep_own(layer, groups.num_local)
            own_experts.send(layer, dispatcher(plan.expert, groups, mesh.turns))


def _keep_own(experts: nn.Module, number: int) -> None:
    """Replace the parameters by those of so many experts."""
    for name, weight in list(experts.named_parameters()):
        local = weight.new_empty(number, *weight.shape[1:])
        setattr(experts, name, nn.Parameter(local, requires_grad=weight.requires_grad))
