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

from parallelrun.models.rounding import rounded

from ..common.autograd import apply, apply_to_all
from .buffers import ActivationPacking, MoveGroup, WeightPacking, input_packing, output_packing


class _GatherInput(torch.autograd.Function):
    """X gathered; its gradient's partial sums scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bundle: ActivationPacking) -> Tensor:
        ctx.bundle = bundle
        (whole,) = bundle.read(bundle.start_gather([x])())
        return bundle.shaped(whole.joined())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scattered(ctx.bundle, [grad])[0], None


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
        shape = (packing.num_parts, sum(packing.rows), grads[0].size(1))
        buffer = (torch.zeros if packing.is_padded else torch.empty)(shape, dtype=ctx.reduce, device=grads[0].device)
        for grad, matrix in zip(grads, packing.matrices(buffer)):
            matrix.fill(grad)
        mine = packing.start_scatter(buffer)()
        return None, None, None, *(own[:rows].to(dtype) for own, (rows, dtype) in zip(mine, ctx.like))


class _ScatterOutputs(torch.autograd.Function):
    """Partial sums of every Y scattered; their gradients gathered."""

    @staticmethod
    def forward(ctx: Any, bundle: ActivationPacking, *partial: Tensor) -> tuple[Tensor, ...]:
        ctx.bundle = bundle
        return _scattered(bundle, partial)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        whole = ctx.bundle.read(ctx.bundle.start_gather(grads)())
        return None, *(ctx.bundle.shaped(matrix.joined()) for matrix in whole)


def _scattered(bundle: ActivationPacking, partial: Sequence[Tensor]) -> tuple[Tensor, ...]:
    buffer, whole = bundle.new(partial[0])
    for matrix, source in zip(whole, partial):
        matrix.fill(source.flatten(0, -2))
    return bundle.start_scatter(buffer)()


def multiply(
    x: Tensor,
    weights: Sequence[Tensor],
    into_x: MoveGroup,
    out_of_y: MoveGroup,
    packing: WeightPacking,
    reduce: torch.dtype,
) -> tuple[Tensor, ...]:
    """X times each weight, without bias. into_x, out_of_y: how X is gathered and Y scattered."""
    bundle = input_packing(x, into_x)
    if into_x.group:
        x = apply(_GatherInput, x, bundle)
    if packing.groups:
        whole = apply_to_all(_GatherWeights, packing, x.dtype, reduce, *weights)
    else:
        whole = tuple(rounded(weight, x.dtype) for weight in weights)
    out = tuple(functional.linear(x, weight) for weight in whole)
    if out_of_y.group is None:
        return out
    outputs = output_packing(out_of_y, bundle, [y.size(-1) for y in out], packing)
    return apply_to_all(_ScatterOutputs, outputs, *out)
