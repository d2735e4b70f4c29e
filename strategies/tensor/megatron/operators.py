"""The communication operators of Megatron's strategy, and the column-parallel product that hides one of them.

Before a column-parallel product comes Megatron's f (Shoeybi et al. 2019): copy_to_tp, or gather_from_sp under sequence
parallelism (Korthikanti et al. 2022). After a row-parallel product comes its conjugate g: reduce_from_tp, or
scatter_to_sp. Activations are (batch, seq, hidden); sequence parallelism splits dim 1. Each operator is an autograd
node of its own, as zero bubble needs: it runs the backward of a node that yields input and weight gradients twice,
collectives included. The overlapped node does in one what they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group
from parallelrun.models import float8
from parallelrun.models.autograd import apply, apply_to_all
from parallelrun.models.functions import cast, cast_all, linear

from ..common.transfers import Finish, start_all_gather, start_reduce_scatter, sum_of_products, when_done

PURPOSE = "activations"
SEQUENCE_DIM = 1


@dataclass(frozen=True)
class TPContext:
    """The tensor axis as a layer sees it: its group, whether activations between blocks are split along the
    sequence, and whether the input-gradient reduction may share a node with the weight gradients (never under zero
    bubble)."""

    group: Group
    sequence_parallel: bool
    overlap: bool


class _CopyToTP(torch.autograd.Function):
    """copy_to_tp (f): identity in forward; backward sums the input gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # In place: only products read what f returns, so the gradient that arrives is theirs alone.
        grad = grad.contiguous()
        comm.all_reduce(grad, ctx.group, PURPOSE)
        return grad, None


class _ReduceFromTP(torch.autograd.Function):
    """reduce_from_tp (g): forward sums in place (the input must be a fresh product); identity in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        comm.all_reduce(x, group, PURPOSE)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SplitSequence(torch.autograd.Function):
    """gather_from_sp (f under sequence parallelism): all-gather in forward, reduce-scatter in backward; or its
    conjugate, scatter_to_sp (g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, gathers: bool) -> Tensor:
        ctx.group, ctx.gathers = group, gathers
        return (comm.all_gather if gathers else comm.reduce_scatter)(x, group, PURPOSE, SEQUENCE_DIM)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        move = comm.reduce_scatter if ctx.gathers else comm.all_gather
        return move(grad, ctx.group, PURPOSE, SEQUENCE_DIM), None, None


class _OverlappedColumnLinear(torch.autograd.Function):
    """f and every product that reads its result, as one node: one reduction of the summed input gradient, which begins
    before the weight gradients are computed. Under sequence parallelism the slice is saved, not the whole input:
    backward gathers it again while it computes the input gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TPContext, in_float8: bool, *weights: Any) -> tuple[Any, ...]:
        """`weights`: weight and bias (or None) of each output in turn, as stored; they are rounded to x's dtype."""
        ctx.group, ctx.sequence_parallel, ctx.in_float8 = tp.group, tp.sequence_parallel, in_float8
        ctx.has_bias = [bias is not None for bias in weights[1::2]]
        ctx.save_for_backward(x, *weights[::2])
        gathered = comm.all_gather(x, tp.group, PURPOSE, SEQUENCE_DIM) if tp.sequence_parallel else x
        if in_float8:
            return float8.results(gathered, weights)
        rounded = cast_all(weights, x.dtype)
        return tuple([functional.linear(gathered, weight, bias) for weight, bias in zip(rounded[::2], rounded[1::2])])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        wants_weights = any(ctx.needs_input_grad[3::2])
        gathering = _start_gather(x, ctx.group) if ctx.sequence_parallel and wants_weights else None
        flat = [grad.flatten(0, -2) for grad in grads]
        operands: list[Any] = [*map(float8.quantise_gradient, flat)] if ctx.in_float8 else flat
        reducing = None
        if ctx.needs_input_grad[0]:
            shape = (*grads[0].shape[:-1], x.size(-1))
            products = float8.sum_of_products if ctx.in_float8 else sum_of_products
            reducing = _start_reduce(products(operands, cast_all(weights, x.dtype)).view(shape), ctx)
        gathered = gathering() if gathering else x
        rows: Any = gathered.flatten(0, -2)
        rows = float8.quantise(rows) if ctx.in_float8 else rows
        out: list[Tensor | None] = []
        for number, grad in enumerate(flat):
            wanted = ctx.needs_input_grad[3 + 2 * number]
            out += operands[number].t() @ rows if wanted else None, grad.sum(0) if ctx.has_bias[number] else None
        return reducing() if reducing else None, None, None, *cast_all(out, weights[0].dtype)


class OverlappedColumnConvolution(torch.autograd.Function):
    """f and the convolution that reads its result, as one node: the reduction of the input gradient begins before the
    weight gradient is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, stride: int, padding: int, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Weight and bias as stored; they are rounded to x's dtype."""
        ctx.group, ctx.window, ctx.has_bias = group, (stride, padding), bias is not None
        ctx.sequence_parallel = False  # images have no sequence
        ctx.save_for_backward(x, weight)
        weight, bias = cast_all((weight, bias), x.dtype)
        return functional.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        window = *([size, size] for size in ctx.window), [1, 1], False, [0, 0], 1  # not dilated, transposed or grouped
        operands, reducing = (grad, x, cast(weight, x.dtype), [weight.size(0)], *window), None
        if ctx.needs_input_grad[0]:
            reducing = _start_reduce(torch.ops.aten.convolution_backward(*operands, [True, False, False])[0], ctx)
        mask = [False, ctx.needs_input_grad[4], ctx.has_bias]
        own = torch.ops.aten.convolution_backward(*operands, mask)[1:]
        return reducing() if reducing else None, None, None, None, *cast_all(own, weight.dtype)


def _start_gather(x: Tensor, group: Group) -> Finish:
    """Begin to gather the sequence slices; the result is (batch, seq, hidden)."""
    gathering = start_all_gather(x, group, PURPOSE)
    return lambda: gathering().movedim(0, SEQUENCE_DIM).flatten(SEQUENCE_DIM, SEQUENCE_DIM + 1)


def _start_reduce(grad: Tensor, ctx: Any) -> Finish:
    """Begin to reduce the whole input gradient; the result is this rank's part."""
    if ctx.sequence_parallel:
        parts = grad.unflatten(SEQUENCE_DIM, (ctx.group.size, -1)).movedim(SEQUENCE_DIM, 0).contiguous()
        return start_reduce_scatter(parts, ctx.group, PURPOSE)
    return when_done(comm.all_reduce(grad, ctx.group, PURPOSE, async_op=True), grad)


def copy_or_gather(x: Tensor, tp: TPContext) -> Tensor:
    """Return the whole input of a column-parallel product, from what passes between blocks (f)."""
    return apply(_SplitSequence, x, tp.group, True) if tp.sequence_parallel else apply(_CopyToTP, x, tp.group)


def reduce_or_scatter(x: Tensor, tp: TPContext) -> Tensor:
    """Return what passes between blocks, from a fresh partial product, which is overwritten (g)."""
    return apply(_SplitSequence, x, tp.group, False) if tp.sequence_parallel else apply(_ReduceFromTP, x, tp.group)


def column_parallel_linear(
    x: Tensor, weights: list[tuple[Tensor, Tensor | None]], tp: TPContext, in_float8: str = ""
) -> tuple[Tensor, ...]:
    """Multiply f(x) by each local weight (rows of dim 0) and add its local bias: one output per (weight, bias).

    x is in the compute dtype: (batch, seq, in), its slice under sequence parallelism. in_float8: see `models.float8`.
    """
    if tp.overlap:
        flat = [part for pair in weights for part in pair]
        return apply_to_all(_OverlappedColumnLinear, x, tp, bool(in_float8), *flat)
    gathered = copy_or_gather(x, tp)
    if in_float8:
        return float8.multiply(gathered, weights, x.dtype, in_float8)
    return tuple([linear(gathered, weight, bias, x.dtype) for weight, bias in weights])
