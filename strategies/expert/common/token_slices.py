"""Layers with experts whose tokens the ranks of tp divide: each sends a slice of every sequence to complete experts.

Under sequence parallelism a rank has its slice already. Otherwise all ranks have all tokens, with equal gradients: the
slice is taken before the router, and the results are gathered behind the experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group
from parallelrun.models.autograd import apply
from parallelrun.models.local_tokens import SomeTokens
from parallelrun.models.moe.layer import MoE
from parallelrun.models.moe.shared_groups import SharedGroups

from .plan import ROWS

SEQUENCE_DIM = 1


class _Slices(torch.autograd.Function):
    """A slice of the sequence in forward, an all-gather in backward; or, if it `gathers`, the other way round. Neither
    sums anything: what every rank has of all tokens is equal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, gathers: bool) -> Tensor:
        ctx.group, ctx.gathers = group, gathers
        return (_gathered if gathers else _sliced)(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_sliced if ctx.gathers else _gathered)(grad, ctx.group), None, None


def _sliced(x: Tensor, group: Group) -> Tensor:
    """A copy, so that not all of x is saved with it."""
    return x.chunk(group.size, SEQUENCE_DIM)[group.index].contiguous()


def _gathered(x: Tensor, group: Group) -> Tensor:
    return comm.all_gather(x, group, ROWS, SEQUENCE_DIM)


def divide(layer: MoE, group: Group, num_tokens: int, has_slices: bool) -> None:
    """Let each rank of `group` route and send its slice of every sequence, of which it holds num_tokens.

    has_slices: the layer's input and output are slices already.
    """
    router, size = layer.router, num_tokens // group.size
    slices = [range(start, start + size) for start in range(0, num_tokens, size)]
    router.over_ranks = SharedGroups(group, slices, router.over_ranks)
    own = router.local_tokens.indices(size, torch.device("cpu"), slices[group.index].start)
    router.local_tokens = SomeTokens(own.tolist())
    if not has_slices:
        layer.enter.register_forward_hook(lambda _, inputs, x: apply(_Slices, x, group, False))
        layer.leave.register_forward_hook(lambda _, inputs, y: apply(_Slices, y, group, True))
