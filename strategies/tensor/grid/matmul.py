"""One distributed product Y = X W^T over named axes, forward and backward, as a Product says.

Fused: one autograd node per layer. All gathers are started at once; each product is written where it will be sent
from; dX's reduction runs under the product that gives dW, as in Colossal-AI's 3D layers. For split backwards: `nodes`.
Products of panels are in `summa`, lookups in `lookup`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallelrun.mesh import Mesh
from parallelrun.plan.structure import Plan
from parallelrun.product import Product

from ..common.autograd import apply_to_all
from ..common.product_strategy import overlaps
from . import lookup, split_backward, summa
from .block_matrix import BlockMatrix, multiply_into
from .buffers import MoveGroup, WeightPacking, input_packing, move_group, output_packing, weight_packing

Weight = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class MatmulOptions:
    """What a product must know of the plan. compute: dtype of X, W and Y where they multiply and move; reduce: in which
    gradients of W are summed; save_gathered: keep what forward gathered instead of gathering it again; fused: one node
    may move operands and multiply (never under zero bubble)."""

    compute: torch.dtype
    reduce: torch.dtype
    save_gathered: bool = True
    fused: bool = True


def matmul_options(plan: Plan) -> MatmulOptions:
    """The MatmulOptions of every product of a plan."""
    compute, reduce = getattr(torch, plan.precision.compute), getattr(torch, plan.precision.reduce)
    return MatmulOptions(compute, reduce, plan.tensor.save_gathered, overlaps(plan))


@dataclass(frozen=True)
class _Moves:
    """How the operands of one layer move on this rank."""

    into_x: MoveGroup
    out_of_y: MoveGroup
    packing: WeightPacking
    options: MatmulOptions

    def weights(self, held: Sequence[Tensor], dtype: torch.dtype) -> list[BlockMatrix]:
        """Every W: out of the gathered buffer, or, where none is gathered, out of the stored ones."""
        return self.packing.matrices(held[0]) if self.packing.groups else [BlockMatrix((w.to(dtype),)) for w in held]

    def start_weights(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Callable[[], Sequence[Tensor]]:
        """Begin to gather the stored weights, if they are: what the function returned gives is read by `weights`."""
        if not self.packing.groups:
            return lambda: weights
        gathering = self.packing.start_gather(weights, dtype)
        return lambda: [gathering()]


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
        moves = _Moves(
            move_group(product.gather_x, mesh),
            move_group(product.scatter_y, mesh),
            weight_packing(product, mesh, stored, out_features),
            options,
        )
        if options.fused:
            out = apply_to_all(_Multiply, x, moves, *stored)
        else:
            out = split_backward.multiply(x, stored, moves.into_x, moves.out_of_y, moves.packing, options.reduce)
    return tuple(y if bias is None else y.add_(bias.to(y.dtype)) for y, (_, bias) in zip(out, weights))


def look_up(ids: Tensor, table: Tensor, product: Product, mesh: Mesh, options: MatmulOptions, vocab: int) -> Tensor:
    """Rows of the table for token ids, in the compute dtype, lying as `product.y`.

    ids: int64 (samples, ...) of the rows that `product.x` splits; table: this rank's (rows, features) as stored, of
    `vocab` rows in all. An id that is no row of the table gives zeros.
    """
    return lookup.look_up(ids, table, product, mesh, (options.compute, options.reduce), vocab)


class _Multiply(torch.autograd.Function):
    """X times each weight (out, in): everything that moves, and the products, in one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: _Moves, *weights: Tensor) -> tuple[Tensor, ...]:
        bundle = input_packing(x, moves.into_x)
        gathering, gathering_weights = bundle.start_gather([x]), moves.start_weights(weights, x.dtype)
        held_x, held_weights = gathering(), gathering_weights()
        (left,), right = bundle.read(held_x), moves.weights(held_weights, x.dtype)
        outputs = output_packing(moves.out_of_y, bundle, [weight.shape[0] for weight in right], moves.packing)
        buffer, partial = outputs.new(x)
        for matrix, weight in zip(partial, right):
            multiply_into(matrix, [(left, weight.t())])
        scattering = outputs.start_scatter(buffer)
        ctx.moves, ctx.bundle, ctx.outputs = moves, bundle, outputs
        ctx.like = [(weight.size(0), weight.dtype) for weight in weights]
        ctx.save_for_backward(*((held_x, *held_weights) if moves.options.save_gathered else (x, *weights)))
        return scattering()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        moves, bundle = ctx.moves, ctx.bundle
        wants_x, wants_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        gathering = ctx.outputs.start_gather(grads)
        gathering_x, gathering_weights = _operands(ctx, wants_x, wants_weights)
        outputs = ctx.outputs.read(gathering())
        reducing = reducing_weights = None
        if wants_x:
            buffer, (partial,) = bundle.new(outputs[0].parts[0])
            multiply_into(partial, list(zip(outputs, moves.weights(gathering_weights(), buffer.dtype))))
            reducing = bundle.start_scatter(buffer)
        if wants_weights:
            (x,) = bundle.read(gathering_x())
            reducing_weights = _start_weight_gradients(outputs, x, moves)
        found = reducing_weights() if reducing_weights else [None] * len(ctx.like)
        own = [None if g is None else g[:rows].to(dtype) for g, (rows, dtype) in zip(found, ctx.like)]
        return reducing()[0] if reducing else None, None, *own


def _operands(
    ctx: Any, wants_x: bool, wants_weights: bool
) -> tuple[Callable[[], Tensor], Callable[[], Sequence[Tensor]]]:
    """What gives the gathered X and weights in backward: kept, or what of them is needed gathered once more."""
    x, *weights = ctx.saved_tensors
    if ctx.moves.options.save_gathered:
        return lambda: x, lambda: weights
    gathering_x = ctx.bundle.start_gather([x]) if wants_weights else lambda: x
    return gathering_x, ctx.moves.start_weights(weights, x.dtype) if wants_x else lambda: weights


def _start_weight_gradients(outputs: list[BlockMatrix], x: BlockMatrix, moves: _Moves) -> Callable[[], list[Tensor]]:
    """dW = dY^T X of every output, and begin to scatter their partial sums in the reduction dtype; gives this rank's
    rows of each, with those that pad."""
    packing, like = moves.packing, outputs[0].parts[0]
    if packing.groups:
        new = like.new_zeros if packing.is_padded else like.new_empty
        buffer = new((packing.num_parts, sum(packing.rows), x.shape[1]))
        gradients = packing.matrices(buffer)
    else:
        found = [like.new_empty((output.shape[1], x.shape[1])) for output in outputs]
        gradients = [BlockMatrix((gradient,)) for gradient in found]
    for gradient, output in zip(gradients, outputs):
        multiply_into(gradient, [(output.t(), x)])
    return packing.start_scatter(buffer.to(moves.options.reduce)) if packing.groups else lambda: found
