"""Convolutions: role layers of image classifiers, in their one-device form."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallelrun.models.layers import RoleLayer
from parallelrun.models.rounding import rounded
from parallelrun.models.vision.operations import ConvolutionOp


class Convolution(RoleLayer):
    """x (batch, inputs, height, width) -> (batch, outputs, ...). Parameters `weight` (outputs, inputs, kernel, kernel)
    and maybe `bias` (outputs), rounded to the compute dtype where they are used."""

    def __init__(self, inputs: int, operation: ConvolutionOp, compute_dtype: torch.dtype):
        super().__init__(compute_dtype)
        self.stride, self.padding = operation.stride, operation.padding
        self.weight = nn.Parameter(torch.empty(operation.outputs, inputs, operation.kernel, operation.kernel))
        self.bias = nn.Parameter(torch.empty(operation.outputs)) if operation.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(x, None if self.bias is None else self.bias.to(self.compute_dtype))

    def convolve(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution with a bias in the compute dtype."""
        dtype = self.compute_dtype
        return functional.conv2d(x.to(dtype), rounded(self.weight, dtype), bias, self.stride, self.padding)


class ColumnConvolution(Convolution):
    """A convolution whose output channels a tensor strategy may split."""

    layer_role = "column_parallel"


class RowConvolution(Convolution):
    """A convolution whose input channels a tensor strategy may split."""

    layer_role = "row_parallel"


CONVOLUTIONS = {layer.layer_role: layer for layer in (Convolution, ColumnConvolution, RowConvolution)}
