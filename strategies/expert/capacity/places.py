"""Rows in the places that every expert has for each routing group, some of them empty. No size depends on the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from parallelrun.models.moe.routing import Routing


@dataclass(frozen=True)
class Places:
    """The p places of one chunk of T tokens, which have a assignments to experts.

    sources: int64 (p,), the token in a place; T: it is empty. weights: (p,), of what comes back; 0 of empty ones.
    taken: int64 (a,), the place of each assignment, by token; kept: bool (a,), false: it was dropped and `taken` means
    nothing. starts: int64 (T,), where each token's assignments begin.
    """

    sources: Tensor
    weights: Tensor
    taken: Tensor
    kept: Tensor
    starts: Tensor

    def spread(self, x: Tensor) -> Tensor:
        """x (T, hidden) -> (p, hidden); zeros in empty places."""
        return _Spread.apply(x, self.sources, self.taken, self.kept, self.starts)

    def combine(self, rows: Tensor) -> Tensor:
        """rows (p, hidden) -> (T, hidden), a fresh tensor: weighted sums; 0 where nothing was kept."""
        return _Combine.apply(rows, self.weights.to(rows.dtype), self.sources, self.taken, self.kept, self.starts)


def pack(routing: Routing, places: Tensor, chunks: int) -> list[Places]:
    """places: int64 (A,), that of every kept assignment among all, chunk by chunk."""
    num_places = routing.num_experts * routing.num_groups * routing.capacity
    tokens_per_chunk = routing.num_tokens // chunks
    num_assignments, dropped = routing.tokens.size(0), num_places  # one place more, for all that are dropped
    places = torch.where(routing.kept, places, dropped)
    assigned = places.new_full((num_places + 1,), num_assignments)  # who has a place; one more: nobody
    assigned.index_copy_(0, places, torch.arange(num_assignments, device=places.device))
    assigned = assigned[:-1]
    tokens = routing.tokens.remainder(tokens_per_chunk)
    sources = torch.cat((tokens, tokens.new_full((1,), tokens_per_chunk))).index_select(0, assigned)
    weights = torch.cat((routing.weights, routing.weights.new_zeros(1))).index_select(0, assigned)
    by_token = torch.argsort(routing.tokens, stable=True)
    numbers = torch.arange(tokens_per_chunk, device=places.device)
    by_chunk = zip(
        sources.chunk(chunks),
        weights.chunk(chunks),
        places[by_token].remainder(num_places // chunks).chunk(chunks),
        routing.kept[by_token].chunk(chunks),
        [torch.searchsorted(own, numbers) for own in tokens[by_token].chunk(chunks)],
    )
    return [Places(*parts) for parts in by_chunk]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sources: Tensor, taken: Tensor, kept: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(taken, kept, starts)
        return torch.cat((x, x.new_zeros(1, x.size(1)))).index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        taken, kept, starts = ctx.saved_tensors
        return _sums(grad.contiguous(), taken, starts, kept.to(grad.dtype)), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, sources: Tensor, taken: Tensor, kept: Tensor, starts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, sources)
        return _sums(rows, taken, starts, weights[taken] * kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        rows, weights, sources = ctx.saved_tensors
        of_rows = grad.index_select(0, sources.clamp(max=grad.size(0) - 1))  # an empty place's weight is 0
        of_weights = (of_rows * rows).sum(-1)
        return of_rows.mul_(weights.unsqueeze(1)), of_weights, None, None, None, None


def _sums(rows: Tensor, taken: Tensor, starts: Tensor, scales: Tensor) -> Tensor:
    """For each token the sum of the rows that it has, each times its scale."""
    return functional.embedding_bag(taken, rows, starts, mode="sum", per_sample_weights=scales)
