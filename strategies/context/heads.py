"""All-to-alls between heads and sequence: every rank gets all tokens of some heads, and back.

Paper: Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models".
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group
from parallelrun.models.autograd import apply

from .blockwise_plan import EXCHANGED


class _Exchange(torch.autograd.Function):
    """(batch, heads, tokens, head_dim) -> (batch, heads / size, size x tokens, head_dim), or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, to_sequence: bool) -> Tensor:
        ctx.group, ctx.to_sequence = group, to_sequence
        return _exchanged(x, group, to_sequence)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grads[0], ctx.group, not ctx.to_sequence), None, None


def _exchanged(x: Tensor, group: Group, to_sequence: bool) -> Tensor:
    split, joined = (1, 2) if to_sequence else (2, 1)
    parts = x.unflatten(split, (group.size, -1)).movedim(split, 0).contiguous()
    arrived = torch.empty_like(parts)
    comm.all_to_all(arrived, parts, group, EXCHANGED)
    return arrived.movedim(0, joined).flatten(joined, joined + 1)


def to_sequence(query: Tensor, key: Tensor, value: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Own tokens of all heads -> all of the group's tokens of this rank's heads, in one all-to-all.

    Heads of keys and values are repeated, where there are fewer than ranks.
    """
    size = group.size
    copies = size // gcd(size, key.size(1))
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    parts = [tensor.unflatten(1, (size, -1)) for tensor in (query, key, value)]
    counts = [tensor.size(2) for tensor in parts]
    both = apply(_Exchange, torch.cat(parts, 2).flatten(1, 2), group, True)
    query, key, value = both.split(counts, 1)
    return query, key, value


def to_heads(out: Tensor, group: Group) -> Tensor:
    """The group's tokens of this rank's heads -> own tokens of all heads."""
    return apply(_Exchange, out, group, False)
