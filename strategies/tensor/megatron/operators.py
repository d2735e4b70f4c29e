"""The conjugate operators of Megatron's tensor strategy, each a node of its own in the autograd graph, and the one
fused
node that hides the input gradient's reduction under the weight gradients.

Source: Shoeybi et al. 2019 (f and g), Korthikanti et al. 2022 (sequence parallel: f and g become all-gather and
reduce-scatter). Activations are (batch, seq, hidden); sequence parallel cuts dim 1. Nodes of their own are what zero
bubble needs: it runs the backward of a node that yields input and weight gradients twice, collectives included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from parallelrun import comm
from parallelrun.mesh import Group
from parallelrun.models.rounding import rounded

PURPOSE = "activations"
SEQUENCE_DIM = 1


class _CopyToTP(torch.autograd.Function):
    """f: identity forward, sum of the input gradients backward."""

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
    """g: sum forward (in place, the input must be a fresh product), identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        comm.all_reduce(x, group, PURPOSE)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromSP(torch.autograd.Function):
    """f under sequence parallel: all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return comm.all_gather(x, group, PURPOSE, SEQUENCE_DIM)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return comm.reduce_scatter(grad, ctx.group, PURPOSE, SEQUENCE_DIM), None


class _ScatterToSP(torch.autograd.Function):
    """g under sequence parallel: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return comm.reduce_scatter(x, group, PURPOSE, SEQUENCE_DIM)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return comm.all_gather(grad, ctx.group, PURPOSE, SEQUENCE_DIM), None


class _OverlappedColumnLinear(torch.autograd.Function):
    """f and every product behind it as one node: one reduction of the summed input gradient, started before the
    weight gradients are computed and waited for after. Under sequence parallel the slice is kept, not the whole input:
    backward gathers it again under the input-gradient product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sequence_parallel: bool, *weights: Any) -> tuple:
        """`weights`: weight and bias (or None) of each output in turn, as stored; they are rounded to x's dtype."""
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.has_bias = [bias is not None for bias in weights[1::2]]
        ctx.save_for_backward(x, *weights[::2])
        whole = comm.all_gather(x, group, PURPOSE, SEQUENCE_DIM) if sequence_parallel else x
        return tuple(
            functional.linear(whole, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
            for weight, bias in zip(weights[::2], weights[1::2])
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        wants_weights = any(ctx.needs_input_grad[3::2])
        gathering = _start_gather(x, ctx.group) if ctx.sequence_parallel and wants_weights else None
        flat = [grad.flatten(0, -2) for grad in grads]
        reducing = None
        if ctx.needs_input_grad[0]:
            shape = (*grads[0].shape[:-1], x.size(-1))
            reducing = _start_reduce(_input_gradient(flat, weights, x.dtype).view(shape), ctx)
        whole = gathering() if gathering else x
        rows = whole.flatten(0, -2)
        out: list[Tensor | None] = []
        for number, (grad, weight) in enumerate(zip(flat, weights)):
            wanted = ctx.needs_input_grad[3 + 2 * number]
            out.append((grad.t() @ rows).to(weight.dtype) if wanted else None)
            out.append(grad.sum(0).to(weight.dtype) if ctx.has_bias[number] else None)
        return reducing() if reducing else None, None, None, *out


def _input_gradient(grads: list[Tensor], weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Sum over outputs of grad @ weight, accumulated in one buffer."""
    total = grads[0] @ weights[0].to(dtype)
    for grad, weight in zip(grads[1:], weights[1:]):
        total.addmm_(grad, weight.to(dtype))
    return total


def _start_gather(x: Tensor, group: Group) -> Any:
    """Begin the all-gather of the sequence slices; the function returned waits and gives (batch, seq, hidden)."""
    parts = x.new_empty((group.size, *x.shape))
    work = comm.all_gather_into(parts.flatten(0, 1), x.contiguous(), group, PURPOSE, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return parts.movedim(0, SEQUENCE_DIM).flatten(SEQUENCE_DIM, SEQUENCE_DIM + 1)

    return finish


def _start_reduce(grad: Tensor, ctx: Any) -> Any:
    """Begin the reduction of the whole input gradient; the function returned waits and gives this rank's part."""
    if not ctx.sequence_parallel:
        work = comm.all_reduce(grad, ctx.group, PURPOSE, async_op=True)
        mine = grad
    else:
        parts = grad.unflatten(SEQUENCE_DIM, (ctx.group.size, -1)).movedim(SEQUENCE_DIM, 0).contiguous()
        mine = torch.empty_like(parts[0])
        work = comm.reduce_scatter_into(mine, parts.flatten(0, 1), ctx.group, PURPOSE, async_op=True)

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return mine

    return finish


def copy_or_gather(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """f: from what passes between blocks to the whole input of a column product."""
    return (_GatherFromSP if sequence_parallel else _CopyToTP).apply(x, group)


def reduce_or_scatter(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """g: from a fresh partial product (overwritten) to what passes between blocks."""
    return (_ScatterToSP if sequence_parallel else _ReduceFromTP).apply(x, group)


def column_parallel_linear(
    x: Tensor,
    weights: list[tuple[Tensor, Tensor | None]],
    group: Group,
    sequence_parallel: bool,
    overlap: bool,
) -> tuple[Tensor, ...]:
    """f(x) times each local weight (rows of dim 0), plus its local bias: one output per (weight, bias).

    x is in the compute dtype: (batch, seq, in), its slice under sequence parallel. overlap: in one node;
    never under zero bubble.
    """
    if overlap:
        return _OverlappedColumnLinear.apply(x, group, sequence_parallel, *(part for pair in weights for part in pair))
    whole = copy_or_gather(x, group, sequence_parallel)
    return tuple(
        functional.linear(whole, rounded(weight, x.dtype), None if bias is None else bias.to(x.dtype))
        for weight, bias in weights
    )
