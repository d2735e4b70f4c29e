"""Tokens sorted by expert, and back: the two steps around the experts, each one pass over memory.

A row is one kept assignment of a token to an expert. Both directions are gathers, in backward too: the sum over the
rows of a token is an `embedding_bag`, several times faster than index_add. Neither multiplies by weights of the model,
so a backward in two halves (zero bubble) does nothing twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from parallelrun.models.autograd import apply
from parallelrun.models.moe.routing import Routing


@dataclass(frozen=True)
class RowOrder:
    """The order of the n rows of a microbatch of T tokens: sorted by expert, then as in Routing. All int64.

    assignments, tokens: (n,), each row's assignment in the Routing and its token. counts: (experts,), rows of each
    expert. by_token: (n,), the rows sorted by token. starts: (T,), the index in `by_token` of each token's first row.
    """

    assignments: Tensor
    tokens: Tensor
    counts: Tensor
    by_token: Tensor
    starts: Tensor

    @property
    def num_tokens(self) -> int:
        return self.starts.size(0)


def order_of(routing: Routing) -> RowOrder:
    """The rows of all kept assignments."""
    last = routing.num_experts  # dropped assignments are sorted behind all experts
    ordered, assignments = torch.sort(torch.where(routing.kept, routing.experts, last), stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(last + 1, device=ordered.device))
    assignments = assignments[: int(bounds[-1])]
    return order_rows(assignments, routing.tokens[assignments], bounds.diff(), routing.num_tokens)


def order_rows(assignments: Tensor, tokens: Tensor, counts: Tensor, num_tokens: int) -> RowOrder:
    """The order of rows that are sorted already."""
    by_token = torch.argsort(tokens, stable=True)
    starts = torch.searchsorted(tokens[by_token], torch.arange(num_tokens, device=tokens.device))
    return RowOrder(assignments, tokens, counts, by_token, starts)


def spread(x: Tensor, order: RowOrder) -> Tensor:
    """x (T, hidden) -> (n, hidden): each row's token."""
    return apply(_SpreadRows, x, order.tokens, order.by_token, order.starts)


def combine(rows: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
    """rows (n, hidden), weights of the Routing (A,) -> (T, hidden): the weighted sum over each token's rows, 0 for a
    token without rows. A new tensor."""
    of_rows = weights.index_select(0, order.assignments).to(rows.dtype)
    return apply(_CombineRows, rows, of_rows, order.tokens, order.by_token, order.starts)


class _SpreadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, by_token: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(by_token, starts)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _sums(grad.contiguous(), *ctx.saved_tensors), None, None, None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, tokens: Tensor, by_token: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, tokens)
        return _sums(rows, by_token, starts, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weights, tokens = ctx.saved_tensors
        of_rows = grad.index_select(0, tokens)
        of_weights = (of_rows * rows).sum(-1)
        return of_rows.mul_(weights.unsqueeze(1)), of_weights, None, None, None


def _sums(rows: Tensor, by_token: Tensor, starts: Tensor, weights: Tensor | None = None) -> Tensor:
    """(T, hidden): for each token the weighted sum of its rows."""
    if rows.size(0) == 0:
        return rows.new_zeros(starts.size(0), rows.size(1))
    scales = None if weights is None else weights[by_token]
    return functional.embedding_bag(by_token, rows, starts, mode="sum", per_sample_weights=scales)
