"""Products of linear layers in float8: inputs and weights in e4m3, gradients of results in e5m2, a scale each.

The scale of an operand is the power of 2 by which its largest magnitude just fits (current scaling). So a shard or a
microbatch is rounded as the whole tensor would be, but for numbers 2^15 times smaller than the largest. torchao's
Float8Linear is an nn.Linear that sends nothing, so it cannot stand inside column- and row-parallel layers; here only
the products change. Nodes save what they read as it came, as torchao's do, and round it again in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallelrun.distributed import torch_private
from parallelrun.models.autograd import apply_to_all
from parallelrun.models.functions import cast, cast_all

OPERAND, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
FUSED, SPLIT = "fused", "split"  # split: backward computes gradients of inputs and of weights in passes of their own


@dataclass(frozen=True)
class Float8:
    """A matrix of `values` in 8 bits times a number. dtype: of its products."""

    values: Tensor
    scale: Tensor
    dtype: torch.dtype

    def t(self) -> Float8:
        return Float8(self.values.t(), self.scale, self.dtype)

    def __matmul__(self, other: Float8) -> Tensor:
        """By torch's kernel where the device has one, else by that of `dtype` on the same numbers."""
        if torch_private.has_scaled_product(self.values, other.values):
            return torch_private.scaled_product(self.values, other.values, (self.scale, other.scale), self.dtype)
        return self.widened() @ other.widened()

    def widened(self) -> Tensor:
        """The numbers in `dtype`, which has them all."""
        return self.values.to(self.dtype).mul_(self.scale)


def quantise(matrix: Tensor, kind: torch.dtype = OPERAND) -> Float8:
    """Round a matrix to 8 bits. If an element is infinite or undefined, the products are.

    In fp64, which only verify computes in, to the same significand without bounds of the exponent, nor scales: these
    differ between shards, and numbers that one of them makes subnormal would not be rounded as on one device.
    """
    if matrix.dtype == torch.float64:
        significand, exponent = torch.frexp(matrix)
        parts = 2 / torch.finfo(kind).eps  # 2 ** the bits of the significand: 4 or 3
        values = torch.ldexp((parts * significand).round_(), exponent) / parts
        return Float8(values, matrix.new_ones(()), matrix.dtype)
    smallest, largest = matrix.detach().aminmax()
    ratio = torch.maximum(-smallest, largest).float() / torch.finfo(kind).max
    scale = torch.ldexp(torch.ones_like(ratio), torch.frexp(ratio).exponent.clamp(min=-126))
    scale = torch.where(ratio.isfinite(), scale, ratio)  # rounding would make a finite number of an infinite one
    return Float8((matrix / scale).to(kind), scale, matrix.dtype)


quantise_gradient = partial(quantise, kind=GRADIENT)


def sum_of_products(grads: Sequence[Float8], weights: Sequence[Tensor]) -> Tensor:
    """Return the input gradient of a layer: the sum over its outputs of grad @ weight, which is rounded for that."""
    total = grads[0] @ quantise(weights[0])
    for grad, weight in zip(grads[1:], weights[1:]):
        total += grad @ quantise(weight)
    return total


def results(x: Tensor, weights: Sequence[Any]) -> tuple[Tensor, ...]:
    """x (..., in) by each weight (out, in), with its bias (out) or None behind it in `weights`: one (..., out) each."""
    rows, rounded, out = quantise(x.flatten(0, -2)), cast_all(weights, x.dtype), []
    for weight, bias in zip(rounded[::2], rounded[1::2]):
        y = rows @ quantise(weight).t()
        out.append(torch_private.reshaped(y if bias is None else y.add_(bias), (*x.shape[:-1], weight.size(0))))
    return tuple(out)


class _Float8Linear(torch.autograd.Function):
    """`results` as one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights[::2])
        return results(x, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        rows, flat = x.flatten(0, -2), [grad.reshape(-1, grad.size(-1)) for grad in grads]
        rounded = [*map(quantise_gradient, flat)]
        dx = sum_of_products(rounded, cast_all(weights, x.dtype)).view(x.shape) if ctx.needs_input_grad[0] else None
        wants = ctx.needs_input_grad[1:]
        operand: Any = quantise(rows) if any(wants[::2]) else None
        out: list[Tensor | None] = []
        for grad, matrix, wants_weight, wants_bias in zip(flat, rounded, wants[::2], wants[1::2]):
            out += matrix.t() @ operand if wants_weight else None, grad.sum(0) if wants_bias else None
        return dx, *cast_all(out, weights[0].dtype)


class _OfWeights(_Float8Linear):
    """Zeros with the gradients of weights and biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights[::2])
        return tuple(x.new_zeros(()).expand(*x.shape[:-1], weight.size(0)) for weight in weights[::2])


def multiply(
    x: Tensor, weights: Sequence[tuple[Tensor, Tensor | None]], compute_dtype: torch.dtype, kind: str
) -> tuple[Tensor, ...]:
    """x (..., in) by each (weight, bias), rounded to `compute_dtype` first. kind: FUSED | SPLIT."""
    x, flat = cast(x, compute_dtype), [part for pair in weights for part in pair]
    if kind == FUSED:
        return apply_to_all(_Float8Linear, x, *flat)
    out = apply_to_all(_Float8Linear, x, *(None if part is None else part.detach() for part in flat))
    return tuple(y.add_(zero) for y, zero in zip(out, apply_to_all(_OfWeights, x.detach(), *flat)))
