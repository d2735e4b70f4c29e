"""One distributed product Y = X W^T over named axes, forward and backward, as a Product says.

Fused: one autograd node per layer. All gathers are started at once; each product is written where it will be sent
from; dX's reduction runs under the product that gives dW, as in Colossal-AI's 3D layers. Otherwise: `split_backward`.
Products of panels are in `summa`, lookups in `lookup`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallelrun.distributed.mesh import Mesh
from parallelrun.models.autograd import apply_to_all
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.product import Product

from ..common.traffic import overlaps
from . import split_backward, summa
from .block_matrix import BlockMatrix, multiply_into
from .buffers import ActivationPacking, WeightPacking, input_packing, move_group, output_packing, weight_packing

Weight = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class MatmulOptions:
    """Settings of a product that come from the plan. compute: dtype of X, W and Y in products and messages; reduce:
    dtype in which gradients of W are summed; save_gathered: backward uses the tensors that forward gathered, instead of
    gathering them again; fused: one autograd node may communicate and multiply (never under zero bubble)."""

    compute: torch.dtype
    reduce: torch.dtype
    save_gathered: bool = True
    fused: bool = True


def matmul_options(plan: Plan) -> MatmulOptions:
    compute, reduce = getattr(torch, plan.precision.compute), getattr(torch, plan.precision.reduce)
    return MatmulOptions(compute, reduce, plan.tensor.save_gathered, overlaps(plan))


class _Packings(NamedTuple):
    """How the operands of one layer are packed on this rank."""

    x: ActivationPacking
    y: ActivationPacking
    weights: WeightPacking
    options: MatmulOptions


def multiply(
    x: Tensor,
    weights: Sequence[Weight],
    product: Product,
    mesh: Mesh,
    options: MatmulOptions,
    out_features: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    """X times each weight, plus its bias: one output each.

    x: (samples, ..., features) in the compute dtype and the layout `product.x`; weights: (weight, bias or None) as
    stored, of one layer. Outputs have the layout `product.y`. out_features: each weight's global rows, needed where
    they do not divide (a vocabulary): ranks then hold unequal numbers of them.
    """
    stored = [weight for weight, _ in weights]
    if product.panels:
        out = summa.multiply(x, stored, product, mesh, options.reduce, options.fused)
    else:
        weight = weight_packing(product, mesh, stored, out_features)
        inputs = input_packing(x, move_group(product.gather_x, mesh))
        outputs = output_packing(move_group(product.scatter_y, mesh), inputs, weight)
        if options.fused:
            out = apply_to_all(_Multiply, x, _Packings(inputs, outputs, weight, options), *stored)
        else:
            out = split_backward.multiply(x, stored, inputs, outputs, weight, options.reduce)
    return tuple(y if bias is None else y.add_(bias.to(y.dtype)) for y, (_, bias) in zip(out, weights))


class _Multiply(torch.autograd.Function):
    """X times each weight (out, in): everything that moves, and the products, in one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: _Packings, *weights: Tensor) -> tuple[Tensor, ...]:
        gathering, gathering_weights = packed.x.start_gather([x]), packed.weights.start(weights, x.dtype)
        held_x, held_weights = gathering(), gathering_weights()
        (left,), right = packed.x.read(held_x), packed.weights.read(held_weights, x.dtype)
        buffer, partial = packed.y.new(x)
        for matrix, weight in zip(partial, right):
            multiply_into(matrix, [(left, weight.t())])
        scattering = packed.y.start_scatter(buffer)
        ctx.packed, ctx.like = packed, [(weight.size(0), weight.dtype) for weight in weights]
        ctx.save_for_backward(*((held_x, *held_weights) if packed.options.save_gathered else (x, *weights)))
        return scattering()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        packed: _Packings = ctx.packed
        wants_x, wants_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        gathering = packed.y.start_gather(grads)
        gathering_x, gathering_weights = _operands(ctx, wants_x, wants_weights)
        outputs = packed.y.read(gathering())
        reducing = reducing_weights = None
        if wants_x:
            buffer, (partial,) = packed.x.new(outputs[0].parts[0])
            multiply_into(partial, list(zip(outputs, packed.weights.read(gathering_weights(), buffer.dtype))))
            reducing = packed.x.start_scatter(buffer)
        if wants_weights:
            (x,) = packed.x.read(gathering_x())
            reducing_weights = _start_weight_gradients(outputs, x, packed)
        weight_grads = reducing_weights() if reducing_weights else [None] * len(ctx.like)
        own = [None if g is None else g[:rows].to(dtype) for g, (rows, dtype) in zip(weight_grads, ctx.like)]
        return reducing()[0] if reducing else None, None, *own


def _operands(
    ctx: Any, wants_x: bool, wants_weights: bool
) -> tuple[Callable[[], Tensor], Callable[[], Sequence[Tensor]]]:
    """Return functions that give the gathered X and weights in backward: saved ones, or those needed gathered again."""
    x, *weights = ctx.saved_tensors
    if ctx.packed.options.save_gathered:
        return lambda: x, lambda: weights
    gathering_x = ctx.packed.x.start_gather([x]) if wants_weights else lambda: x
    return gathering_x, ctx.packed.weights.start(weights, x.dtype) if wants_x else lambda: weights


def _start_weight_gradients(
    outputs: list[BlockMatrix], x: BlockMatrix, packed: _Packings
) -> Callable[[], Sequence[Tensor]]:
    """dW = dY^T X of every output, and begin to scatter their partial sums in the reduction dtype; gives this rank's
    rows of each, with those that pad."""
    weights, like = packed.weights, outputs[0].parts[0]
    buffer = weights.new(like, x.shape[1])
    for gradient, output in zip(weights.read(buffer, like.dtype), outputs):
        multiply_into(gradient, [(output.t(), x)])
    return weights.start_scatter(buffer[0].to(packed.options.reduce)) if weights.groups else lambda: buffer
