"""An all-to-all as an autograd node: a tensor that is split along one dim becomes one that is split along another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group
from parallelrun.models.autograd import apply


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, purpose: str, split: int, joined: int) -> Tensor:
        ctx.reverse = group, purpose, joined, split
        return _exchanged(x, group, purpose, split, joined)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _exchanged(grads[0], *ctx.reverse), None, None, None, None


def _exchanged(x: Tensor, group: Group, purpose: str, split: int, joined: int) -> Tensor:
    parts = x.unflatten(split, (group.size, -1)).movedim(split, 0).contiguous()
    arrived = torch.empty_like(parts)
    comm.all_to_all(arrived, parts, group, purpose)
    return arrived.movedim(0, joined).flatten(joined, joined + 1)


def exchange(x: Tensor, group: Group, purpose: str, split: int, joined: int) -> Tensor:
    """Return this rank's part along dim `split` of what the ranks of `group` have parts of along dim `joined`. Sizes
    along `split` divide."""
    return apply(_Exchange, x, group, purpose, split, joined)
