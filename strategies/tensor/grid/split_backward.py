"""Moves as autograd nodes of their own, around plain products: what a split backward (zero bubble) needs.

Zero bubble goes through the graph once for the input gradient and once for the weight gradients; a node that yields
both runs twice, collectives included. Here what moves X yields only dX, what moves W only dW, and what moves Y comes
before both, so each collective is sent once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from parallelrun.models.autograd import apply_to_all
from parallelrun.models.rounding import rounded

from .buffers import ActivationPacking, MoveGroup, WeightPacking, input_packing


class _Move(torch.autograd.Function):
    """Activations gathered, or partial sums scattered; backward does the other one with the gradients."""

    @staticmethod
    def forward(ctx: Any, packing: ActivationPacking, gathers: bool, *activations: Tensor) -> tuple[Tensor, ...]:
        ctx.packing, ctx.gathers = packing, gathers
        return packing.gather(activations) if gathers else packing.scatter(activations)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *(ctx.packing.scatter(grads) if ctx.gathers else ctx.packing.gather(grads))


def gather(x: Tensor, move: MoveGroup) -> Tensor:
    """Gather an activation along a dim; backward sums the gradients of all ranks, and scatters them."""
    return x if move.group is None else apply_to_all(_Move, input_packing(x, move), True, x)[0]


def scatter(y: Tensor, move: MoveGroup) -> Tensor:
    """Sum an activation over the ranks, and scatter it along a dim."""
    if move.group is None:
        return y
    packing = ActivationPacking(move, y.numel() // y.size(-1), tuple(y.shape[1:-1]), (y.size(-1),), (y.size(-1),))
    return apply_to_all(_Move, packing, False, y)[0]


class _GatherWeights(torch.autograd.Function):
    """Every weight gathered, rounded to the compute dtype; their gradients reduce-scattered in the reduction dtype."""

    @staticmethod
    def forward(
        ctx: Any, packing: WeightPacking, compute: torch.dtype, reduce: torch.dtype, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.packing, ctx.reduce, ctx.like = packing, reduce, [(weight.size(0), weight.dtype) for weight in weights]
        buffer = packing.start_gather(weights, compute)()
        return tuple(pieces.joined().detach() for pieces in packing.matrices(buffer))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        packing: WeightPacking = ctx.packing
        (buffer,) = packing.new(grads[0].new_empty(0, dtype=ctx.reduce), grads[0].size(1))
        for grad, matrix in zip(grads, packing.matrices(buffer)):
            matrix.fill(grad)
        mine = packing.start_scatter(buffer)()
        return None, None, None, *(own[:rows].to(dtype) for own, (rows, dtype) in zip(mine, ctx.like))


def multiply(
    x: Tensor,
    weights: Sequence[Tensor],
    inputs: ActivationPacking,
    outputs: ActivationPacking,
    packing: WeightPacking,
    reduce: torch.dtype,
) -> tuple[Tensor, ...]:
    """X times each weight, without bias. inputs, outputs, packing: of X, of every Y and of the weights."""
    x = gather(x, inputs.move)
    if packing.groups:
        gathered = apply_to_all(_GatherWeights, packing, x.dtype, reduce, *weights)
    else:
        gathered = tuple(rounded(weight, x.dtype) for weight in weights)
    out = tuple(functional.linear(x, weight) for weight in gathered)
    return out if outputs.move.group is None else apply_to_all(_Move, outputs, False, *out)
