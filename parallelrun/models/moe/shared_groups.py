"""Routing groups whose tokens several ranks hold: every rank routes all of a group, and keeps its own tokens.

Routing is decided by a token's scores, of which there are few; capacity and auxiliary losses count all tokens of a
group. So logits are gathered, and the same decisions are taken everywhere, as on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group
from parallelrun.models.autograd import apply
from parallelrun.models.moe.router import RoutingOverRanks
from parallelrun.models.moe.routing import Routing
from parallelrun.planner.pieces.router_settings import PURPOSE


class SharedGroups:
    """Routing groups of a router, shared by the ranks of a group. positions: of each rank's tokens in every sample, or
    in what a rank of `beyond` has of it, which shares groups with further ranks."""

    def __init__(self, group: Group, positions: Sequence[Sequence[int]], beyond: RoutingOverRanks | None = None):
        self._group, self._beyond = group, beyond
        in_turn = torch.tensor([position for num_own in positions for position in num_own])
        self._order = torch.argsort(in_turn)
        self._own = torch.tensor(positions[group.index])

    def gathered(self, logits: Tensor) -> Tensor:
        """(batch, own tokens, experts) -> (batch, seq, experts), in the order of positions."""
        gathered = apply(_GatherLogits, logits, self._group, self._order, self._own)
        return gathered if self._beyond is None else self._beyond.gathered(gathered)

    def own(self, routing: Routing) -> Routing:
        """The routing of own tokens, by their number here; the assignments of others are not kept."""
        routing = routing if self._beyond is None else self._beyond.own(routing)
        seq, num_own = self._order.numel(), self._own.numel()
        number = torch.full((seq,), -1, device=routing.tokens.device)
        number[self._own.to(number.device)] = torch.arange(num_own, device=number.device)
        local = number[routing.tokens.remainder(seq)]
        is_own = routing.kept & (local >= 0)
        tokens = routing.tokens.div(seq, rounding_mode="floor") * num_own + local.clamp(min=0)
        weights = torch.where(local >= 0, routing.weights, torch.zeros_like(routing.weights))
        num_tokens = routing.num_tokens // seq * num_own
        return routing._replace(tokens=tokens, kept=is_own, weights=weights, num_tokens=num_tokens)


class _GatherLogits(torch.autograd.Function):
    """Every rank computes what follows for all tokens: its own logits get the whole of their gradient here, as far as
    own tokens and the auxiliary loss depend on them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Group, order: Tensor, own: Tensor) -> Tensor:
        ctx.own = own
        return comm.all_gather(logits, group, PURPOSE, 1)[:, order.to(logits.device)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][:, ctx.own.to(grads[0].device)], None, None, None
