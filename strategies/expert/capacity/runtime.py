"""GShard's dispatch: every expert has `capacity` slots per routing group, filled or not (Lepikhin et al. 2020, 3.2).

All-to-alls are therefore equal, and nothing waits for counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from parallelrun.models.autograd import apply
from parallelrun.models.moe.routing import Routing

from ..common import dispatcher
from ..common.dispatcher import ChunkDispatch, TokenDispatcher, chunk_and_group
from ..common.rows import BlockTranspose, Level


@dataclass(frozen=True)
class CapacitySlots:
    """The s slots of one chunk of T tokens, which have a assignments to experts.

    sources: int64 (s,), the token in a slot; T for an empty slot. weights: (s,), of the expert's output; 0 if empty.
    taken: int64 (a,), the slot of each assignment, by token; is_kept: bool (a,), false for a dropped assignment, whose
    `taken` is meaningless. starts: int64 (T,), where each token's assignments begin.
    """

    sources: Tensor
    weights: Tensor
    taken: Tensor
    is_kept: Tensor
    starts: Tensor

    def permute(self, x: Tensor) -> Tensor:
        """x (T, hidden) -> (s, hidden); zeros in empty slots."""
        return apply(_FillSlots, x, self.sources, self.taken, self.is_kept, self.starts)

    def combine(self, rows: Tensor) -> Tensor:
        """rows (s, hidden) -> (T, hidden), a new tensor: weighted sums; 0 where nothing was kept."""
        weights = self.weights.to(rows.dtype)
        return apply(_CombineSlots, rows, weights, self.sources, self.taken, self.is_kept, self.starts)


def assign_slots(routing: Routing, slots: Tensor, chunks: int) -> list[CapacitySlots]:
    """Return the slots of every chunk. slots: int64 (A,), the slot of every kept assignment, chunk by chunk."""
    num_slots = routing.num_experts * routing.num_groups * routing.capacity
    tokens_per_chunk = routing.num_tokens // chunks
    num_assignments, dropped = routing.tokens.size(0), num_slots  # one more slot, for all dropped assignments
    slots = torch.where(routing.kept, slots, dropped)
    assigned = slots.new_full((num_slots + 1,), num_assignments)  # the assignment in each slot; one more: none
    assigned.index_copy_(0, slots, torch.arange(num_assignments, device=slots.device))
    assigned = assigned[:-1]
    tokens = routing.tokens.remainder(tokens_per_chunk)
    sources = torch.cat((tokens, tokens.new_full((1,), tokens_per_chunk))).index_select(0, assigned)
    weights = torch.cat((routing.weights, routing.weights.new_zeros(1))).index_select(0, assigned)
    by_token = torch.argsort(routing.tokens, stable=True)
    numbers = torch.arange(tokens_per_chunk, device=slots.device)
    by_chunk = zip(
        sources.chunk(chunks),
        weights.chunk(chunks),
        slots[by_token].remainder(num_slots // chunks).chunk(chunks),
        routing.kept[by_token].chunk(chunks),
        [torch.searchsorted(own, numbers) for own in tokens[by_token].chunk(chunks)],
    )
    return [CapacitySlots(*parts) for parts in by_chunk]


class _FillSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sources: Tensor, taken: Tensor, is_kept: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(taken, is_kept, starts)
        return torch.cat((x, x.new_zeros(1, x.size(1)))).index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        taken, is_kept, starts = ctx.saved_tensors
        return _sums(grad.contiguous(), taken, starts, is_kept.to(grad.dtype)), None, None, None, None


class _CombineSlots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, sources: Tensor, taken: Tensor, is_kept: Tensor, starts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, sources)
        return _sums(rows, taken, starts, weights[taken] * is_kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        rows, weights, sources = ctx.saved_tensors
        of_rows = grad.index_select(0, sources.clamp(max=grad.size(0) - 1))  # an empty slot's weight is 0
        of_weights = (of_rows * rows).sum(-1)
        return of_rows.mul_(weights.unsqueeze(1)), of_weights, None, None, None, None


def _sums(rows: Tensor, taken: Tensor, starts: Tensor, scales: Tensor) -> Tensor:
    """Return for each token the sum of its rows, each times its scale."""
    return functional.embedding_bag(taken, rows, starts, mode="sum", per_sample_weights=scales)


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
        first, *second = map(self.all_to_all, self.groups.groups)
        by_expert = BlockTranspose(self.groups.num_ranks, self.groups.num_local)
        if not second:
            return (Level(first, after=by_expert),)
        return Level(first), Level(second[0], BlockTranspose(*self.groups.shape), by_expert)


parallelize = partial(dispatcher.parallelize, dispatcher=CapacityTokenDispatcher)
